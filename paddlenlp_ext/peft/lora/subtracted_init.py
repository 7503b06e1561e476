"""LoRA from which the product of two initial factors, A0 and B0, is subtracted.

    y = x W^T + s (dropout(x) A^T) B^T - s (x A0^T) B0^T        delta W = s (B A - B0 A0)

PiSSA, OLoRA, LoftQ, QERA and LoRA-GA use this module. PiSSA, OLoRA and LoRA-GA start with A = A0 and B = B0, so the
initial model equals the base. In the papers, W is overwritten with W - s B0 A0. Here, an unquantized W is kept, and
the layer subtracts s (x A0^T) B0^T. The subtraction costs one more product of rank r, and has three advantages:

- With the adapter disabled, results are bitwise equal to the base's results.
- Loading an adapter does not recompute A0 and B0.
- Half-precision weights are not rounded again.

Files contain a plain LoRA of rank 2r, which any program with LoRA support can load:

    s (B A - B0 A0) = s [B, -B0] [A; A0]

`METADATA_FIELD` in adapter_config.json records the method, so that training can continue with the same method.

Shapes: r rank, in/out features of the adapted linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.lora.layers import LoRALinear
from paddlenlp_ext.peft.lora.low_rank_config import LowRankConfig
from paddlenlp_ext.sharding_spec import Style, shard_of

A_WEIGHT, B_WEIGHT = "lora_A.weight", "lora_B.weight"
A_START, B_START = "lora_A_start", "lora_B_start"


class LoRALinearWithInit(LoRALinear):
    """Linear layer with a low-rank update, from which the product of the initial factors is subtracted.

    Args:
        base, rank, scaling, dropout, seed, name: as in `LoRALinear`.
        persist_init: save A0 and B0 with the adapter; False: loading the adapter recomputes A0 and B0.
        base_is_residual: whether s B0 A0 was subtracted from the base before quantization; the layer then does not
            subtract s B0 A0 again.
    """

    lora_A_start: paddle.Tensor  # noqa: N815 - key in files
    lora_B_start: paddle.Tensor  # noqa: N815 - key in files

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
        # A0 and B0 in files must equal the factors that were subtracted from the base in float32.
        start_dtype = paddle.float32 if base_is_residual else self.dtype
        zeros_A = paddle.zeros([rank, self.in_features], dtype=start_dtype)
        zeros_B = paddle.zeros([self.out_features, rank], dtype=start_dtype)
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
        """Set A and B, and the subtracted factors A0 and B0.

        Args:
            a: A [r, in] of the unsharded layer; a sharded layer copies its shard of each argument.
            b: B [out, r] of the unsharded layer.
            removed_a: A0 [r, in]; None: equal to `a`.
            removed_b: B0 [out, r]; None: equal to `b`.
        """
        set_local_shard(self.lora_A.weight, a)
        set_local_shard(self.lora_B.weight, b)
        set_local_shard(self.lora_A_start, a if removed_a is None else removed_a)
        set_local_shard(self.lora_B_start, b if removed_b is None else removed_b)

    def adapter_forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Map x [..., in] to [..., out].

        Unless the base is a residual, the output equals the base's output exactly if A = A0, B = B0 and dropout is off.
        """
        if self.base_is_residual:
            return self.base(x) + self.lora_update(x)
        inner = paddle.matmul(x, self.lora_A_start, transpose_y=True) * self.scaling
        start = paddle.matmul(inner, self.lora_B_start, transpose_y=True)
        return self.base(x) + (self.lora_update(x) - start)

    def low_rank_factors(self) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return [A; A0] and s [B, -B0], or A and s B if the base is the residual."""
        a, b = self.lora_A.weight.astype("float32"), self.lora_B.weight.astype("float32") * self.scaling
        if self.base_is_residual:
            return a, b
        b_start = self.lora_B_start.astype("float32") * -self.scaling
        return paddle.concat([a, self.lora_A_start.astype("float32")]), paddle.concat([b, b_start], axis=1)

    def sharding_axes(self, style: Style) -> dict[str, int | None]:
        axes = super().sharding_axes(style)
        return {**axes, A_START: axes[A_WEIGHT], B_START: axes[B_WEIGHT]}


def set_local_shard(tensor: paddle.Tensor, value: paddle.Tensor) -> None:
    """Copy the unsharded `value`, or this rank's shard of it, into `tensor`."""
    shard = shard_of(tensor)
    tensor.set_value((value if shard is None else value[shard.index]).astype(tensor.dtype))


