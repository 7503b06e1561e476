"""Test the types and ranges of the keys of config.json."""

from __future__ import annotations

import json

import pytest

from paddlenlp_ext.checkpoint.config_json import read_model_config
from paddlenlp_ext.checkpoint.config_json_schema import KEYS
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader
from paddlenlp_ext.nn.rotary_embedding import RotaryEmbeddings
from tests.generation.tiny_models import FAMILIES as MODELS
from tests.generation.tiny_models import SIZES
from tests.stress.wrong_values import OF_OTHER_TYPE

WRITTEN_AS_INTEGERS = ("query_pre_attn_scalar", "scale_emb", "dim_model_base", "original_max_position_embeddings")
"""Numbers whose default has no fraction."""
MAY_BE_NEGATIVE = ("attn_logit_softcapping", "final_logit_softcapping")  # refused by the family, where it has the key


@pytest.mark.parametrize("model", MODELS)
def test_from_dict_value_of_another_type_raises_with_key_and_value(model):
    config = {**SIZES, **MODELS[model]}
    values = {**FAMILIES.get(config["model_type"]).defaults, **config}
    for key, value in values.items():
        assert key in KEYS, f"declare {key} in checkpoint/config_json_schema.py"
        if value is None:
            continue
        for wrong in OF_OTHER_TYPE[float if key in WRITTEN_AS_INTEGERS else type(value)]:
            if wrong == -2 and key in MAY_BE_NEGATIVE:
                continue
            with pytest.raises(ValueError, match=rf"^m: {key} .*config\.json") as caught:
                DecoderConfig.from_dict({**config, key: wrong}, "m")
            assert repr(wrong) in str(caught.value)


@pytest.mark.parametrize("model", MODELS)
def test_keys_that_a_family_reads_are_declared(model, monkeypatch):
    read = set()
    value = ConfigReader.value
    monkeypatch.setattr(ConfigReader, "value", lambda self, key: (read.add(key), value(self, key))[1])
    DecoderConfig.from_dict({**SIZES, **MODELS[model]})
    assert len(read) > 8 and read <= KEYS.keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_theta": -10000.0},
            r"rope_theta in config\.json must be a number above 1 up to 1e\+12, or null, got",
        ),
        ({"torch_dtype": "float31"}, "torch_dtype in config.json must be one of float64, .*, got 'float31'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers in config.json must be an integer from 0 to 1024"),
        ({"layer_types": ["x", 1]}, "layer_types in config.json must be a list whose entries are each a string"),
        ({"eos_token_id": [1, "x"]}, r"eos_token_id in config.json must be .*, got \[1, 'x'\]"),
        ({"architectures": "x"}, "architectures in config.json must be a list"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor in rope_scaling of config.json .*, got '4'"),
        ({"rope_parameters": {"a": {"rope_theta": 0}}}, "rope_theta in rope_parameters.a of config.json .*, got 0"),
        ({"rope_parameters": {"full_attention": True}}, "full_attention in rope_parameters of config.json must be"),
        ({"quantization_config": {"load_in_4bit": 4}}, "load_in_4bit in quantization_config of config.json"),
        (
            {"quantization_config": {"paddlenlp_ext": {"algo": "nf4", "block_size": 0}}},
            "block_size in quantization_config.paddlenlp_ext of config.json",
        ),
        ({"rope_scaling": {"x": "y" * 100, "type": 3 * ["z" * 100]}}, r"type in .*, got \['zz.{40,60}\.\.\.$"),
    ],
)
def test_read_model_config_value_out_of_range_raises_with_the_folder(changes, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **changes}))
    with pytest.raises(ValueError, match=message) as caught:
        read_model_config(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: ")


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (
            {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4},
            "low_freq_factor 4.0 .* is not below high_freq_factor 4.0",
        ),
        ({"type": "dynamic", "factor": 2}, "rope type 'dynamic' .* needs a head_dim above 2"),
    ],
)
def test_rotary_embedding_with_impossible_settings_raises(rope, message):
    config = {**SIZES, "model_type": "llama", "head_dim": 2, "rope_scaling": rope}
    with pytest.raises(ValueError, match=message):
        RotaryEmbeddings(DecoderConfig.from_dict(config).ropes)


@pytest.mark.parametrize("model", ["qwen2", "qwen2_moe"])
def test_from_dict_null_window_layers_are_refused_only_with_windows(model):
    config = {**SIZES, "model_type": model, "sliding_window": 8, "max_window_layers": None}
    assert DecoderConfig.from_dict(config).windows == (None,) * config["num_hidden_layers"]
    with pytest.raises(ValueError, match=r"max_window_layers in config.json must be an integer"):
        DecoderConfig.from_dict({**config, "use_sliding_window": True})


@pytest.mark.parametrize(
    ("head_dim", "alpha", "message"),
    [
        (2, 5.0, r"alpha .* needs a head_dim above 2"),
        (4, 1e-3, r"alpha 0.001 .* changes rope_theta 10000.0 to 0.01; rope_theta must stay above 1"),
    ],
)
def test_from_dict_hunyuan_with_impossible_alpha_raises(head_dim, alpha, message):
    config = {**SIZES, "model_type": "hunyuan_v1_dense", "head_dim": head_dim, "rope_scaling": {"alpha": alpha}}
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_dict(config)
