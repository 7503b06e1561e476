"""Size of the key-value cache and the logits while completions are sampled together."""

from __future__ import annotations

import math
from typing import Any

import paddle

from paddlenlp_ext.generation.padded_kv_cache import BLOCK
from paddlenlp_ext.static_graph.trace import cache_shapes
from paddlenlp_ext.trainer.memory.recurrent_states import decoding_state_bytes


def sampling_bytes(model: Any, num_rows: int, num_positions: int, dtype: paddle.dtype) -> int:
    """Return the peak bytes of keys, values and states of all rows, and of their logits in float32.

    The capacity of a layer's cache grows by copying, so that one layer is stored twice at the peak.

    Args:
        model: a `CausalLM` or `PeftModel`; only shapes are read.
        num_rows: completions that are sampled at the same time.
        num_positions: tokens of the longest prompt with its completion.
        dtype: dtype of the outputs of linear layers.
    """
    element = 4 if dtype == paddle.float32 else 2
    shapes = cache_shapes(model)
    sizes = [heads * channels * element for heads, channels in shapes]
    columns = math.ceil(num_positions / BLOCK) * BLOCK
    cache = num_rows * columns * (sum(sizes) + max(sizes, default=0))
    return cache + num_rows * (decoding_state_bytes(model, dtype) + 4 * model.config.vocab_size)
