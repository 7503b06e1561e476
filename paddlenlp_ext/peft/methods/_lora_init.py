"""LoRA that does not start at zero: a start (A0, B0) is taken off again, so that the model begins as its base.

    y = x W^T + s (dropout(x) A^T) B^T - s (x A0^T) B0^T        delta W = s (B A - B0 A0)

The papers that start so write W - s B0 A0 over the base. The same model is had without touching it: switched off it is
the base to the bit, nothing has to be computed again when it is loaded, and half-precision weights are not rounded a
second time. The price is a second product of rank r.

    s (B A - B0 A0) = s [B, -B0] [A; A0]

is a plain LoRA of rank 2r, and that is what files hold (offset_files.py).

Shapes: r rank, in/out features of the adapted linear.

LoRA that counts from a start of its own (offset.py), as files hold it: a plain LoRA of rank 2r.

    s (B A - B0 A0) = s [B, -B0] [A; A0]

Every reader of LoRA can put that over the original base. A field of our own in adapter_config.json says which method
the halves are of, so that it can be gone on with as that method.

Shapes: r rank, in/out features of the adapted linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.peft.methods.lora import LoRAConfig, LoRALinear
from paddlenlp_ext.sharding_spec import Style, shard_of

A_WEIGHT, B_WEIGHT = "lora_A.weight", "lora_B.weight"
A_START, B_START = "lora_A_start", "lora_B_start"


class LoRALinearWithInit(LoRALinear):
    """A linear with a low-rank update that counts from a start of its own.

    Args:
        base, rank, scaling, dropout, seed, name: as `LoRALinear`'s.
        keep_start: whether the start belongs to the adapter's state; without, it can be computed again.
        base_is_residual: whether the base was quantized without the start, so that it is not to be taken off again.
    """

    def __init__(
        self,
        base: nn.Layer,
        rank: int,
        scaling: float,
        dropout: float,
        seed: int,
        name: str,
        persist_init: bool = True,
        base_is_residual: bool = False,
    ) -> None:
        super().__init__(base, rank, scaling, dropout, seed, name)
        self.base_is_residual = base_is_residual
        # The start of a base that lacks it is exactly what was taken off.
        start_dtype = paddle.float32 if base_is_residual else self.dtype
        zeros_A = paddle.zeros([rank, base.in_features], dtype=start_dtype)
        zeros_B = paddle.zeros([base.out_features, rank], dtype=start_dtype)
        self.register_buffer(A_START, zeros_A, persistable=persist_init)
        self.register_buffer(B_START, zeros_B, persistable=persist_init)

    @paddle.no_grad()
    def set_initial_factors(
        self,
        a: paddle.Tensor,
        b: paddle.Tensor,
        removed_a: paddle.Tensor | None = None,
        removed_b: paddle.Tensor | None = None,
    ) -> None:
        """Begin at A = `a` [r, in] and B = `b` [out, r], and take s B A off, or what is given of the same shapes.

        All are those of the whole layer; of one that is cut, this part's are taken.
        """
        set_local_shard(self.lora_A.weight, a)
        set_local_shard(self.lora_B.weight, b)
        set_local_shard(self.lora_A_start, a if removed_a is None else removed_a)
        set_local_shard(self.lora_B_start, b if removed_b is None else removed_b)

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """[..., in] to [..., out]. The two updates meet first: at the start they cancel to exactly nothing."""
        if self.base_is_residual:
            return self.base(x) + self.lora_update(x)
        inner = paddle.matmul(x, self.lora_A_start, transpose_y=True) * self.scaling
        start = paddle.matmul(inner, self.lora_B_start, transpose_y=True)
        return self.base(x) + (self.lora_update(x) - start)

    def low_rank_factors(self) -> tuple[paddle.Tensor, paddle.Tensor]:
        """[A; A0] and s [B, -B0]; A and s B where the base lacks the start."""
        a, b = super().low_rank_factors()
        if self.base_is_residual:
            return a, b
        b_start = self.lora_B_start.astype("float32") * -self.scaling
        return paddle.concat([a, self.lora_A_start.astype("float32")]), paddle.concat([b, b_start], axis=1)

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        """The start is cut as what starts from it."""
        cuts = super().sharding_axes(style)
        return {**cuts, A_START: cuts[A_WEIGHT], B_START: cuts[B_WEIGHT]}


def set_local_shard(tensor: paddle.Tensor, value: paddle.Tensor) -> None:
    """Give a tensor its values, or where it is cut, its part of them."""
    cut = shard_of(tensor)
    tensor.set_value((value if cut is None else value[cut.index]).astype(tensor.dtype))


METADATA_FIELD = "paddlenlp_ext"
"""Our own field of adapter_config.json: which variant the halves belong to, and its options before doubling."""
_OPTIONS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")


@dataclass(kw_only=True)
class LoRAWithInitConfig(LoRAConfig):
    """Options of a LoRA that counts from a start of its own, and how it is written and read.

    Class attributes:
        variant: the method's JSON switch; files name the method by it, and `init_lora_weights` of Hugging Face PEFT
            does.
        noted_options: the method's own options that files name too.
        lost_start: why the start can't be had from PEFT's own files of the method, in the words behind
            "init_lora_weights='...' ".
    """

    refines: ClassVar[str | None] = "lora"
    variant: ClassVar[str]
    recorded_options: ClassVar[tuple[str, ...]] = ()
    missing_init_reason: ClassVar[str]

    def recorded_fields(self, model: nn.Layer) -> dict[str, Any]:
        """What a file has to say of the method beside LoRA's options. `model` carries the adapter."""
        return {name: getattr(self, name) for name in self.recorded_options}

    def with_recorded_options(self, recorded_fields: Mapping[str, Any]) -> LoRAWithInitConfig:
        """This config with what `recorded_fields` wrote into the file that it is read from."""
        return replace(
            self, **{name: recorded_fields[name] for name in self.recorded_options if name in recorded_fields}
        )

    def to_adapter_config(self, model: nn.Layer) -> dict[str, Any]:
        return to_rank_2r_fields(self.variant, super().to_adapter_config(model), self.recorded_fields(model))

    def to_stored(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        return to_rank_2r(tensors)

    def from_stored(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return from_rank_2r(tensors)

    @classmethod
    def claims(cls, fields: Mapping[str, Any]) -> bool:
        return is_rank_2r(cls.variant, fields) or fields.get("init_lora_weights") == cls.variant

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> LoRAConfig:
        if is_rank_2r(cls.variant, fields):
            config = super().from_adapter_config(from_rank_2r_fields(fields))
            assert isinstance(config, LoRAWithInitConfig)
            return config.with_recorded_options(fields[METADATA_FIELD])
        start = fields.get("init_lora_weights")
        if start is not True:
            raise ValueError(f"init_lora_weights={start!r} {cls.missing_init_reason}")
        return super().from_adapter_config(fields)


def to_rank_2r(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The adapter's tensors as those of a plain LoRA of rank 2r: [A; A0] and [B, -B0]."""
    stored = {}
    for name, tensor in tensors.items():
        if name.endswith(A_WEIGHT):
            start = tensors[name.removesuffix(A_WEIGHT) + A_START]
            stored[name] = paddle.concat([tensor.astype(start.dtype), start])
        elif name.endswith(B_WEIGHT):
            start = tensors[name.removesuffix(B_WEIGHT) + B_START]
            stored[name] = paddle.concat([tensor.astype(start.dtype), -start], axis=1)
    return stored


def from_rank_2r(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The reverse of `to_rank_2r`; a tensor of another name stays, to be named as a stranger by whoever loads it."""
    own = {}
    for name, array in tensors.items():
        if name.endswith(A_WEIGHT):
            own[name], own[name.removesuffix(A_WEIGHT) + A_START] = np.split(array, [len(array) // 2])
        elif name.endswith(B_WEIGHT):
            own[name], start = np.split(array, [array.shape[1] // 2], axis=1)
            own[name.removesuffix(B_WEIGHT) + B_START] = -start
        else:
            own[name] = array
    return own


def to_rank_2r_fields(variant: str, fields: Mapping[str, Any], recorded_fields: Mapping[str, Any]) -> dict[str, Any]:
    """LoRA's fields of adapter_config.json for a rank of 2r and the same s; the originals are under `METADATA_FIELD`.

    `recorded_fields` stands there too: what the variant alone has to know again.
    """
    wider = 2**0.5 if fields["use_rslora"] else 2  # s = alpha / sqrt(r) or alpha / r
    return {
        **fields,
        METADATA_FIELD: {"switch": variant, **{name: fields[name] for name in _OPTIONS}, **recorded_fields},
        "r": 2 * fields["r"],
        "rank_pattern": {name: 2 * rank for name, rank in fields["rank_pattern"].items()},
        "lora_alpha": wider * fields["lora_alpha"],
        "alpha_pattern": {name: wider * alpha for name, alpha in fields["alpha_pattern"].items()},
    }


def is_rank_2r(variant: str, fields: Mapping[str, Any]) -> bool:
    """Whether `to_rank_2r_fields` wrote this, for that variant."""
    mark = fields.get(METADATA_FIELD)
    return isinstance(mark, Mapping) and mark.get("switch") == variant


def from_rank_2r_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of `to_rank_2r_fields`."""
    options = {name: value for name, value in fields[METADATA_FIELD].items() if name in _OPTIONS}
    return {**{name: value for name, value in fields.items() if name != METADATA_FIELD}, **options}
