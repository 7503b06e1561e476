"""Long-sequence strategies: the written keys, positions and logits against transformers, saved models, errors.

Reference: tests/golden/generators/make_long_context_golden.py.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.config.sections.model import STRATEGY_NAMES, ModelConfig
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.context_extension import STRATEGIES, context_overrides
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.nn.rope import rope_by_layer
from paddlenlp_ext.nn.rotary_embedding import RotaryEmbeddings
from tests.golden import DATA
from tests.golden.cases import long_context_cases as cases
from tests.golden.cases.model_cases import make_inputs, make_weight

ALIBI = "AttentionWithLinearBias"


@pytest.fixture(scope="module")
def golden():
    return np.load(DATA / "long_context.npz")


def extended(config: dict[str, Any], strategy: str, factor: float = cases.FACTOR, **parameters: Any) -> dict[str, Any]:
    """Return the config.json that a run with this strategy saves."""
    if strategy == "LongRoPEScalingRotaryEmbedding":
        parameters.setdefault("long_factor", cases.long_factor(config["head_dim"]))
    options = ModelConfig(
        use_long_sequence_strategies=True,
        strategy_name=strategy,
        rope_scaling_factor=factor,
        strategy_parameters=parameters or None,
    )
    return {**config, **context_overrides(config, options)}


def test_strategies_are_those_of_the_configuration():
    assert tuple(STRATEGIES) == STRATEGY_NAMES


@pytest.mark.parametrize("strategy", cases.STRATEGIES)
def test_context_overrides_are_the_keys_that_transformers_reads(strategy):
    made = extended(cases.TINY, strategy)
    assert {key: value for key, value in made.items() if value is not None} == {
        **cases.TINY,
        **cases.expected_keys(strategy, 16, 8),
    }
    assert DecoderConfig.from_dict(made).max_context == 64


@pytest.mark.parametrize("strategy", cases.STRATEGIES)
@pytest.mark.parametrize("where", cases.POSITIONS)
def test_rotation_tables_of_a_strategy_match_transformers(strategy, where, golden):
    config = DecoderConfig.from_dict(extended(cases.TABLE_SIZES, strategy))
    ((cos, sin),) = RotaryEmbeddings(config.ropes)(paddle.to_tensor([cases.POSITIONS[where]]))
    made = np.stack([cos.numpy()[0], sin.numpy()[0]])
    np.testing.assert_allclose(made, golden[f"tables/{strategy}/{where}"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("strategy", cases.STRATEGIES)
def test_logits_of_a_strategy_match_transformers(strategy, golden):
    model = CausalLM(DecoderConfig.from_dict(extended(cases.TINY, strategy)))
    for name, parameter in model.named_parameters():
        parameter.set_value(make_weight("long_context", name, tuple(parameter.shape)))
    logits = model(paddle.to_tensor(make_inputs("long_context")[0])).numpy()
    np.testing.assert_allclose(logits[:, cases.LOGIT_POSITIONS], golden[f"logits/{strategy}"], rtol=0, atol=1e-5)


def test_rotation_tables_by_layer_type_match_transformers(golden):
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = {"rope_parameters": cases.BY_LAYER_TYPE, "layer_types": kinds}
    rotations = RotaryEmbeddings(rope_by_layer(config, [cases.HEAD_DIM] * 3))(
        paddle.to_tensor([cases.POSITIONS["beyond the trained context"]])
    )
    assert rotations[0][0] is rotations[2][0]
    for kind, rotation in zip(kinds, rotations, strict=True):
        made = np.stack([table.numpy()[0] for table in rotation])
        np.testing.assert_allclose(made, golden[f"by_layer_type/{kind}"], rtol=0, atol=1e-5)


def test_decoder_layers_use_the_tables_of_their_type():
    """Compare with two models of one layer type each: every layer must run with the tables of its own type."""
    kinds = ["sliding_attention", "full_attention"]
    sizes = {**cases.TINY, "model_type": "qwen3", "use_sliding_window": True, "sliding_window": 6, "layer_types": kinds}
    both = CausalLM(DecoderConfig.from_dict({**sizes, "rope_parameters": cases.BY_LAYER_TYPE}))
    input_ids = paddle.to_tensor(make_inputs("long_context")[0])
    x_BSD = both.model.embed(input_ids)
    for index, kind in enumerate(kinds):
        single = DecoderConfig.from_dict({**sizes, "rope_parameters": cases.BY_LAYER_TYPE[kind]})
        model = CausalLM(single)
        model.set_state_dict(both.state_dict())
        x_BSD = model.model.run_layers(
            x_BSD, model.model.attention_inputs(input_ids, None, None, None), index, index + 1
        )
    np.testing.assert_array_equal(both.model(input_ids).numpy(), both.model.norm(x_BSD).numpy())


def test_context_overrides_of_settings_by_layer_type_extend_full_attention_only():
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 6}
    parameters = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    config = {**cases.TINY, "model_type": "qwen3", **kinds, "rope_parameters": parameters}
    made = extended(config, "LinearScalingRotaryEmbedding")
    assert made["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_theta": 1e4},
    }
    assert DecoderConfig.from_dict(made).max_context == 64


def test_context_overrides_keep_the_form_of_transformers_5():
    config = {key: value for key, value in cases.TINY.items() if key != "rope_theta"}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    made = extended(config, "YaRNScalingRotaryEmbedding", beta_fast=16)
    assert made["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 16,
    }
    assert "rope_scaling" not in made and made["max_position_embeddings"] == 64


def test_context_overrides_keep_the_share_of_rotated_channels():
    config = {**cases.TINY, "model_type": "glm", "rope_parameters": {"partial_rotary_factor": 0.25}}
    made = extended(config, "LinearScalingRotaryEmbedding")
    assert {rope.rotary_dim for rope in DecoderConfig.from_dict({**config, **made}).ropes} == {2}


def test_context_overrides_with_another_trained_length_count_from_it():
    made = extended(cases.TINY, "DynamicNTKScalingRotaryEmbedding", original_max_position_embeddings=8)
    assert made["max_position_embeddings"] == 8 and DecoderConfig.from_dict(made).max_context == 32


@pytest.mark.parametrize(
    ("strategy", "parameters", "config", "message"),
    [
        ("YaRNScalingRotaryEmbedding", {"low_freq_factor": 1.0}, {}, "has no low_freq_factor; known: original_max"),
        ("YaRNScalingRotaryEmbedding", {"beta_fast": "32"}, {}, "beta_fast .* must be a number .*'32'"),
        ("LongRoPEScalingRotaryEmbedding", {"long_factor": [2.0]}, {}, "needs a list of 4 numbers as 'long_factor'"),
        (
            "LinearScalingRotaryEmbedding",
            {},
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "already has rope type 'linear' and a context of 32",
        ),
        (
            "DynamicNTKScalingRotaryEmbedding",
            {"original_max_position_embeddings": 0},
            {},
            "must be a positive integer, got 0",
        ),
        (
            "LinearScalingRotaryEmbedding",
            {},
            {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}},
            "no settings for full_attention",
        ),
    ],
)
def test_context_overrides_that_are_impossible_raise(strategy, parameters, config, message):
    with pytest.raises(ValueError, match=message):
        extended({**cases.TINY, **config}, strategy, **parameters)


def test_context_overrides_of_longrope_without_searched_factors_raise():
    options = ModelConfig(use_long_sequence_strategies=True, strategy_name="longrope", rope_scaling_factor=2.0)
    with pytest.raises(ValueError, match=r"needs long_factor, .*4 numbers"):
        context_overrides(cases.TINY, options)


@pytest.mark.parametrize("strategy", ["YaRNScalingRotaryEmbedding", ALIBI])
def test_saved_model_keeps_its_strategy_and_decodes_with_it(strategy, tmp_path):
    """Check greedy tokens with the cache against full forward passes of the saved and loaded model."""
    overrides = {key: value for key, value in extended(cases.TINY, strategy).items() if cases.TINY.get(key) != value}
    AutoModelForCausalLM.from_config(cases.TINY, seed=1).save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", config_overrides=overrides)
    model.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text()).items() >= overrides.items()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    prompts = [[5, 6, 7, 8, 9], [11, 12]]
    for prompt, answer in zip(prompts, loaded.generate(prompts, max_new_tokens=20), strict=True):
        ids = list(prompt)
        for _ in range(20):
            ids.append(int(loaded(paddle.to_tensor([ids]))[0, -1].argmax()))
        assert answer == ids[len(prompt) :]
    with pytest.raises(ValueError, match="different rope settings"):
        model.load_weights(tmp_path / "plain")


def test_model_with_linear_biases_depends_on_distances_in_the_document():
    """Check that packing changes nothing, that a document's order matters, and that other positions are refused."""
    model = AutoModelForCausalLM.from_config(extended(cases.TINY, ALIBI), seed=3)
    first, second = np.arange(5, 12), np.arange(20, 25)
    packed = model(paddle.to_tensor([[*first, *second]]), document_lengths=[[7, 5]]).numpy()[0]
    for ids, part in ((first, packed[:7]), (second, packed[7:])):
        np.testing.assert_allclose(model(paddle.to_tensor([ids])).numpy()[0], part, atol=1e-5)
    swapped = model(paddle.to_tensor([[*first[[1, 0]], *first[2:]]])).numpy()[0]
    assert np.abs(swapped[-1] - packed[6]).max() > 1e-3
    with pytest.raises(ValueError, match="leave position_ids out"):
        model(paddle.to_tensor([first]), position_ids=paddle.to_tensor([[0, 1, 2, 9, 10, 11, 12]]))
