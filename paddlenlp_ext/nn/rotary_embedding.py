"""Tables of cosines and sines for rotary position embedding; nn/rope.py computes the inverse frequencies.

Shapes: B batch, S sequence, R rotated channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle

from paddlenlp_ext.nn.rope import LENGTH_DEPENDENT, RopeSettings, dynamic_in_graph, short_context
from paddlenlp_ext.paddle_compat import is_symbolic


class RotaryEmbedding:
    """Tables of cosines and sines for one `RopeSettings`."""

    def __init__(self, settings: RopeSettings) -> None:
        self.settings = settings
        self._depends_on_length = settings.rope_type in LENGTH_DEPENDENT
        self._fixed = settings.inverse_frequencies(0)  # raises errors before the first batch

    def __call__(self, position_ids_BS: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return (cos, sin), each fp32 [B, S, R]."""
        if self._depends_on_length and is_symbolic(position_ids_BS):
            inverse_frequencies_F, amplitude = self._inverse_frequencies_in_graph(position_ids_BS.max() + 1)
            frequencies_R = paddle.concat([inverse_frequencies_F, inverse_frequencies_F])
        else:
            length = int(position_ids_BS.max()) + 1 if self._depends_on_length else 0
            inverse_frequencies, amplitude = self.inverse_frequencies(length)
            frequencies_R = paddle.to_tensor(np.concatenate([inverse_frequencies, inverse_frequencies]))
        angles_BSR = position_ids_BS.astype("float32").unsqueeze(-1) * frequencies_R
        tables = angles_BSR.cos(), angles_BSR.sin()
        return tables if amplitude == 1.0 else (tables[0] * amplitude, tables[1] * amplitude)

    def inverse_frequencies(self, length: int) -> tuple[np.ndarray, float]:
        """Return the fp32 inverse frequencies [R / 2] for `length` tokens, and the factor of cosines and sines."""
        return self.settings.inverse_frequencies(length) if self._depends_on_length else self._fixed

    def _inverse_frequencies_in_graph(self, length: paddle.Tensor) -> tuple[paddle.Tensor, float]:
        """Return `inverse_frequencies` in a static graph, where the length is known only at run time."""
        settings = self.settings
        if settings.rope_type == "dynamic":
            return dynamic_in_graph(settings, length), 1.0
        trained = int(short_context(settings))
        (short, amplitude), (long, _) = settings.inverse_frequencies(trained), settings.inverse_frequencies(trained + 1)
        return paddle.where(length > trained, paddle.to_tensor(long), paddle.to_tensor(short)), amplitude


Rotation = tuple[paddle.Tensor, paddle.Tensor]
"""Cosine and sine of a layer's angles, each fp32 [B, S, R]."""


class RotaryEmbeddings:
    """Tables of cosines and sines for all layers. Layers with equal settings share tables.

    Attributes:
        distinct: distinct settings of the layers.
        index_by_layer: index of each layer's settings in `distinct`.
    """

    def __init__(self, by_layer: Sequence[RopeSettings]) -> None:
        self.distinct: list[RopeSettings] = []
        for settings in by_layer:
            if settings not in self.distinct:
                self.distinct.append(settings)
        self._embeddings = [RotaryEmbedding(settings) for settings in self.distinct]
        self._long_ropes = [settings for settings in self.distinct if settings.rope_type == "longrope"]
        self.index_by_layer = [self.distinct.index(settings) for settings in by_layer]

    def frequency_sets(self, position_ids_BS: paddle.Tensor) -> tuple[bool, ...]:
        """Return whether the positions [B, S] need `long_factor`, for each distinct LongRoPE setting.

        If the result changes, cached keys become invalid, because they were rotated with other frequencies. In a static
        graph the positions are unknown, so the result is empty, and the program that runs the graph checks the lengths.
        """
        if is_symbolic(position_ids_BS):
            return ()
        return self.frequency_sets_at(int(position_ids_BS.max()) + 1 if self._long_ropes else 0)

    def frequency_sets_at(self, length: int) -> tuple[bool, ...]:
        """Return `frequency_sets` for rows of `length` tokens."""
        return tuple(length > short_context(settings) for settings in self._long_ropes)

    def inverse_frequencies(self, length: int) -> list[tuple[np.ndarray, float]]:
        """Return `RotaryEmbedding.inverse_frequencies` for each distinct RoPE setting of the layers."""
        return [embedding.inverse_frequencies(length) for embedding in self._embeddings]

    def __call__(self, position_ids_BS: paddle.Tensor) -> tuple[Rotation, ...]:
        """Return the tables of each layer for positions [B, S]."""
        tables = [embedding(position_ids_BS) for embedding in self._embeddings]
        return tuple(tables[index] for index in self.index_by_layer)
