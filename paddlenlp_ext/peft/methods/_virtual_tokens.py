"""What prefixes and prompts share: input vectors run through the decoder once, for the keys and values they leave.

Shapes: D hidden, P vectors.
"""

from __future__ import annotations

import paddle
from paddle import nn

from paddlenlp_ext.generation.kv_cache import KVCache
from paddlenlp_ext.ops.attention import KeyValuePrefix


@paddle.no_grad()
def keys_and_values(decoder: nn.Layer, vectors_PD: paddle.Tensor) -> dict[int, KeyValuePrefix]:
    """Keys and values of every layer that runs here, by its number, for vectors at positions 0 to P-1; no gradient."""
    cache = KVCache([0])
    ids_1P = paddle.zeros([1, vectors_PD.shape[0]], "int64")  # only their number counts
    decoder.forward_embeddings(vectors_PD.unsqueeze(0), decoder.attention_inputs(ids_1P, None, None, cache))
    return cache.as_prefix()
