"""Test rotary scalings from GGUF files: the model's frequencies against those of transformers."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from paddlenlp_ext.checkpoint.config_json import read_model_config
from paddlenlp_ext.checkpoint.gguf.rope_scaling import llama3_scaling, rope_metadata
from paddlenlp_ext.nn.rope import ROPE_TYPES, RopeSettings
from tests.golden import DATA

EMBEDDING = {"token_embd.weight": np.zeros((11, 32), np.float32)}
CASES = json.loads((DATA / "checkpoint_rope.json").read_text(encoding="utf-8"))
PUBLISHED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def converted_divisors(theta: float, head_dim: int, scaling: dict) -> np.ndarray:
    """Return the divisors that llama.cpp's converter stores: three cases by wavelength, as in the model card's code."""
    divisors = []
    original, low, high = (
        scaling[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    for exponent in np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim):
        wavelength = 2 * math.pi * float(np.float32(theta) ** exponent)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(scaling["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.float32(divisors)


@pytest.fixture
def write_scaled(write_gguf, llama_metadata):
    """Return a function that writes a file with rotary divisors: `write_scaled(theta, divisors, **metadata)`."""

    def write(theta: float, divisors: np.ndarray, metadata: dict | None = None):
        head_dim = 2 * divisors.size
        heads = {"llama.rope.freq_base": theta, "llama.embedding_length": 4 * head_dim}
        return write_gguf(llama_metadata | heads | (metadata or {}), EMBEDDING | {"rope_freqs.weight": divisors})

    return write


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, [*case["scaling"].values()][1:])))
def test_rope_scaling_of_divisors_has_the_frequencies_of_transformers(case, write_scaled):
    theta, head_dim, scaling = case["theta"], case["head_dim"], case["scaling"]
    config = read_model_config(write_scaled(theta, converted_divisors(theta, head_dim, scaling)))
    settings = RopeSettings.from_config(config, config["head_dim"])
    frequencies, amplitude = ROPE_TYPES[settings.rope_type](settings, 0)
    np.testing.assert_allclose(frequencies, case["inverse_frequencies"], rtol=1e-5, atol=0)
    assert amplitude == 1.0


@pytest.mark.parametrize(
    "bounds",
    [
        PUBLISHED,
        PUBLISHED | {"original_max_position_embeddings": 4096},
        PUBLISHED | {"high_freq_factor": 32.0},
        {"low_freq_factor": 1.0, "high_freq_factor": 2.5, "original_max_position_embeddings": 1000},
    ],
)
def test_rope_scaling_of_divisors_recovers_the_settings(bounds):
    scaling = {"rope_type": "llama3", "factor": 3.7} | bounds
    assert llama3_scaling(converted_divisors(500000.0, 64, scaling).astype(float), 500000.0) == scaling


@pytest.mark.parametrize("share", [1 / 14, 3 / 7, 0.25])
@pytest.mark.parametrize("factor", [{}, {"factor": 2.5}])
def test_rope_scaling_of_pairs_that_are_not_rotated_is_proportional(share, factor, write_scaled):
    scaling = {"partial_rotary_factor": share, **factor}
    keys, tensors = rope_metadata("proportional", 500.0, scaling, 28, 1.0, None)
    (divisors,) = tensors.values()
    assert keys == {"rope.freq_base": 500.0} and divisors.tolist().count(np.float32(1e30)) == 14 - int(share * 14)
    config = read_model_config(write_scaled(500.0, divisors))
    settings = RopeSettings.from_config(config, config["head_dim"])
    expected = RopeSettings(28, 500.0, "proportional", 64, scaling)
    np.testing.assert_allclose(*(ROPE_TYPES["proportional"](each, 0)[0] for each in (settings, expected)), rtol=1e-6)


@pytest.mark.parametrize("divisors", [[1.0, 2.0, 1e30, 1e30], [1.0, 1e30, 1.0, 1e30], [1.0, np.nan, 1e30, 1e30]])
def test_rope_scaling_of_unrotated_pairs_and_different_divisors_raises(divisors, write_scaled):
    with pytest.raises(ValueError, match="RoPE scaling other than llama3 and proportional"):
        read_model_config(write_scaled(500.0, np.float32(divisors)))


def test_rope_scaling_with_divisors_of_1_is_none(write_scaled):
    assert read_model_config(write_scaled(10000.0, np.ones(4, np.float32)))["rope_scaling"] is None


@pytest.mark.parametrize("change", [1.5, 0.5, math.nan, math.inf])
def test_rope_scaling_of_other_divisors_raises(change, write_scaled):
    divisors = converted_divisors(500000.0, 64, {"factor": 32.0} | PUBLISHED)
    divisors[3] = change
    with pytest.raises(ValueError, match=r"model\.gguf: rope_freqs\.weight has a RoPE scaling other than llama3"):
        read_model_config(write_scaled(500000.0, divisors))


def test_rope_scaling_of_divisors_and_metadata_raises(write_scaled):
    divisors = converted_divisors(500000.0, 64, {"factor": 32.0} | PUBLISHED)
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    with pytest.raises(ValueError, match=r"rope_freqs\.weight and RoPE scaling metadata \(linear, factor 2"):
        read_model_config(write_scaled(500000.0, divisors, metadata))
    with pytest.raises(ValueError, match=r"rope_freqs\.weight has 32 values for heads of 32 channels"):
        read_model_config(write_scaled(500000.0, divisors, {"llama.embedding_length": 128}))
