"""Decoding step on a GPU that fuses norms with the quantized linear layers after them (ops/norm_linear).

One kernel launch computes the residual addition, the norm, and the linear layers that read the norm. eligibility.py
checks which norms can be fused. A norm before unquantized weights is not fused, because one launch of the Triton kernel
has more Python overhead than calling the norm and Paddle's matmuls (docs/benchmarks/triton.md).

Shapes: B batch, S new positions, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import nn

from paddlenlp_ext.models.decoding.eligibility import (
    block_reason,
    fits_fused_norms,
    fused_norms_reason,
    is_plain,
    norm_readers,
    normed_blocks,
    prepared,
)
from paddlenlp_ext.nn.attention import AttentionInputs
from paddlenlp_ext.ops.frozen_linear import FrozenQuantized
from paddlenlp_ext.ops.norm_linear import norm_linear


def run_fused_norms(
    layers: nn.LayerList, start: int, stop: int, x_BSD: paddle.Tensor, inputs: AttentionInputs
) -> paddle.Tensor | None:
    """Run layers `start` to `stop` - 1 over new positions with fused norms; return None if no norm can be fused."""
    cache = inputs.cache
    if not fits_fused_norms(cache, x_BSD.shape[0] * x_BSD.shape[1], x_BSD) or not is_plain(inputs):
        return None
    key = FusedLayer, start, stop
    steps = prepared(cache, key, lambda: [*layers][start:stop], fused_norms_reason, _steps, "fused norms")
    if steps is None:
        return None
    addend_BSD = None
    for step in steps:
        if isinstance(step, FusedLayer):
            x_BSD, addend_BSD = step(x_BSD, addend_BSD, inputs)
        else:
            x_BSD, addend_BSD = step(x_BSD if addend_BSD is None else x_BSD + addend_BSD, inputs), None
    return x_BSD if addend_BSD is None else x_BSD + addend_BSD


def _steps(layers: Sequence[Any]) -> list[Any]:
    return [FusedLayer(layer) if normed_blocks(layer) else layer for layer in layers]


class FusedLayer:
    """Decoder layer that fuses each norm with the linear layers after it, if eligibility.py allows the fusion.

    Args:
        layer: a layer with norms before attention and feed-forward; its weights are captured here, and must not
            be replaced later.
    """

    def __init__(self, layer: Any) -> None:
        (attention, attention_norm), (mlp, mlp_norm) = normed_blocks(layer)
        self._attention, self._mlp = _Block(attention, attention_norm), _Block(mlp, mlp_norm)
        norms = layer.norms_by_role()
        self._scaled, self._out_norms = layer.scaled, (norms.get("attention_out_norm"), norms.get("mlp_out_norm"))

    def __call__(
        self, x_BSD: paddle.Tensor, addend_BSD: paddle.Tensor | None, inputs: AttentionInputs
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Run the layer on the hidden states `x_BSD` + `addend_BSD` (None: zero), each [B, S, D].

        Return the result as two terms, which the next layer adds.
        """
        if addend_BSD is not None and not self._attention.is_fused:
            x_BSD, addend_BSD = x_BSD + addend_BSD, None
        x_BSD, attended_BSD = self._attention(x_BSD, addend_BSD, inputs)
        x_BSD, out_BSD = self._mlp(x_BSD, self._added(attended_BSD, self._out_norms[0]))
        return x_BSD, self._added(out_BSD, self._out_norms[1])

    def _added(self, x_BSD: paddle.Tensor, norm: nn.Layer | None) -> paddle.Tensor:
        """Return the output of a block after the residual multiplier and the output norm, if there is one."""
        x_BSD = self._scaled(x_BSD)
        return x_BSD if norm is None else norm(x_BSD)


class _Block:
    """Attention or feed-forward block with the preceding norm.

    Attributes:
        is_fused: whether the norm is fused with the linear layers that read its output.
    """

    def __init__(self, block: Any, norm: Any) -> None:
        self._block, self._norm, self.is_fused = block, norm, block_reason(block, norm) is None
        readers = norm_readers(block) if self.is_fused else []
        self._linears = [FrozenQuantized(each.stored, each.bias) for each in readers]

    def __call__(
        self, x_BSD: paddle.Tensor, addend_BSD: paddle.Tensor | None, *inputs: AttentionInputs
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Normalize the sum `x + addend` and run the block; return the sum and the block's output, each [B, S, D]."""
        norm = self._norm
        if self.is_fused:
            total_BSD, projected = norm_linear(x_BSD, self._linears, norm.weight, norm.epsilon, norm.offset, addend_BSD)
            return total_BSD, self._block.from_projections(projected, *inputs)
        total_BSD, normed_BSD = (x_BSD, norm(x_BSD)) if addend_BSD is None else norm.forward_add(x_BSD, addend_BSD)
        return total_BSD, self._block(normed_BSD, *inputs)
