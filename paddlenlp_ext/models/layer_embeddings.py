"""Layer embeddings: each decoder layer has a separate embedding of every token (Gemma 4 E2B and E4B).

    token part      table[id] * sqrt(P)                             table [V, L * P]
    context part    norm(projection(x) / sqrt(D))                   x: input embedding of the token
    embedding       (token part + context part) / sqrt(2)

Each layer adds norm(projection(gelu(gate(h)) * embedding)) to its hidden states h (models/decoder_layers.py). The table
is often larger than all other weights together.

Shapes: B batch, S sequence, L layers, P size of a layer embedding, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import paddle

from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.models.layer_shape import LayerEmbeddingShape
from paddlenlp_ext.nn.embedding import Embedding
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.nn.rms_norm import RMSNorm


def add_layer_embeddings(decoder: Any, config: DecoderConfig, shape: LayerEmbeddingShape) -> None:
    """Add the table, the projection and its norm to a decoder, under their names in files."""
    size = config.num_hidden_layers * shape.size
    decoder.layer_embedding_scale = rounded_root(shape.size)
    decoder.embed_tokens_per_layer = Embedding(shape.vocab_size, size)
    decoder.per_layer_model_projection = Linear(config.hidden_size, size)
    decoder.per_layer_projection_norm = RMSNorm(shape.size, config.rms_norm_eps, config.norm_offset)


def layer_embeddings(decoder: Any, x_BSD: paddle.Tensor, input_ids_BS: paddle.Tensor | None) -> paddle.Tensor:
    """Return the layer embeddings [B, S, L, P] of tokens with the input embeddings `x_BSD`."""
    assert input_ids_BS is not None, "layer embeddings need the token ids of the input embeddings"
    size = decoder.per_layer_projection_norm.weight.shape[0]
    token_BSE = decoder.embed_tokens_per_layer(input_ids_BS) * decoder.layer_embedding_scale
    context_BSE = decoder.per_layer_model_projection(x_BSD) * x_BSD.shape[-1] ** -0.5
    shape = [0, 0, len(decoder.layers), size]  # a static graph needs the number of layers
    context_BSLP = decoder.per_layer_projection_norm(context_BSE.reshape(shape))
    return (token_BSE.reshape(shape).astype(context_BSLP.dtype) + context_BSLP) * 2.0**-0.5


def rounded_root(size: int) -> float:
    """Return the square root of `size`, rounded to the default dtype as in Gemma."""
    return float(paddle.to_tensor(math.sqrt(size)).astype(paddle.get_default_dtype()).astype("float32"))
