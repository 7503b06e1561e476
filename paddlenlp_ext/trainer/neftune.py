"""NEFTune: uniform noise on the token embeddings during training (Jain et al. 2023, arXiv:2310.05914).

    embedding + uniform(-1, 1) * alpha / sqrt(L * D)

L is the length of the token's document, and D is the hidden size. Each document of a packed batch has its own L, so
packing does not change the scale of the noise. If documents share a prefix, L of a continuation includes the prefix,
and L of the prefix includes its longest continuation.

Shapes: B batch, S sequence, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddlenlp_ext.ops.attention import AttentionLayout, DocumentParents

_EMBEDDING = "embed_tokens"


def token_embedding(model: nn.Layer) -> nn.Layer:
    """Return the token embedding of a model, or the adapter layer that wraps it."""
    found = [layer for name, layer in model.named_sublayers() if name.split(".")[-1] == _EMBEDDING]
    assert len(found) == 1, f"expected one layer named {_EMBEDDING}, found {len(found)}"
    return found[0]


def noise_scale(layout: AttentionLayout, hidden_size: int, alpha: float) -> np.ndarray:
    """Return alpha / sqrt(L * D) for each token, float32 [B, S, 1]; L is the length of the token's document."""
    _, lengths = layout.documents()
    scales = alpha / np.sqrt(np.repeat(layout.sequence_lengths(), lengths).astype(np.float64) * hidden_size)
    return scales.reshape(-1, layout.row_length, 1).astype(np.float32)


class EmbeddingNoise:
    """Forward hook that adds noise to token embeddings in training mode, inside a block of `documents`."""

    def __init__(self, model: nn.Layer, alpha: float) -> None:
        self.alpha = alpha
        self._layout: AttentionLayout | None = None
        self._hook = token_embedding(model).register_forward_post_hook(self._add)

    @contextmanager
    def documents(
        self, document_lengths: Sequence[Sequence[int]], document_parents: DocumentParents | None = None
    ) -> Iterator[None]:
        """Add noise in the forward passes inside the block; the noise scale depends on the lengths of the documents."""
        self._layout = AttentionLayout.from_documents(document_lengths, document_parents=document_parents)
        try:
            yield
        finally:
            self._layout = None

    def remove(self) -> None:
        """Remove the hook from the model."""
        self._hook.remove()

    def _add(self, layer: nn.Layer, inputs: Any, output_BSD: paddle.Tensor) -> paddle.Tensor | None:
        if self._layout is None or not layer.training:
            return None
        scale_BS1 = noise_scale(self._layout, output_BSD.shape[-1], self.alpha)
        noise_BSD = paddle.uniform(output_BSD.shape, dtype="float32", min=-1.0, max=1.0) * paddle.to_tensor(scale_BS1)
        return output_BSD + noise_BSD.astype(output_BSD.dtype)
