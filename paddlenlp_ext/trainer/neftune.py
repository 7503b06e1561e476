"""NEFTune: noise on the embeddings while training (Jain et al., 2023, "NEFTune: Noisy Embeddings Improve Instruction
Finetuning").

Every token's embedding gets uniform(-1, 1) * alpha / sqrt(L * D), L the length of the sequence and D the hidden size.
In a packed batch L is the length of the token's own document, so that packing does not change the noise's size.

Shapes: B batch, S sequence, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from paddle import nn

_EMBEDDING = "embed_tokens"


def token_embedding(model: nn.Layer) -> nn.Layer:
    """The layer that turns token ids into vectors (the adapter's layer where one wraps it)."""
    found = [layer for name, layer in model.named_sublayers() if name.split(".")[-1] == _EMBEDDING]
    assert len(found) == 1, f"expected one layer named {_EMBEDDING}, found {len(found)}"
    return found[0]


def noise_scale(document_lengths: Sequence[Sequence[int]], hidden_size: int, alpha: float) -> np.ndarray:
    """alpha / sqrt(L * D) for each token, L its document's length; float32 [B, S, 1]."""
    rows = [np.repeat(np.asarray(lengths), lengths) for lengths in document_lengths]
    scale_BS = alpha / np.sqrt(np.stack(rows).astype(np.float64) * hidden_size)
    return scale_BS[:, :, None].astype(np.float32)


class EmbeddingNoise:
    """Adds the noise to what `model`'s token embedding puts out, within `documents(...)` and only in training mode."""

    def __init__(self, model: nn.Layer, alpha: float) -> None:
        self.alpha = alpha
        self._document_lengths: Sequence[Sequence[int]] | None = None
        self._hook = token_embedding(model).register_forward_post_hook(self._add)

    @contextmanager
    def documents(self, document_lengths: Sequence[Sequence[int]]) -> Iterator[None]:
        """The documents of the batch that is about to go through the model."""
        self._document_lengths = document_lengths
        try:
            yield
        finally:
            self._document_lengths = None

    def remove(self) -> None:
        """Take the hook off the model."""
        self._hook.remove()

    def _add(self, layer: nn.Layer, inputs: Any, output_BSD: paddle.Tensor) -> paddle.Tensor | None:
        if self._document_lengths is None or not layer.training:
            return None
        scale_BS1 = noise_scale(self._document_lengths, output_BSD.shape[-1], self.alpha)
        noise_BSD = paddle.uniform(output_BSD.shape, dtype="float32", min=-1.0, max=1.0) * paddle.to_tensor(scale_BS1)
        return output_BSD + noise_BSD.astype(output_BSD.dtype)