METADATA_FIELD = "paddlenlp_ext"
"""Field of adapter_config.json with the method's JSON key, and the method's options before conversion to rank 2r."""
_OPTIONS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")


@dataclass(kw_only=True)
class SubtractedInitConfig(LowRankConfig):
    """Options of LoRA variants with subtracted initial factors, and the conversion of adapter files.

    Class attributes:
        variant: JSON key that enables the method, also its name in files and in PEFT's `init_lora_weights`.
        recorded_options: options of the method that are stored under `METADATA_FIELD`.
        missing_init_reason: reason and remedy in the error message for files that lack the initial factors.
    """

    unavailable_keys: ClassVar[Mapping[str, str]] = {
        **LowRankConfig.unavailable_keys,
        "init_lora_weights": "the method computes the initial values; leave it out",
    }
    variant: ClassVar[str]
    recorded_options: ClassVar[tuple[str, ...]] = ()
    missing_init_reason: ClassVar[str]

    def recorded_fields(self, model: TrainableModel) -> dict[str, Any]:
        """Return the method's fields to save under `METADATA_FIELD`, given the model with the adapter."""
        return {name: getattr(self, name) for name in self.recorded_options}

    def with_recorded_options(self, recorded_fields: Mapping[str, Any]) -> SubtractedInitConfig:
        """Return this config with the options in `recorded_fields`."""
        return self.replace(
            **{name: recorded_fields[name] for name in self.recorded_options if name in recorded_fields}
        )

    def to_adapter_config(self, model: TrainableModel) -> dict[str, Any]:
        return to_rank_2r_fields(self.variant, super().to_adapter_config(model), self.recorded_fields(model))

    def to_stored(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        return to_rank_2r(tensors)

    def from_stored(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return from_rank_2r(tensors)

    @classmethod
    def claims(cls, fields: Mapping[str, Any]) -> bool:
        return is_rank_2r(cls.variant, fields) or fields.get("init_lora_weights") == cls.variant

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> LowRankConfig:
        if is_rank_2r(cls.variant, fields):
            config = super().from_adapter_config(from_rank_2r_fields(fields))
            assert isinstance(config, SubtractedInitConfig)
            return config.with_recorded_options(fields[METADATA_FIELD])
        init = fields.get("init_lora_weights")
        if init is not True:
            raise ValueError(f"init_lora_weights={init!r} {cls.missing_init_reason}")
        return super().from_adapter_config(fields)


def to_rank_2r(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the adapter's tensors to a plain LoRA of rank 2r: [A; A0] and [B, -B0]."""
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
    """Convert a plain LoRA of rank 2r back to the adapter's tensors (inverse of `to_rank_2r`)."""
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
    """Convert LoRA's fields of adapter_config.json to rank 2r with the same scale s.

    Args:
        variant: JSON key that enables the method.
        fields: LoRA's fields for rank r; the options are also saved under `METADATA_FIELD`.
        recorded_fields: additional fields to save under `METADATA_FIELD`.
    """
    alpha_factor = 2**0.5 if fields["use_rslora"] else 2  # s = alpha / sqrt(r) or alpha / r
    return {
        **fields,
        METADATA_FIELD: {"switch": variant, **{name: fields[name] for name in _OPTIONS}, **recorded_fields},
        "r": 2 * fields["r"],
        "rank_pattern": {name: 2 * rank for name, rank in fields["rank_pattern"].items()},
        "lora_alpha": alpha_factor * fields["lora_alpha"],
        "alpha_pattern": {name: alpha_factor * alpha for name, alpha in fields["alpha_pattern"].items()},
    }


def is_rank_2r(variant: str, fields: Mapping[str, Any]) -> bool:
    """Return whether `to_rank_2r_fields` created the fields, for the method `variant`."""
    metadata = fields.get(METADATA_FIELD)
    return isinstance(metadata, Mapping) and metadata.get("switch") == variant


def from_rank_2r_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `to_rank_2r_fields`: return LoRA's fields for rank r."""
    options = {name: value for name, value in fields[METADATA_FIELD].items() if name in _OPTIONS}
    return {**{name: value for name, value in fields.items() if name != METADATA_FIELD}, **options}
