"""Shipped configuration files, which all load, and PaddleNLP's own files, which load or name the unsupported keys."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paddlenlp_ext.peft.registry import peft_methods
from tests.common.scripts import LLM
from tests.config.config_cases import load, problems, write

ROOT = LLM / "config"
SHIPPED = sorted(ROOT.rglob("*.json"))
BUILT = peft_methods()

# Keys of PaddleNLP 3.0.0b4's llm/config/llama files: a common block, and the difference of each file.
COMMON: dict[str, Any] = {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B",
    "dataset_name_or_path": "./data",
    "output_dir": "./checkpoints/ckpts",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "per_device_eval_batch_size": 8,
    "eval_accumulation_steps": 16,
    "num_train_epochs": 3,
    "learning_rate": 3e-04,
    "warmup_steps": 30,
    "logging_steps": 1,
    "evaluation_strategy": "epoch",
    "save_strategy": "epoch",
    "src_length": 1024,
    "max_length": 2048,
    "bf16": True,
    "fp16_opt_level": "O2",
    "do_train": True,
    "do_eval": True,
    "disable_tqdm": True,
    "load_best_model_at_end": True,
    "eval_with_do_generation": False,
    "metric_for_best_model": "accuracy",
    "recompute": True,
    "save_total_limit": 1,
    "tensor_parallel_degree": 1,
    "pipeline_parallel_degree": 1,
    "use_flash_attention": False,
    "zero_padding": False,
    "unified_checkpoint": True,
}
NO_EVALUATION = {"do_eval": False, "evaluation_strategy": "no", "load_best_model_at_end": False}
FLASHMASK = {
    "max_steps": 12000,
    "warmup_steps": None,
    "warmup_ratio": 0.03,
    "src_length": 8000,
    "max_length": 8192,
    "evaluation_strategy": "no",
    "save_strategy": "no",
    "load_best_model_at_end": False,
    "tensor_parallel_degree": 2,
    "pipeline_parallel_config": "disable_p2p_cache_shape",
    "zero_padding": True,
    "greedy_zero_padding": True,
    "lazy": True,
    "use_flash_attention": True,
    "flash_mask": True,
    "tensor_parallel_output": True,
}
PREFERENCE = {
    "train_dataset_path": "./data/train.jsonl",
    "dev_dataset_path": "./data/dev.jsonl",
    "max_seq_len": 4096,
    "max_prompt_len": 2048,
    "tensor_parallel_degree": 8,
    "loss_type": "sigmoid",
    "benchmark": False,
    "autotuner_benchmark": False,
}
# file -> its difference from the common block, the keys that are refused as not supported
OFFICIAL: dict[str, tuple[dict[str, Any], set[str]]] = {
    "sft": ({"pipeline_parallel_config": "disable_p2p_cache_shape", "sharding": "stage2", "recompute": False}, set()),
    "lora": ({"lora": True, "pissa": False, "sharding": "stage1", "use_flash_attention": True}, set()),
    "qlora": ({"lora": True, "weight_quantize_algo": "nf4"}, set()),
    "wint8_lora": ({"lora": True, "weight_quantize_algo": "weight_only_int8"}, set()),
    "vera": ({"vera": True, "bf16": None, "fp16": True, "unified_checkpoint": None, "save_total_limit": 10}, set()),
    "lokr": (
        {
            **NO_EVALUATION,
            "lokr": True,
            "lr_scheduler_type": "linear",
            "src_length": 512,
            "max_length": 512,
            "attention_probs_dropout_prob": 0,
            "hidden_dropout_prob": 0,
            "save_strategy": "steps",
        },
        set(),
    ),
    "reft": (
        {
            **NO_EVALUATION,
            "reft": True,
            "intervention_type": "TinyIntervention",
            "warmup_ratio": 0.01,
            "max_length": 512,
            "remove_unused_columns": False,
            "metric_for_best_model": "no",
            "unified_checkpoint": None,
        },
        set(),
    ),
    "pt": ({"prefix_tuning": True, "learning_rate": 3e-02, "use_flash_attention": True}, set()),
    "flashmask/sft": (FLASHMASK, set()),
    "flashmask/lora": (FLASHMASK | {"lora": True, "benchmark": True}, set()),
    "dpo": (
        PREFERENCE | {"beta": 0.1, "label_smoothing": 0.0, "lazy": False, "recompute_granularity": "full"},
        {"train_dataset_path", "dev_dataset_path", "max_seq_len", "max_prompt_len", "loss_type"},
    ),
    "pretrain": (
        {
            "dataset_name_or_path": None,
            "input_dir": "./data",
            "max_seq_length": 4096,
            "virtual_pp_degree": 1,
            "sequence_parallel": 0,
            "use_fused_rms_norm": True,
            "use_fused_rope": True,
            "distributed_dataloader": 1,
            "min_learning_rate": 3e-06,
            "weight_decay": 0.01,
            "continue_training": 1,
        },
        {"input_dir", "max_seq_length", "dataset_name_or_path"},
    ),
}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_shipped_file_loads(path):
    config = load(str(path), methods=BUILT)
    assert (config.peft is None) == path.name.startswith("sft")
    assert config.train.do_train and config.data.zero_padding
    unexpected = [note for note in config.notes if "CPU" not in note and "flash_mask" not in note]
    assert unexpected == [], "a shipped file sets a key without effect"


def test_shipped_files_exist_for_every_family():
    """Expect every method, QLoRA and full fine-tuning for three families, and LoRA and full fine-tuning for Mistral."""
    methods = {config_name(switch) for switch in BUILT} | {"sft", "qlora", "wint8_lora"}
    expected = {f"{family}/{method}" for family in ("llama", "qwen", "smollm2") for method in methods}
    expected |= {"mistral/sft", "mistral/lora"}
    names = {str(path.relative_to(ROOT)).removesuffix("_argument.json") for path in SHIPPED}
    assert names == expected
    written = {json.loads(path.read_text(encoding="utf-8"))["output_dir"] for path in SHIPPED}
    assert len(written) == len(SHIPPED), "two files share an output_dir: a run of one would resume the other"


@pytest.mark.parametrize("method", ["loftq", "qera"])
def test_quantized_init_without_quantization_is_refused(tmp_path, method):
    (found,) = problems(write(tmp_path, COMMON | {"lora": True, method: True}), methods=BUILT)
    assert found.key == method
    assert "set weight_quantize_algo" in found.message


def config_name(switch: str) -> str:
    """Return the name of the file for a switch, as in PaddleNLP's llm/config."""
    names = {"prefix_tuning": "pt", "lora_use_mixer": "moslora"}
    return names.get(switch, switch.removeprefix("use_"))


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_file_loads_or_is_refused(tmp_path, name):
    difference, refused = OFFICIAL[name]
    path = write(tmp_path, COMMON | difference)
    if not refused:
        config = load(path, methods=BUILT)
        noted = {note.split(" ")[0] for note in config.notes}
        written = (COMMON | difference).items()
        without_effect = {"unified_checkpoint", "eval_accumulation_steps", "sharding"}
        assert {key for key, value in written if key in without_effect and value is not None} <= noted
        assert (config.peft is None) == name.endswith("sft")
    else:
        found = problems(path, methods=BUILT)
        assert {problem.key for problem in found} == refused, [str(problem) for problem in found]
        assert all("not available yet" in problem.message for problem in found) or name == "pretrain"
