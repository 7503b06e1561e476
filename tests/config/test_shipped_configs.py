"""Shipped configuration files, which all load without a note that they could avoid."""

from __future__ import annotations

import json

import pytest

from paddlenlp_ext.config import load_run_config
from paddlenlp_ext.config.run_config import (
    GRPO_SECTIONS,
    PREFERENCE_SECTIONS,
    QUANTIZATION_SECTIONS,
    REWARD_SECTIONS,
)
from paddlenlp_ext.peft.registry import peft_methods
from tests.common.scripts import LLM
from tests.config.config_cases import SMALLEST, load, problems, write

ROOT = LLM / "config"
PREFERENCE = sorted(ROOT.rglob("dpo_*.json"))
REWARD = sorted(ROOT.rglob("reward_*.json"))
QUANTIZATION = sorted(path for name in ("ptq", "gptq", "awq") for path in ROOT.rglob(f"{name}_*.json"))
GRPO = sorted(ROOT.rglob("grpo_*.json"))
SHIPPED = sorted(set(ROOT.rglob("*.json")) - {*PREFERENCE, *REWARD, *GRPO, *QUANTIZATION})
BUILT = peft_methods()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_shipped_file_loads(path):
    config = load(str(path), methods=BUILT)
    assert (config.peft is None) == path.name.startswith("sft")
    assert config.train.do_train and config.data.zero_padding
    unexpected = [note for note in config.notes if "CPU" not in note and "flash_mask" not in note]
    assert unexpected == [], "a shipped file sets a key without effect"


@pytest.mark.parametrize("path", PREFERENCE, ids=lambda path: str(path.relative_to(ROOT)))
def test_shipped_preference_file_loads(path):
    config = load_run_config([str(path)], BUILT, PREFERENCE_SECTIONS)
    assert (config.peft is None) == (path.name == "dpo_argument.json")
    assert config.preference.loss_type == "sigmoid" and config.data.zero_padding
    assert [note for note in config.notes if "CPU" not in note and "flash_mask" not in note] == []


@pytest.mark.parametrize("path", REWARD, ids=lambda path: str(path.relative_to(ROOT)))
def test_shipped_reward_file_loads(path):
    config = load_run_config([str(path)], BUILT, REWARD_SECTIONS)
    assert (config.peft is None) == (path.name == "reward_argument.json")
    assert config.train.metric_for_best_model == "accuracy" and config.data.zero_padding
    assert [note for note in config.notes if "CPU" not in note and "flash_mask" not in note] == []


@pytest.mark.parametrize("path", GRPO, ids=lambda path: str(path.relative_to(ROOT)))
def test_shipped_grpo_file_loads(path):
    config = load_run_config([str(path)], BUILT, GRPO_SECTIONS)
    assert config.peft is not None and config.grpo.num_generations == config.train.per_device_train_batch_size
    assert [note for note in config.notes if "CPU" not in note and "flash_mask" not in note] == []


@pytest.mark.parametrize("path", QUANTIZATION, ids=lambda path: str(path.relative_to(ROOT)))
def test_shipped_quantization_file_loads(path):
    config = load_run_config([str(path)], {}, QUANTIZATION_SECTIONS)
    assert config.ptq.methods == [f"do_{path.name.partition('_')[0]}"]
    assert config.notes == []


def test_shipped_files_exist_for_every_family():
    """Expect all methods for three families, LoRA for Mistral, QLoRA for newer ones, and preferences."""
    methods = {config_name(switch) for switch in BUILT} | {"sft", "qlora", "wint8_lora"}
    expected = {f"{family}/{method}" for family in ("llama", "qwen", "smollm2") for method in methods}
    expected |= {"mistral/sft", "mistral/lora", "smollm2/distillation"}
    newer = (
        "apertus",
        "arcee",
        "cohere2",
        "ernie",
        "exaone4",
        "falcon_h1",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma4",
        "gemma4_e",
        "glm",
        "glm4",
        "granite",
        "granite4",
        "granite4_h",
        "granite_swa",
        "hunyuan",
        "lfm2",
        "minicpm3",
        "ministral3",
        "nemotron_h",
        "olmo2",
        "olmo3",
        "olmo_hybrid",
        "phi3",
        "qwen3",
        "qwen3_5",
        "seed_oss",
        "smollm3",
    )
    experts = ("deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "mixtral", "qwen2_moe")
    experts += (
        "afmoe",
        "gemma4_moe",
        "gpt_oss",
        "hunyuan_moe",
        "lfm2_moe",
        "mellum",
        "minimax_m2",
        "kimi_linear",
        "mistral4",
        "qwen3_5_moe",
        "qwen3_moe",
        "qwen3_next",
    )
    expected |= {f"{family}/{method}" for family in (*newer, *experts) for method in ("sft", "lora", "qlora")}
    names = {str(path.relative_to(ROOT)).removesuffix("_argument.json") for path in SHIPPED}
    assert names == expected
    families = ("llama", "qwen", "smollm2", "mistral", *newer, *experts)
    assert {str(path.relative_to(ROOT)).removesuffix("_argument.json") for path in PREFERENCE} == {
        f"{family}/{name}" for family in families for name in ("dpo", "dpo_lora")
    }
    assert {str(path.relative_to(ROOT)).removesuffix("_argument.json") for path in REWARD} == {
        f"{family}/{name}" for family in ("llama", "smollm2") for name in ("reward", "reward_lora")
    }
    assert {str(path.relative_to(ROOT)).removesuffix("_argument.json") for path in QUANTIZATION} == {
        f"{family}/{name}" for family in ("llama", "qwen", "smollm2") for name in ("ptq", "gptq", "awq")
    }
    every = (*SHIPPED, *PREFERENCE, *REWARD, *QUANTIZATION)
    written = {json.loads(path.read_text(encoding="utf-8"))["output_dir"] for path in every}
    assert len(written) == len(every), "two files share an output_dir; a run would resume the other"


def test_shipped_files_leave_the_progress_bar_on():
    assert [path for path in ROOT.rglob("*.json") if "disable_tqdm" in path.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("method", ["loftq", "qera"])
def test_quantized_init_without_quantization_is_refused(tmp_path, method):
    (found,) = problems(write(tmp_path, SMALLEST | {"lora": True, method: True}), methods=BUILT)
    assert found.key == method
    assert "set weight_quantize_algo" in found.message


def config_name(switch: str) -> str:
    """Return the name of the file for a switch, as in PaddleNLP's llm/config."""
    names = {"prefix_tuning": "pt", "lora_use_mixer": "moslora"}
    return names.get(switch, switch.removeprefix("use_"))
