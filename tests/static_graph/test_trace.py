"""Traced programs against the models that they were traced from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.config_json import write_model_config
from paddlenlp_ext.generation.generate import generate
from paddlenlp_ext.generation.padded_kv_cache import KVCache
from paddlenlp_ext.generation.prefill_and_decode import prefill
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantize_linears
from paddlenlp_ext.static_graph import static_model
from paddlenlp_ext.static_graph.export import compare, describe_program
from paddlenlp_ext.static_graph.static_model import StaticModel
from paddlenlp_ext.static_graph.trace import save_program
from tests.common.models import slow_decays
from tests.generation.tiny_models import FAMILIES, SIZES, random_prompts, tiny_model

DIFFERENT = (
    "cohere2_parallel",
    "deepseek_v2_experts",
    "falcon_h1_two_mixers",
    "gemma2_softcaps",
    "gemma4_keys_as_values",
    "gemma4_e_shared_keys",
    "glm4_partial_interleaved",
    "gpt_oss_sinks",
    "granite_4_mamba2_experts",
    "lfm2_convolutions",
    "lfm2_without_attention",
    "nemotron_h_single_blocks",
    "olmo_hybrid_split_delta",
    "qwen3_5_gated_delta",
    "qwen3_next_fused_delta",
    "qwen3_qk_norm",
)
"""Families with different operators; `make check-exports` runs all."""
RECURRENT = (
    "lfm2_convolutions",
    "qwen3_5_gated_delta",
    "kimi_linear_delta",
    "granite_4_mamba2",
    "falcon_h1_two_mixers",
    "nemotron_h_single_blocks",
)
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [3.0, 5.0, 9.0, 17.0],
    "original_max_position_embeddings": 14,
}
LENGTH_DEPENDENT = {
    "longrope": {"model_type": "llama", "max_position_embeddings": 64, "rope_scaling": LONGROPE},
    "dynamic": {
        "model_type": "llama",
        "max_position_embeddings": 14,
        "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
    },
}


def exported(model: Any, folder: Path) -> StaticModel:
    """Trace a model and load the program."""
    write_model_config(folder, model.config.source, model.dtype_name)
    save_program(model, folder, "model")
    describe_program(folder, model)
    return StaticModel(folder)


@pytest.mark.parametrize("family", DIFFERENT)
def test_save_program_of_each_kind_of_family_computes_the_models_logits(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    assert compare(exported(model, tmp_path), model, [(5, 11, 1), (8,)]) <= 1e-5


@pytest.mark.parametrize("family", RECURRENT)
@paddle.no_grad()
def test_program_in_several_passes_computes_the_logits_of_the_rows_alone(family: str, tmp_path: Path) -> None:
    """Test passes of several positions after a state, and a row that starts in the second pass."""
    model = slow_decays(AutoModelForCausalLM.from_config({**SIZES, **FAMILIES[family]}))
    static, rows, cache = exported(model, tmp_path), random_prompts((79, 70)), KVCache([0, 9])
    padded = np.array([rows[0], [7] * 9 + rows[1]])
    for start, end in ((0, 5), (5, 75), (75, 78), (78, 79)):
        found = static.hidden_states(paddle.to_tensor(padded[:, start:end]), cache=cache).numpy()
        if start == 0:
            continue
        for row, padding in enumerate((0, 9)):
            ids = padded[row : row + 1, padding:end]
            expected = model.logits(model.hidden_states(paddle.to_tensor(ids))[:, -1]).numpy()
            np.testing.assert_allclose(found[row], expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("family", ["mistral_window", "granite_4_mamba2"])
def test_static_model_with_a_long_prompt_runs_the_program_over_parts_of_it(family, tmp_path, monkeypatch) -> None:
    model, prompts = tiny_model(family), random_prompts([30, 17, 1])
    static, lengths = exported(model, tmp_path), []
    monkeypatch.setattr(static_model, "MOST_POSITIONS", 8)
    run = static._run
    monkeypatch.setattr(static, "_run", lambda ids, cache: (lengths.append(ids.shape[1]), run(ids, cache))[1])
    found, expected = (prefill(each, prompts)[1].numpy() for each in (static, model))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert lengths == [8, 8, 8, 6]


@pytest.mark.parametrize("rope", LENGTH_DEPENDENT)
def test_static_model_beyond_the_trained_length_generates_the_models_tokens(rope, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(static_model, "MOST_POSITIONS", 8)
    model = AutoModelForCausalLM.from_config({**SIZES, **LENGTH_DEPENDENT[rope]})
    prompts = random_prompts([20, 17, 9, 5])  # the first batch begins beyond it, the second reaches it in a step
    options: dict[str, Any] = {"max_new_tokens": 12, "batch_size": 2}
    assert generate(exported(model, tmp_path), prompts, **options) == generate(model, prompts, **options)


@pytest.mark.parametrize("family", ["mistral_window", *RECURRENT])
def test_static_model_with_rows_of_many_lengths_generates_the_models_tokens(family: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config({**SIZES, **FAMILIES[family]})
    slow_decays(model)
    # The cache of the longest prompt grows by a second block.
    static, prompts = exported(model, tmp_path), random_prompts([3, 30, 1, 124])
    for options in (
        {"max_new_tokens": 9, "batch_size": 3, "eos_token_id": [5, 11, 23]},
        {"max_new_tokens": 3, "batch_size": 4, "decode_strategy": "sampling", "seed": 3},
        {"max_new_tokens": 3, "batch_size": 4, "decode_strategy": "beam_search", "num_beams": 2},
    ):
        assert generate(static, prompts, **options) == generate(model, prompts, **options)


@pytest.mark.parametrize(
    ("algo", "family"),
    [
        ("weight_only_int8", "mixtral_experts"),
        ("weight_only_int4", "deepseek_v3_latents"),
        ("nf4", "llama_grouped_heads"),
    ],
)
def test_save_program_of_a_quantized_model_computes_its_logits(algo: str, family: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config({**SIZES, **FAMILIES[family]})
    unquantized_bytes = sum(parameter.size for parameter in model.parameters()) * 4
    quantize_linears(model, QuantizationConfig(algo=algo))
    assert compare(exported(model, tmp_path), model) <= 1e-5
    assert (tmp_path / "model.pdiparams").stat().st_size < 0.6 * unquantized_bytes


def test_save_program_in_bfloat16_stores_half_the_bytes_and_rounds_no_activations(tmp_path: Path) -> None:
    config = {**SIZES, "model_type": "qwen2", "tie_word_embeddings": True}
    model = AutoModelForCausalLM.from_config(config, dtype="bfloat16")
    static = exported(model, tmp_path)
    assert compare(static, model) <= 1e-5
    rounded = AutoModelForCausalLM.from_config(config)
    for parameter, stored in zip(rounded.parameters(), model.parameters(), strict=True):
        parameter.set_value(stored.astype("float32"))
    assert compare(static, rounded, [(5, 11, 1)]) <= 1e-5
    num_bytes = sum(parameter.size * parameter.element_size() for parameter in model.parameters())
    assert (tmp_path / "model.pdiparams").stat().st_size < 1.1 * num_bytes + 4096


def test_static_model_in_a_folder_without_a_program_names_the_remedy(tmp_path: Path) -> None:
    tiny_model("qwen2_tied").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"not an exported model: .*run pnx export static first"):
        StaticModel(tmp_path)


def test_static_model_with_an_incomplete_description_or_program_names_it(tmp_path: Path) -> None:
    tiny_model("qwen2_tied").save_pretrained(tmp_path)
    for name in ("model.json", "model.pdiparams"):
        (tmp_path / name).write_text("{")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "static_graph": {"cache_dtype": "float32"}}))
    with pytest.raises(ValueError, match=r"config\.json: static_graph has no cache_shapes; export the model again"):
        StaticModel(tmp_path)
    description = {"cache_dtype": "float32", "cache_shapes": [], "dtype": "float32", "quant_type": None}
    (tmp_path / "config.json").write_text(json.dumps({**config, "static_graph": description}))
    with pytest.raises(ValueError, match=r"Paddle cannot load model\.json and model\.pdiparams \(.*; export the model"):
        StaticModel(tmp_path)


def test_compare_with_nan_in_a_later_step_is_nan() -> None:
    """Test logits that are right for the prompt, and NaN in the third step of decoding."""
    model, calls = tiny_model("llama_grouped_heads"), []

    class Damaged:
        config, eos_token_ids, hidden_states = model.config, model.eos_token_ids, staticmethod(model.hidden_states)
        decode_tokens = staticmethod(lambda tokens_BS, cache: None)

        def logits(self, hidden: paddle.Tensor) -> paddle.Tensor:
            calls.append(hidden)
            return model.logits(hidden) * (float("nan") if len(calls) == 4 else 1.0)

    assert np.isnan(compare(Damaged(), model))


def test_static_model_leaves_earlier_logits_unchanged(tmp_path: Path) -> None:
    static = exported(tiny_model("llama_grouped_heads"), tmp_path)
    first = static.hidden_states(paddle.to_tensor([[1, 2, 3]]))
    kept = first.numpy().copy()
    static.hidden_states(paddle.to_tensor([[7, 8, 9]]))
    assert (first.numpy() == kept).all()
