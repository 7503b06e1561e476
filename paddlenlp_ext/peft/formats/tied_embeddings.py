"""Tensors that Hugging Face PEFT stores for a tied lm_head: copies of the tensors of an adapted embedding.

| tensor of the embedding | copy |
| --- | --- |
| replaced weight | the weight of lm_head |
| LoRA factors A and B | the factors B^T and A^T of lm_head |
| trained token rows | the token rows of lm_head |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.layers import AdapterLayer
from paddlenlp_ext.peft.modules_to_save import TIE_REMEDY, TIED, TIED_COPY
from paddlenlp_ext.peft.trainable_token_indices import EMBEDDING, HEAD, ROWS, TrainableTokens

_TIED_FACTORS = {
    f"{EMBEDDING}.lora_embedding_A": f"{HEAD}.lora_B.weight",
    f"{EMBEDDING}.lora_embedding_B": f"{HEAD}.lora_A.weight",
}
"""Name of an embedding's LoRA factor -> name of its transpose, a factor of the tied lm_head."""
TIED_COPIES = {TIED: TIED_COPY, **_TIED_FACTORS, f"{EMBEDDING}.{ROWS}": f"{HEAD}.{ROWS}"}
"""Name of an embedding's tensor -> name of its copy for the tied lm_head."""


def with_tied_copies(
    model: TrainableModel,
    config: PeftConfig,
    layers: Mapping[str, AdapterLayer],
    replaced: Collection[str],
    tensors: Mapping[str, Any],
) -> dict[str, Any]:
    """Return an adapter's tensors, and the copies that PEFT stores for a tied lm_head.

    Args:
        model: the base model.
        config: config of the adapter.
        layers: name -> layer of the adapter.
        replaced: names of the base parameters that the adapter replaces.
        tensors: name -> tensor of the adapter.
    """
    result = dict(tensors)
    if not model.config.tie_word_embeddings:
        return result
    layer = layers.get(EMBEDDING)
    is_tied = layer is None or isinstance(layer, TrainableTokens) or ties_factors(config)
    if TIED in replaced and TIED in result and is_tied:
        result[TIED_COPY] = result[TIED]
        if layer is not None and trains_rows_beside_method(layer, config):
            result[f"{HEAD}.{ROWS}"] = result[f"{EMBEDDING}.{ROWS}"]
    if ties_factors(config):
        for name, copy in _TIED_FACTORS.items():
            if name in result:
                result[copy] = paddle.transpose(result[name], [1, 0]).contiguous()
    return result


def without_tied_copies(model: TrainableModel, tensors: Mapping[str, np.ndarray], where: str) -> dict[str, np.ndarray]:
    """Return the tensors of a file without the copies for a tied lm_head.

    Raises:
        ValueError: a copy differs from the embedding's tensor, so the embedding and lm_head were not tied in training.
    """
    if not model.config.tie_word_embeddings:
        return dict(tensors)
    result = dict(tensors)
    for name, copy in TIED_COPIES.items():
        if copy not in result:
            continue
        value = result.pop(copy)
        value = value.T if name in _TIED_FACTORS else value
        if name not in result and name == TIED:
            result = {name: value, **result}
        if name not in result or not np.array_equal(result[name], value):
            raise ValueError(f"{where}: {copy} differs from {name}, but the base ties the two layers; {TIE_REMEDY}")
    return result


def ties_factors(config: PeftConfig) -> bool:
    """Return whether a tied lm_head shares the factors of an adapted embedding."""
    return config.adapts_tables and config.ensure_weight_tying


def trains_rows_beside_method(layer: AdapterLayer, config: PeftConfig) -> bool:
    """Return whether a layer trains token rows in addition to the adapter's method."""
    return isinstance(layer, TrainableTokens) and config.trainable_token_indices is not None
