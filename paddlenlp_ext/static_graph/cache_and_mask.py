"""Key-value cache and attention mask of a traced program.

Shapes: B batch, S new positions, P slots of the cache, C = P + S, K key-value heads, N query heads, H and E channels of
keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.ops.attention.decode_attention import CachedLayer
from paddlenlp_ext.ops.attention.key_value_cache import KeyValueCache, LayerState, StateShapes
from paddlenlp_ext.static_graph.graph_documents import GraphDocuments


class GraphCache(KeyValueCache):
    """Key-value cache of a traced program.

    The position of a token is its index in the row, not counting padding and unused slots.

    Args:
        input_ids_BS: new tokens.
        mask_BC: 1 for tokens, 0 for padding and unused slots.
        cached: cached keys and values of each layer with attention.
        states: tensors of the state of each layer with a state.

    Attributes:
        new_tensors: new keys and values of the layers that have been traced so far.
        new_states: new tensors of the states of the layers that have been traced so far.
    """

    def __init__(
        self,
        input_ids_BS: paddle.Tensor,
        mask_BC: paddle.Tensor,
        cached: Sequence[paddle.Tensor],
        states: Sequence[paddle.Tensor] = (),
    ) -> None:
        self._mask_BC, self._cached, self.new_tensors = mask_BC, cached, list[paddle.Tensor]()
        self._states, self.new_states = states, list[paddle.Tensor]()
        self._contents: dict[int, tuple[paddle.Tensor, paddle.Tensor]] = {}
        num_slots, length = paddle.shape(mask_BC)[1], paddle.shape(input_ids_BS)[1]
        self._length = num_slots - length
        positions_BC = paddle.clip(paddle.cumsum(mask_BC, axis=1) - 1, min=0)
        self._position_ids_BS = positions_BC[:, self._length :]
        self._distances_BSC = self._position_ids_BS.unsqueeze(2) - positions_BC.unsqueeze(1)
        slots_C = paddle.arange(num_slots)
        later_S1 = paddle.arange(self._length, num_slots).unsqueeze(1)
        self._visible_BSC = paddle.logical_and(mask_BC.astype("bool").unsqueeze(1), slots_C <= later_S1)
        self._is_own_SC = slots_C == later_S1
        self._visible: dict[int | None, GraphSlots] = {}
        self._documents = GraphDocuments(mask_BC[:, self._length :].astype("bool"))

    @property
    def key_starts(self) -> paddle.Tensor:
        """Index of the first token of each row, int64 [B]."""
        return paddle.argmax(self._mask_BC, axis=1)

    @property
    def length(self) -> Any:
        """Number of cached positions, including padding and unused slots."""
        return self._length

    def next_positions(self, count: int) -> paddle.Tensor:
        """Return the positions of the `count` new tokens, int64 [B, S]; padding gets position 0."""
        return self._position_ids_BS

    def begin_pass(self, num_new: int) -> None:
        """Do nothing: the program reads the number of new positions from the shape of its inputs."""

    def note_frequency_sets(self, frequency_sets: tuple[bool, ...]) -> None:
        """Do nothing: `StaticModel` checks the rotary frequencies when it runs the program."""

    def append(self, layer_index: int, k_BSKH: paddle.Tensor, v_BSKE: paddle.Tensor, window: int | None) -> CachedLayer:
        """Append new keys and values to the cache of a layer, and return the cached and new keys and values."""
        new = [new_BSKH.transpose([0, 2, 1, 3]) for new_BSKH in (k_BSKH, v_BSKE)]
        first = len(self.new_tensors)  # layers that read other layers' keys and values do not store tensors
        self.new_tensors += new
        cached = self._cached[first : first + 2]
        keys_BKCH, values_BKCE = (paddle.concat(list(pair), axis=2) for pair in zip(cached, new, strict=True))
        self._contents[layer_index] = keys_BKCH, values_BKCE
        return self.contents(layer_index, k_BSKH, v_BSKE, window)

    def contents(
        self, layer_index: int, k_BSKH: paddle.Tensor, v_BSKE: paddle.Tensor, window: int | None
    ) -> CachedLayer:
        """Return the cached and new keys and values of a layer that has appended its keys and values."""
        return CachedLayer(self._contents[layer_index], prefix=None, visible=self._visible_slots(window))

    def new_documents(self) -> Any:
        """Return the documents of the new positions."""
        return self._documents

    def state(self, layer_index: int, shapes: StateShapes) -> LayerState:
        """Return the state of the next layer with a state."""
        first = len(self.new_states)
        return tuple(self._states[first : first + len(shapes)])

    def keep_state(self, layer_index: int, state: LayerState) -> None:
        """Return the state of a layer as an output of the program."""
        self.new_states += state

    def derived(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, which depends only on weights; the inference engine computes it only once."""
        return make()

    def _visible_slots(self, window: int | None) -> GraphSlots:
        if window not in self._visible:
            visible_BSC = self._visible_BSC
            if window is not None:
                visible_BSC = paddle.logical_and(visible_BSC, self._distances_BSC < window)
            # Padding positions attend to themselves, so that their unused attention outputs are finite.
            visible_BSC = paddle.logical_or(visible_BSC, self._is_own_SC)
            self._visible[window] = GraphSlots(visible_BSC, self._distances_BSC)
        return self._visible[window]


class GraphSlots:
    """Cache slots visible to each new position of a traced program (`ops.attention.decode_attention.VisibleSlots`)."""

    def __init__(self, visible_BSC: paddle.Tensor, distances_BSC: paddle.Tensor) -> None:
        self._distances_BSC = distances_BSC
        self._bias_BSC = paddle.where(visible_BSC, paddle.zeros([]), paddle.full([], float("-inf")))

    def bias(self, num_slots: int) -> paddle.Tensor:
        """Return the attention bias, fp32 [B, S, C]: 0 for visible slots and -inf for hidden slots."""
        return self._bias_BSC

    def linear_bias(self, num_slots: int, slopes_N: np.ndarray) -> paddle.Tensor:
        """Return the ALiBi bias, fp32 [B, N, S, C]: the negative slope of each head times the distance to each slot."""
        slopes_1N11 = paddle.to_tensor(slopes_N.astype(np.float32)).reshape([1, -1, 1, 1])
        return -slopes_1N11 * self._distances_BSC.unsqueeze(1).astype("float32")
