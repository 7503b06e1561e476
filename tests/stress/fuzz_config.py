"""Wrong values in config.json and generation_config.json of every kind of decoder."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import paddle

from paddlenlp_ext.checkpoint.config_json import read_generation_config, read_model_config
from paddlenlp_ext.checkpoint.config_json_schema import KEYS, ROPE_KEYS
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.models.sequence_classifier import classifier_config
from paddlenlp_ext.nn.rotary_embedding import RotaryEmbeddings
from tests.generation.tiny_models import FAMILIES, SIZES
from tests.stress.wrong_values import mutate

_COMMON = {**SIZES, "rms_norm_eps": 1e-6, "torch_dtype": "float32", "eos_token_id": [1, 2], "pad_token_id": 0}
_ROPES = (
    {},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32}},
    {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    {"rope_scaling": {"type": "dynamic", "alpha": 1000.0}},
)
_QUANTIZED = (
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    {"quant_method": "paddlenlp_ext", "paddlenlp_ext": {"algo": "nf4", "block_size": 64, "double_quant": True}},
)
BUILT = 0.5
"""Share of the accepted inputs from which small models are built."""
_KEYS = (*KEYS, *ROPE_KEYS)


def attack(rng: random.Random, folder: Path) -> DecoderConfig:
    """Read a config with some wrong values, as loading a model does up to the weights."""
    config = {**_COMMON, **FAMILIES[rng.choice(list(FAMILIES))], **rng.choice(_ROPES)}
    if rng.random() < 0.2:
        config["quantization_config"] = rng.choice(_QUANTIZED)
    (folder / "config.json").write_text(json.dumps(mutate(config, rng, _KEYS)))
    generation = mutate({"eos_token_id": 2, "bos_token_id": 1, "temperature": 0.6}, rng) if rng.random() < 0.3 else {}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    source = ModelSource(str(folder), folder, folder)
    read = DecoderConfig.from_dict(read_model_config(folder), str(folder))
    with np.errstate(divide="raise", over="raise", invalid="raise"):
        RotaryEmbeddings(read.ropes)
    read_generation_config(folder)
    source.stored_quantization  # noqa: B018 (reads the options)
    assert read.num_outputs and read.max_context and read.active_size
    for layer in range(min(2, read.num_hidden_layers)):
        read.attention_shape(layer)
        read.expert_shape(layer)
    if rng.random() < 0.3:
        classifier_config(read, source.config)
    if rng.random() < BUILT and _is_small(read):
        CausalLM(read)(paddle.to_tensor([[0, 0, 0]]))
    return read


def _is_small(config: DecoderConfig) -> bool:
    """Return whether a model has at most some megabytes."""
    sizes = [config.hidden_size, config.num_outputs, config.active_size, config.max_context]
    return config.num_hidden_layers <= 4 and max(sizes) <= 4096
