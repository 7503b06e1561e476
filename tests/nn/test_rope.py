"""Test rotary embedding: angles, config spellings, scalings, invalid settings."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.nn.rope import RopeSettings, rope_by_layer
from paddlenlp_ext.nn.rotary_embedding import RotaryEmbedding

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def tables(config: dict, positions: list[int], head_dim: int = 8) -> tuple[np.ndarray, np.ndarray]:
    rotary = RotaryEmbedding(RopeSettings.from_config(config, head_dim))
    cos, sin = rotary(paddle.to_tensor([positions]))
    return cos.numpy()[0], sin.numpy()[0]


def test_rope_default_angles_match_formula():
    cos, sin = tables({"rope_theta": 100.0}, [0, 1, 50])
    angles = np.outer([0, 1, 50], 100.0 ** (-np.arange(0, 8, 2) / 8))
    np.testing.assert_allclose(cos, np.tile(np.cos(angles), 2), atol=1e-5)
    np.testing.assert_allclose(sin, np.tile(np.sin(angles), 2), atol=1e-5)


def test_rope_proportional_rotates_a_share_of_the_pairs():
    """Compare with the frequencies of the whole head, and with pairs that are half of the head apart."""
    settings = {"rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 2.0, "rope_theta": 100.0}
    cos, sin = tables({"rope_parameters": settings}, [0, 1, 50], head_dim=14)
    frequencies = 100.0 ** (-np.arange(0, 14, 2) / 14) / 2 * (np.arange(7) < 2)
    angles = np.outer([0, 1, 50], frequencies)
    np.testing.assert_allclose(cos, np.tile(np.cos(angles), 2), atol=1e-5)
    np.testing.assert_allclose(sin, np.tile(np.sin(angles), 2), atol=1e-5)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_rope_settings_both_spellings_are_equal(scaling):
    old_key = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    configs = (
        {"rope_theta": 5e5, "rope_scaling": scaling},
        {"rope_theta": 5e5, "rope_scaling": old_key},
        {"rope_parameters": {**scaling, "rope_theta": 5e5}},
    )
    first, *others = (tables(config, [3, 3000], head_dim=64) for config in configs)
    for other in others:
        np.testing.assert_array_equal(first, other)
    assert np.abs(first[0] - tables({"rope_theta": 5e5}, [3, 3000], head_dim=64)[0]).max() > 0.1


@pytest.mark.parametrize(
    ("config", "meant"),
    [
        (
            {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
        ),
        (
            {"original_max_position_embeddings": 512, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}},
        ),
        (
            {"original_max_position_embeddings": 512, "rope_scaling": {"type": "llama3", **LLAMA3}},
            {"rope_scaling": {"type": "llama3", **LLAMA3, "original_max_position_embeddings": 512}},
        ),
        (
            {"original_max_position_embeddings": 512, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        ),
    ],
    ids=["two places", "yarn", "llama3", "dynamic"],
)
def test_rope_settings_conflict_resolves_as_transformers(config, meant):
    np.testing.assert_array_equal(tables(config, [3, 3000], head_dim=64), tables(meant, [3, 3000], head_dim=64))


def test_rope_llama3_keeps_fast_and_stretches_slow_frequencies():
    cos, _ = tables({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, [1000], head_dim=64)
    plain = 5e5 ** (-np.arange(0, 64, 2) / 64)
    wavelengths = 2 * np.pi / plain
    assert (wavelengths < 8192 / 4).sum() > 5 and (wavelengths > 8192).sum() > 5
    for index in np.flatnonzero(wavelengths < 8192 / 4):
        assert cos[0, index] == pytest.approx(np.cos(1000 * plain[index]), abs=1e-3)
    for index in np.flatnonzero(wavelengths > 8192):
        assert cos[0, index] == pytest.approx(np.cos(1000 * plain[index] / 8), abs=1e-3)


@pytest.mark.parametrize(
    ("settings", "amplitude"),
    [
        ({}, 0.1 * np.log(8) + 1),
        ({"mscale": 0.7}, 0.1 * np.log(8) + 1),
        ({"mscale_all_dim": 0.7}, 0.1 * np.log(8) + 1),
        ({"mscale": 1.4, "mscale_all_dim": 0.7}, (0.14 * np.log(8) + 1) / (0.07 * np.log(8) + 1)),
        ({"mscale": 0.7, "mscale_all_dim": 0.7}, 1.0),
        ({"mscale": 1.4, "mscale_all_dim": 0.7, "attention_factor": 1.25}, 1.25),
        ({"factor": 0.5}, 1.0),
    ],
    ids=str,
)
def test_rope_yarn_scales_the_tables_by_its_temperature(settings, amplitude):
    """Compare with 0.1 m ln(factor) + 1 of arXiv:2309.00071, divided by its value for mscale_all_dim."""
    cos, sin = tables({"rope_scaling": {"rope_type": "yarn", "factor": 8.0, **settings}}, [3, 500])
    np.testing.assert_allclose(cos**2 + sin**2, amplitude**2, rtol=1e-5)


@pytest.mark.parametrize(("settings", "rounds"), [({}, True), ({"truncate": True}, True), ({"truncate": False}, False)])
def test_rope_yarn_frequencies_follow_the_formula(settings, rounds):
    """Compare with arXiv:2309.00071: dimensions of 32 turns and more are kept, those of 1 and fewer interpolated."""
    dim, theta, factor, trained = 64, 1e4, 4.0, 512
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained, **settings}
    cos, _ = tables({"rope_theta": theta, "rope_scaling": scaling}, [1], head_dim=dim)
    fast, slow = (dim * np.log(trained / (turns * 2 * np.pi)) / (2 * np.log(theta)) for turns in (32, 1))
    if rounds:
        fast, slow = np.floor(fast), np.ceil(slow)
    ramp = np.clip((np.arange(dim // 2) - fast) / (slow - fast), 0, 1)
    plain = theta ** (-np.arange(0, dim, 2) / dim)
    expected = plain * (1 - ramp) + plain / factor * ramp
    np.testing.assert_allclose(cos[0, : dim // 2] / (0.1 * np.log(factor) + 1), np.cos(expected), atol=1e-6)
    assert 0 < fast < slow < dim // 2


def test_rope_dynamic_scales_only_beyond_trained_length():
    config = {"max_position_embeddings": 100, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    np.testing.assert_array_equal(tables(config, [7, 99]), tables({}, [7, 99]))
    assert np.abs(tables(config, [7, 200])[0][0] - tables({}, [7, 200])[0][0]).max() > 1e-4


def test_rope_longrope_divides_frequencies_and_scales_the_tables():
    """Compare with arXiv:2402.13753: other factors beyond the trained context, and one temperature for both."""
    short, long, trained, factor = [1.0, 1.5, 2.0, 2.5], [1.0, 2.0, 3.0, 4.0], 32, 4.0
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "factor": factor}
    config = {"rope_scaling": scaling, "original_max_position_embeddings": trained, "max_position_embeddings": 128}
    plain = 1e4 ** (-np.arange(0, 8, 2) / 8)
    temperature = np.sqrt(1 + np.log(factor) / np.log(trained))
    for last, factors in ((31, short), (32, long)):
        cos, _ = tables(config, [5, last])
        np.testing.assert_allclose(cos[0, :4], temperature * np.cos(5 * plain / factors), atol=1e-6)
    cos, sin = tables({**config, "rope_scaling": {**scaling, "attention_factor": 1.5}}, [40])
    np.testing.assert_allclose(cos**2 + sin**2, 2.25, rtol=1e-5)


def test_rope_alibi_rotates_nothing():
    cos, sin = tables({"rope_scaling": {"rope_type": "alibi"}}, [0, 3, 5000])
    assert (cos == 1).all() and (sin == 0).all()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "needs layer_types with 2 entries"),
        ({"layer_types": ["full_attention"]}, "needs layer_types with 2 entries"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "no settings for layers of type chunked_attention"),
    ],
)
def test_rope_by_layer_without_settings_of_a_layer_raises(config, message):
    parameters = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(ValueError, match=message):
        rope_by_layer({"rope_parameters": parameters, **config}, [8, 8])


@pytest.mark.parametrize(
    ("config", "head_dim", "message"),
    [
        ({"rope_scaling": {"rope_type": "mrope"}}, 8, "unknown rope type 'mrope'.*known: default, linear"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4}}, 8, "needs a list of 4 .*not None"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 3}},
            8,
            "'long_factor' in the rope settings of config.json, not 3 numbers",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, 8, "factor '4' .* is not a number"),
        ({"rope_scaling": {"rope_type": "linear"}}, 8, "'linear' needs 'factor'"),
        ({}, 7, "head_dim 7"),
        ({"partial_rotary_factor": 0.5}, 6, "head_dim 6 with partial_rotary_factor 0.5 .* even number"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, 8, "partial_rotary_factor 1.5 .* at most 1"),
    ],
)
def test_rope_settings_invalid_raises_at_construction(config, head_dim, message):
    with pytest.raises(ValueError, match=message):
        RotaryEmbedding(RopeSettings.from_config(config, head_dim))
