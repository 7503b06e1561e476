"""Gated short convolution: the token mixer of most layers of LFM2 (arXiv:2511.23404).

    b, c, u = three projections of x
    y = o_proj(c * convolution(b * u))         causal, depthwise, over the last L positions of the document

The key-value cache keeps the window of each row, b * u of its last L - 1 positions, as the state of the layer.

Shapes: B batch, S sequence, P positions of a shared prompt, L taps, W = L - 1 positions of a window, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import paddle
from paddle import nn

from paddlenlp_ext.nn.attention import AttentionInputs
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.recompute import recompute_region
from paddlenlp_ext.nn.token_mixer import MixerShape, TokenMixer
from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.attention.key_value_cache import KeyValueCache, StateShapes
from paddlenlp_ext.ops.causal_convolution import causal_convolution, document_taps
from paddlenlp_ext.ops.causal_convolution.taps import Taps
from paddlenlp_ext.ops.cpp.bf16 import activation_dtype
from paddlenlp_ext.ops.tensor_utils import gather_rows, select
from paddlenlp_ext.paddle_compat import axis_sizes


@dataclass(frozen=True)
class ConvolutionShape(MixerShape):
    """Sizes of a short convolution.

    Attributes:
        hidden_size: D.
        num_taps: L, the number of positions that an output depends on, including its own.
        bias: whether the linear layers and the convolution have biases.
    """

    kind = "short convolution"

    hidden_size: int
    num_taps: int
    bias: bool = False

    def build(self, layer_index: int) -> ShortConvolution:
        return ShortConvolution(self, layer_index)

    @property
    def num_weights(self) -> int:
        return 4 * self.hidden_size**2

    @property
    def output_size(self) -> int:
        return self.hidden_size

    def saved_size(self, in_cpp: bool) -> float:
        """Count the channels of b, c, u and b * u, and of the output of the convolution."""
        return 5 * self.hidden_size


class DepthwiseKernel(nn.Layer):
    """Parameters of a causal depthwise convolution, in PyTorch's layout: `weight` [D, 1, L] and optionally `bias` [D].

    Args:
        num_channels: D.
        num_taps: L.
        has_bias: whether the convolution has a bias.

    Attributes:
        channels: slices of the channels that this tensor-parallel rank convolves; None: all channels.
    """

    channels: Sequence[slice] | None = None

    def __init__(self, num_channels: int, num_taps: int, has_bias: bool = False) -> None:
        super().__init__()
        dtype = activation_dtype(paddle.get_default_dtype())
        self.weight = self.create_parameter([num_channels, 1, num_taps], dtype=dtype)
        self.bias = self.create_parameter([num_channels], dtype=dtype, is_bias=True) if has_bias else None

    @property
    def window_length(self) -> int:
        """W, the number of earlier positions that an output depends on."""
        return self.weight.shape[2] - 1

    @property
    def num_channels(self) -> int:
        """Number of channels on this rank."""
        if self.channels is None:
            return self.weight.shape[0]
        return sum(channels.stop - channels.start for channels in self.channels)

    def forward(self, x_BSD: paddle.Tensor, layout: AttentionLayout) -> paddle.Tensor:
        """Convolve each document; map [B, S, D] to [B, S, D]."""
        return self._convolve(x_BSD.flatten(0, 1), self._taps(layout, has_windows=False)).reshape(axis_sizes(x_BSD))

    def continue_after(
        self, window_BWD: paddle.Tensor, x_BSD: paddle.Tensor, layout: AttentionLayout
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Convolve each document as the continuation of its row's window.

        Returns:
            The convolution [B, S, D], and the window [B, W, D] after the last document of each row.
        """
        rows_ND = paddle.concat([x_BSD.flatten(0, 1), window_BWD.flatten(0, 1)])
        taps = self._taps(layout, has_windows=True)
        last_BL = taps.rows[layout.last_positions()]
        after_BWD = gather_rows(rows_ND, last_BL[:, 1:].flatten()).reshape(window_BWD.shape)
        return self._convolve(rows_ND, taps).reshape(axis_sizes(x_BSD)), after_BWD

    def _convolve(self, rows_ND: paddle.Tensor, taps: Taps) -> paddle.Tensor:
        bias = None if self.bias is None else select(self.bias, self.channels, axis=0).astype(rows_ND.dtype)
        weight_DL = select(self.weight.squeeze(1), self.channels, axis=0).astype(rows_ND.dtype)
        return causal_convolution(rows_ND, weight_DL, taps, bias)

    def _taps(self, layout: AttentionLayout, has_windows: bool) -> Taps:
        num_taps = self.weight.shape[2]
        key = "taps", num_taps, has_windows
        return layout.cached(key, lambda: document_taps(layout, num_taps, has_windows))


class ShortConvolution(TokenMixer):
    """Gated short convolution of one decoder layer."""

    attribute = "conv"
    input_names = ("b_proj", "c_proj", "u_proj")

    def __init__(self, shape: ConvolutionShape, layer_index: int) -> None:
        super().__init__(layer_index)
        for name in self.input_names:
            setattr(self, name, Linear(shape.hidden_size, shape.hidden_size, shape.bias))
        self.conv = DepthwiseKernel(shape.hidden_size, shape.num_taps, shape.bias)
        self.o_proj = Linear(shape.hidden_size, shape.hidden_size, shape.bias)

    def forward(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        """Mix the positions of each document; map [B, S, D] to [B, S, D]."""
        b_BSD, c_BSD, u_BSD = recompute_region("attention_column_ln", self._project, x_BSD)
        gated_BSD = b_BSD * u_BSD
        if inputs.cache is not None:
            mixed_BSD = self._convolve_cached(gated_BSD, inputs.cache)
        elif inputs.num_shared:
            mixed_BSD = self._convolve_after_prompt(gated_BSD, inputs.layouts[None], inputs.num_shared)
        else:
            mixed_BSD = self.conv(gated_BSD, inputs.layouts[None])
        return recompute_region("attention_row_ln", self.o_proj, c_BSD * mixed_BSD)

    def state_shapes(self, dtype: paddle.dtype) -> StateShapes:
        return [((self.conv.window_length, self.conv.num_channels), dtype)]

    def _project(self, x_BSD: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        return tuple(getattr(self, name)(x_BSD) for name in self.input_names)

    def _convolve_after_prompt(self, gated_1SD: paddle.Tensor, layout: AttentionLayout, shared: int) -> paddle.Tensor:
        """Convolve a prompt of the first `shared` positions, and then the documents, which all continue the prompt."""
        prompt = AttentionLayout.from_documents([[shared]])
        zeros_1WD = paddle.zeros([1, self.conv.window_length, gated_1SD.shape[2]], gated_1SD.dtype)
        mixed_1PD, window_1WD = self.conv.continue_after(zeros_1WD, gated_1SD[:, :shared], prompt)
        rest_1SD, _ = self.conv.continue_after(window_1WD, gated_1SD[:, shared:], layout)
        return paddle.concat([mixed_1PD, rest_1SD], axis=1)

    @paddle.no_grad()
    def _convolve_cached(self, gated_BSD: paddle.Tensor, cache: KeyValueCache) -> paddle.Tensor:
        """Convolve the new positions of each row as the continuation of its window, and keep the new window."""
        (window_BWD,) = cache.state(self.layer_index, self.state_shapes(gated_BSD.dtype))
        mixed_BSD, window_BWD = self.conv.continue_after(window_BWD, gated_BSD, cache.new_documents())
        cache.keep_state(self.layer_index, (window_BWD,))
        return mixed_BSD
