"""Base class of token mixers that apply a depthwise convolution, and then a recurrence over a document's positions.

The state of a row in the key-value cache is the window of the convolution and the float32 matrices of the recurrence.

Shapes: B batch, S sequence, T = B * S positions, R documents, N heads, H rows and E columns of a matrix,
C channels of the convolution, W positions of a window.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.nn.attention import AttentionInputs
from paddlenlp_ext.nn.short_convolution import DepthwiseKernel
from paddlenlp_ext.nn.token_mixer import TokenMixer
from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.attention.key_value_cache import KeyValueCache, LayerState, StateShapes
from paddlenlp_ext.ops.tensor_utils import gather_rows
from paddlenlp_ext.paddle_compat import is_symbolic

Parts = Sequence[paddle.Tensor]
"""Inputs of the convolution [B, S, C], and further inputs of the recurrence [B, S, ...]."""


class RecurrentMixer(TokenMixer):
    """Base class of mixers with a convolution and a recurrence.

    Attributes:
        conv1d: convolution before the recurrence.
    """

    conv1d: DepthwiseKernel

    def head_tensors(self) -> list[tuple[nn.Layer, str, int]]:
        """Return the layer, the name and the axis of the heads of each parameter with values for each head."""
        return [(self, name, 0) for name in ("A_log", "dt_bias")]

    @abstractmethod
    def keep_heads(self, index: int, num_parts: int) -> None:
        """Keep only the heads of tensor-parallel shard `index` of `num_parts`."""

    @property
    @abstractmethod
    def matrix_shape(self) -> tuple[int, int, int]:
        """Shape [N, H, E] of the matrices of one row on this rank."""

    @abstractmethod
    def recur(
        self,
        mixed_BSC: paddle.Tensor,
        others: Parts,
        layout: AttentionLayout,
        initial_RNHE: paddle.Tensor | None = None,
        overwrites: bool = False,
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Run the recurrence over the output of the convolution.

        Args:
            mixed_BSC: output of the convolution.
            others: further inputs of the recurrence.
            layout: documents of the batch.
            initial_RNHE: matrices before the documents; None for zeros.
            overwrites: whether the matrices after the documents may overwrite `initial_RNHE`.

        Returns:
            The outputs [T, N, E], and the matrices after the documents [R, N, H, E].
        """

    def mix(self, parts: Parts, inputs: AttentionInputs) -> paddle.Tensor:
        """Mix the positions of each document with the convolution and the recurrence; return [T, N, E]."""
        if inputs.cache is not None:
            return self._mix_cached(parts, inputs.cache)
        layout = inputs.layouts[None]
        if inputs.num_shared:
            return self._mix_after_prompt(parts, layout, inputs.num_shared)
        channels_BSC, *others = parts
        return self.recur(self.conv1d(channels_BSC, layout), others, layout)[0]

    def _mix_after_prompt(self, parts: Parts, layout: AttentionLayout, shared: int) -> paddle.Tensor:
        """Mix a prompt of the first `shared` positions, and then the documents, which all continue the prompt."""
        prompt = AttentionLayout.from_documents([[shared]])
        state = [paddle.zeros([1, *shape], dtype) for shape, dtype in self.state_shapes(parts[0].dtype)]
        first_TNE, state = self._continue(state, [part[:, :shared] for part in parts], prompt)
        rest_TNE, _ = self._continue(state, [part[:, shared:] for part in parts], layout)
        return paddle.concat([first_TNE, rest_TNE])

    @paddle.no_grad()
    def _mix_cached(self, parts: Parts, cache: KeyValueCache) -> paddle.Tensor:
        """Mix the new positions of each row, starting from the state of the row, and keep the new state."""
        state = cache.state(self.layer_index, self.state_shapes(parts[0].dtype))
        overwrites = cache.owns_state(self.layer_index)
        o_TNE, state = self._continue(state, parts, cache.new_documents(), overwrites)
        cache.keep_state(self.layer_index, state)
        return o_TNE

    def state_shapes(self, dtype: paddle.dtype) -> StateShapes:
        """Return the shapes and dtypes of the window of the convolution and of the matrices, for one row."""
        window = self.conv1d.window_length, self.conv1d.num_channels
        return [(window, dtype), (self.matrix_shape, paddle.float32)]

    def _continue(
        self, state: Sequence[paddle.Tensor], parts: Parts, layout: AttentionLayout, overwrites: bool = False
    ) -> tuple[paddle.Tensor, LayerState]:
        """Mix the documents of each row, starting from the state of the row.

        Args:
            state: window and matrices of each row.
            parts: inputs of the convolution, and further inputs of the recurrence.
            layout: documents of the batch.
            overwrites: whether the new matrices may overwrite `state`.

        Returns:
            The outputs [T, N, E], and the state after the last document of each row.
        """
        window_BWC, state_BNHE = state
        channels_BSC, *others = parts
        mixed_BSC, window_BWC = self.conv1d.continue_after(window_BWC, channels_BSC, layout)
        o_TNE, after_RNHE = self.recur(mixed_BSC, others, layout, _gather(state_BNHE, layout.rows()), overwrites)
        return o_TNE, (window_BWC, _gather(after_RNHE, layout.last_documents()))


def sections_of_rank(sections: Sequence[tuple[int, int]], index: int) -> list[slice]:
    """Return the slices of the channels that tensor-parallel rank `index` reads.

    Args:
        sections: number of channels and of equal parts of each section. All ranks read a section with one part.
        index: index of the rank.
    """
    slices, first = [], 0
    for size, parts in sections:
        start = first + index % parts * (size // parts)
        slices.append(slice(start, start + size // parts))
        first += size
    return slices


def _gather(x_BNHE: paddle.Tensor, rows: np.ndarray) -> paddle.Tensor:
    """Return the matrices at the indices `rows`, without a copy if `rows` selects all matrices in order."""
    if is_symbolic(x_BNHE):
        return x_BNHE  # in a static graph, each row has one document
    if np.array_equal(rows, np.arange(len(x_BNHE))):
        return x_BNHE
    return gather_rows(x_BNHE, rows)
