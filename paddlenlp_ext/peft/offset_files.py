"""LoRA that counts from a start of its own (offset.py), as files hold it: a plain LoRA of rank 2r.

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

from paddlenlp_ext.peft.lora import LoRAConfig
from paddlenlp_ext.peft.offset import A_START, A_WEIGHT, B_START, B_WEIGHT

MARK = "paddlenlp_ext"
"""Our own field of adapter_config.json: which variant the halves belong to, and its options before doubling."""
_OPTIONS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")


@dataclass(kw_only=True)
class OffsetLoRAConfig(LoRAConfig):
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
    noted_options: ClassVar[tuple[str, ...]] = ()
    lost_start: ClassVar[str]

    def noted(self, model: nn.Layer) -> dict[str, Any]:
        """What a file has to say of the method beside LoRA's options. `model` carries the adapter."""
        return {name: getattr(self, name) for name in self.noted_options}

    def as_noted(self, noted: Mapping[str, Any]) -> OffsetLoRAConfig:
        """This config with what `noted` wrote into the file that it is read from."""
        return replace(self, **{name: noted[name] for name in self.noted_options if name in noted})

    def to_adapter_config(self, model: nn.Layer) -> dict[str, Any]:
        return doubled_fields(self.variant, super().to_adapter_config(model), self.noted(model))

    def to_stored(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        return doubled(tensors)

    def from_stored(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return halved(tensors)

    @classmethod
    def claims(cls, fields: Mapping[str, Any]) -> bool:
        return is_doubled(cls.variant, fields) or fields.get("init_lora_weights") == cls.variant

    @classmethod
    def from_adapter_config(cls, fields: Mapping[str, Any]) -> LoRAConfig:
        if is_doubled(cls.variant, fields):
            config = super().from_adapter_config(halved_fields(fields))
            assert isinstance(config, OffsetLoRAConfig)
            return config.as_noted(fields[MARK])
        start = fields.get("init_lora_weights")
        if start is not True:
            raise ValueError(f"init_lora_weights={start!r} {cls.lost_start}")
        return super().from_adapter_config(fields)


def doubled(tensors: Mapping[str, Any]) -> dict[str, Any]:
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


def halved(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The reverse of `doubled`; a tensor of another name stays, to be named as a stranger by whoever loads it."""
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


def doubled_fields(variant: str, fields: Mapping[str, Any], noted: Mapping[str, Any]) -> dict[str, Any]:
    """LoRA's fields of adapter_config.json for a rank of 2r and the same s; what they were stands under `MARK`.

    `noted` stands there too: what the variant alone has to know again.
    """
    wider = 2**0.5 if fields["use_rslora"] else 2  # s = alpha / sqrt(r) or alpha / r
    return {
        **fields,
        MARK: {"switch": variant, **{name: fields[name] for name in _OPTIONS}, **noted},
        "r": 2 * fields["r"],
        "rank_pattern": {name: 2 * rank for name, rank in fields["rank_pattern"].items()},
        "lora_alpha": wider * fields["lora_alpha"],
        "alpha_pattern": {name: wider * alpha for name, alpha in fields["alpha_pattern"].items()},
    }


def is_doubled(variant: str, fields: Mapping[str, Any]) -> bool:
    """Whether `doubled_fields` wrote this, for that variant."""
    mark = fields.get(MARK)
    return isinstance(mark, Mapping) and mark.get("switch") == variant


def halved_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of `doubled_fields`."""
    options = {name: value for name, value in fields[MARK].items() if name in _OPTIONS}
    return {**{name: value for name, value in fields.items() if name != MARK}, **options}
