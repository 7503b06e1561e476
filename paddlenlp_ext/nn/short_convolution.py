"""Gated short convolution: the token mixer of most layers of LFM2 (arXiv:2511.23404).

    b, c, u = three projections of x
    y = o_proj(c * convolution(b * u))         causal, depthwise, over the last L positions of the document

The key-value cache stores b * u of each position, so that positions can be removed from the cache, copied and shared
like keys and values.

Shapes: B batch, S sequence, T = B * S positions, L taps, D hidden, P positions of a shared prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.nn.attention import AttentionInputs
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.recompute import recompute_region
from paddlenlp_ext.nn.token_mixer import MixerShape, TokenMixer
from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.attention.decode_attention import CachedLayer, VisiblePositions
from paddlenlp_ext.ops.attention.key_value_cache import KeyValueCache
from paddlenlp_ext.ops.causal_convolution import causal_convolution, document_taps
from paddlenlp_ext.ops.cpp.bf16 import activation_dtype


@dataclass(frozen=True)
class ConvolutionShape(MixerShape):
    """Sizes of a short convolution.

    Attributes:
        hidden_size: D.
        num_taps: L, the number of positions that an output depends on, itself included.
        bias: whether the linear layers and the convolution have biases.
    """

    hidden_size: int
    num_taps: int
    bias: bool = False

    def build(self, layer_index: int) -> ShortConvolution:
        return ShortConvolution(self, layer_index)

    @property
    def num_weights(self) -> int:
        return 4 * self.hidden_size**2

    @property
    def saved_size(self) -> float:
        """Number of channels of b, c, u and b * u; the output of the convolution counts as the output of the mixer."""
        return 4 * self.hidden_size


class DepthwiseKernel(nn.Layer):
    """Parameters of a causal depthwise convolution, in PyTorch's layout: `weight` [D, 1, L] and optionally `bias` [D].

    Args:
        num_channels: D.
        num_taps: L.
        has_bias: whether the convolution has a bias.
    """

    def __init__(self, num_channels: int, num_taps: int, has_bias: bool = False) -> None:
        super().__init__()
        self.num_taps = num_taps
        dtype = activation_dtype(paddle.get_default_dtype())
        self.weight = self.create_parameter([num_channels, 1, num_taps], dtype=dtype)
        self.bias = self.create_parameter([num_channels], dtype=dtype, is_bias=True) if has_bias else None

    def forward(self, x_ND: paddle.Tensor, taps_TL: np.ndarray) -> paddle.Tensor:
        """Return the convolution of the rows that the taps select, [T, D]."""
        bias = None if self.bias is None else self.bias.astype(x_ND.dtype)
        return causal_convolution(x_ND, self.weight.squeeze(1).astype(x_ND.dtype), taps_TL, bias)

    def convolve(self, x_TD: paddle.Tensor, layout: AttentionLayout, shared: int = 0) -> paddle.Tensor:
        """Return the convolution of all documents [T, D]; the first `shared` positions precede every document."""
        if not shared:
            return self(x_TD, self.taps(layout))
        prompt = AttentionLayout.from_documents([[shared]])
        before = min(shared, self.num_taps - 1)
        rows_ND = paddle.concat([x_TD[shared:], x_TD[shared - before : shared]])
        return paddle.concat([self(x_TD[:shared], self.taps(prompt)), self(rows_ND, self.taps(layout, before))])

    def taps(self, layout: AttentionLayout, before: int = 0) -> np.ndarray:
        """Return `document_taps` of a layout, which the layout caches."""
        key = "taps", self.num_taps, before
        return layout.cached(key, lambda: document_taps(layout, self.num_taps, before))


class ShortConvolution(TokenMixer):
    """Gated short convolution of one decoder layer."""

    attribute = "conv"
    input_names = ("b_proj", "c_proj", "u_proj")

    def __init__(self, shape: ConvolutionShape, layer_index: int) -> None:
        super().__init__(layer_index)
        self.num_taps = shape.num_taps
        for name in self.input_names:
            setattr(self, name, Linear(shape.hidden_size, shape.hidden_size, shape.bias))
        self.conv = DepthwiseKernel(shape.hidden_size, shape.num_taps, shape.bias)
        self.o_proj = Linear(shape.hidden_size, shape.hidden_size, shape.bias)

    def forward(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        """Mix the positions of each document; map [B, S, D] to [B, S, D]."""
        b_BSD, c_BSD, u_BSD = recompute_region("attention_column_ln", self._project, x_BSD)
        gated_BSD = b_BSD * u_BSD
        if inputs.cache is None:
            mixed_TD = self.conv.convolve(gated_BSD.flatten(0, 1), inputs.layouts[None], inputs.num_shared)
        else:
            mixed_TD = self._convolve_cached(gated_BSD, inputs.cache)
        return recompute_region("attention_row_ln", self.o_proj, c_BSD * mixed_TD.reshape(c_BSD.shape))

    def _project(self, x_BSD: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        return tuple(getattr(self, name)(x_BSD) for name in self.input_names)

    @paddle.no_grad()
    def _convolve_cached(self, gated_BSD: paddle.Tensor, cache: KeyValueCache) -> paddle.Tensor:
        """Append b * u of the new positions to the cache, in halves as keys and values, and convolve them."""
        halves = paddle.chunk(gated_BSD.unsqueeze(2), 2, axis=-1)
        cached = cache.append(self.layer_index, halves[0], halves[1], self.num_taps)
        if cached.layout is not None:
            return self._convolve_first(gated_BSD, cached)
        seen = cached.visible
        assert isinstance(seen, VisiblePositions), "short convolutions must not run in a static graph"
        stored_RD = paddle.concat([part_B1CE.flatten(0, 2) for part_B1CE in cached.tensors], axis=-1)
        return self.conv(stored_RD, _stored_taps(seen.ranges, cached.tensors[0].shape[2], self.num_taps))

    def _convolve_first(self, gated_BSD: paddle.Tensor, cached: CachedLayer) -> paddle.Tensor:
        """Convolve the first positions of a cache, which follow the prefix of the cache."""
        layout, rows_ND, before = cached.layout, gated_BSD.flatten(0, 1), 0
        assert layout is not None
        if cached.prefix is not None:
            prefix_PD = paddle.concat([part_P1E.squeeze(1) for part_P1E in cached.prefix], axis=-1)
            before = min(prefix_PD.shape[0], self.num_taps - 1)
            rows_ND = paddle.concat([rows_ND, prefix_PD[prefix_PD.shape[0] - before :]])
        return self.conv(rows_ND, self.conv.taps(layout, before))


def _stored_taps(ranges_BS4: np.ndarray, num_slots: int, num_taps: int) -> np.ndarray:
    """Return the taps [B * S, L] of new positions among the slots of all rows, int64.

    Args:
        ranges_BS4: start and end of the visible slots of the prefix, and of the visible slots of the row.
        num_slots: number of slots of a row.
        num_taps: L.
    """
    prefix_first, prefix_end, own_first, own_end = (ranges_BS4[..., index, None] for index in range(4))
    back_L = np.arange(num_taps)[::-1]
    own_BSL = own_end - 1 - back_L
    prefix_BSL = prefix_end - 1 - (back_L - (own_end - own_first))
    slots_BSL = np.where(own_BSL >= own_first, own_BSL, prefix_BSL)
    rows = np.arange(len(ranges_BS4))[:, None, None]
    is_seen = (own_BSL >= own_first) | (prefix_BSL >= prefix_first)
    taps = np.where(is_seen, rows * num_slots + slots_BSL, len(ranges_BS4) * num_slots)
    return taps.reshape(-1, num_taps).astype(np.int64)
