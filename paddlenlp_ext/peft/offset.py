"""LoRA that does not start at zero: a start (A0, B0) is taken off again, so that the model begins as its base.

    y = x W^T + s (dropout(x) A^T) B^T - s (x A0^T) B0^T        delta W = s (B A - B0 A0)

The papers that start so write W - s B0 A0 over the base. The same model is had without touching it: switched off it is
the base to the bit, nothing has to be computed again when it is loaded, and half-precision weights are not rounded a
second time. The price is a second product of rank r.

    s (B A - B0 A0) = s [B, -B0] [A; A0]

is a plain LoRA of rank 2r, and that is what files hold: every reader of LoRA can put them over the original base.

Shapes: r rank, in/out features of the adapted linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.peft.lora import LoRALinear
from paddlenlp_ext.plan import Style

MARK = "paddlenlp_ext"
"""Our own field of adapter_config.json: which variant the halves belong to, and its options before doubling."""
_OPTIONS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
_A, _B = "lora_A.weight", "lora_B.weight"
A_START, B_START = "lora_A_start", "lora_B_start"


class OffsetLoRALinear(LoRALinear):
    """A linear with a low-rank update that counts from a start of its own.

    Args:
        base, rank, scaling, dropout, seed, name: as `LoRALinear`'s.
        keep_start: whether the start belongs to the adapter's state; without, it can be computed again.
        base_lacks_start: whether the base was quantized without the start, so that it is not to be taken off again.
    """

    def __init__(
        self,
        base: nn.Layer,
        rank: int,
        scaling: float,
        dropout: float,
        seed: int,
        name: str,
        keep_start: bool = True,
        base_lacks_start: bool = False,
    ) -> None:
        super().__init__(base, rank, scaling, dropout, seed, name)
        self.base_lacks_start = base_lacks_start
        # The start of a base that lacks it is exactly what was taken off.
        self.start_dtype = paddle.float32 if base_lacks_start else self.dtype
        zeros_A = paddle.zeros([rank, base.in_features], dtype=self.start_dtype)
        zeros_B = paddle.zeros([base.out_features, rank], dtype=self.start_dtype)
        self.register_buffer(A_START, zeros_A, persistable=keep_start)
        self.register_buffer(B_START, zeros_B, persistable=keep_start)

    @paddle.no_grad()
    def start_at(
        self,
        a: paddle.Tensor,
        b: paddle.Tensor,
        taken_a: paddle.Tensor | None = None,
        taken_b: paddle.Tensor | None = None,
    ) -> None:
        """Begin at A = `a` [r, in] and B = `b` [out, r], and take s B A off, or what is given of the same shapes."""
        for tensor, value in ((self.lora_A.weight, a), (self.lora_B.weight, b)):
            tensor.set_value(value.astype(self.dtype))
        self.lora_A_start.set_value((a if taken_a is None else taken_a).astype(self.start_dtype))
        self.lora_B_start.set_value((b if taken_b is None else taken_b).astype(self.start_dtype))

    def adapted(self, x: paddle.Tensor) -> paddle.Tensor:
        """[..., in] to [..., out]. The two updates meet first: at the start they cancel to exactly nothing."""
        if self.base_lacks_start:
            return self.base(x) + self.update(x)
        inner = paddle.matmul(x, self.lora_A_start, transpose_y=True) * self.scaling
        start = paddle.matmul(inner, self.lora_B_start, transpose_y=True)
        return self.base(x) + (self.update(x) - start)

    def low_rank_factors(self) -> tuple[paddle.Tensor, paddle.Tensor]:
        """[A; A0] and s [B, -B0]; A and s B where the base lacks the start."""
        a, b = super().low_rank_factors()
        if self.base_lacks_start:
            return a, b
        b_start = self.lora_B_start.astype("float32") * -self.scaling
        return paddle.concat([a, self.lora_A_start.astype("float32")]), paddle.concat([b, b_start], axis=1)

    def placements(self, style: Style) -> dict[str, int | None]:
        """The start is cut as what starts from it."""
        cuts = super().placements(style)
        return {**cuts, A_START: cuts[_A], B_START: cuts[_B]}


def doubled(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The adapter's tensors as those of a plain LoRA of rank 2r: [A; A0] and [B, -B0]."""
    stored = {}
    for name, tensor in tensors.items():
        if name.endswith(_A):
            start = tensors[name.removesuffix(_A) + A_START]
            stored[name] = paddle.concat([tensor.astype(start.dtype), start])
        elif name.endswith(_B):
            start = tensors[name.removesuffix(_B) + B_START]
            stored[name] = paddle.concat([tensor.astype(start.dtype), -start], axis=1)
    return stored


def halved(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The reverse of `doubled`; a tensor of another name stays, to be named as a stranger by whoever loads it."""
    own = {}
    for name, array in tensors.items():
        if name.endswith(_A):
            own[name], own[name.removesuffix(_A) + A_START] = np.split(array, [len(array) // 2])
        elif name.endswith(_B):
            own[name], start = np.split(array, [array.shape[1] // 2], axis=1)
            own[name.removesuffix(_B) + B_START] = -start
        else:
            own[name] = array
    return own


def doubled_fields(switch: str, fields: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """LoRA's fields of adapter_config.json for a rank of 2r and the same s; what they were stands under `MARK`.

    `more` stands there too: what the variant alone has to know again.
    """
    wider = 2**0.5 if fields["use_rslora"] else 2  # s = alpha / sqrt(r) or alpha / r
    return {
        **fields,
        MARK: {"switch": switch, **{name: fields[name] for name in _OPTIONS}, **(more or {})},
        "r": 2 * fields["r"],
        "rank_pattern": {name: 2 * rank for name, rank in fields["rank_pattern"].items()},
        "lora_alpha": wider * fields["lora_alpha"],
        "alpha_pattern": {name: wider * alpha for name, alpha in fields["alpha_pattern"].items()},
    }


def is_doubled(switch: str, fields: Mapping[str, Any]) -> bool:
    """Whether `doubled_fields` wrote this, for that variant."""
    mark = fields.get(MARK)
    return isinstance(mark, Mapping) and mark.get("switch") == switch


def halved_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of `doubled_fields`."""
    options = {name: value for name, value in fields[MARK].items() if name in _OPTIONS}
    return {**{name: value for name, value in fields.items() if name != MARK}, **options}
