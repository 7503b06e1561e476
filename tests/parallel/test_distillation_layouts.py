"""Distillation on two processes over gloo, compared with one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from tests.common.models import TINY_LLAMA, write_tiny_model
from tests.common.parallel import logs, start
from tests.common.scripts import LLM

pytestmark = pytest.mark.layouts
SAMPLED = {"distillation_lmbda": 0.5, "max_new_tokens": 5}


def write_keys(folder: Path, output: str, **keys: Any) -> list[str]:
    settings = {
        "model_name_or_path": str(folder / "model"),
        "dataset_name_or_path": str(folder / "data"),
        "data_cache_dir": str(folder / "cache"),
        "output_dir": str(folder / output),
        "teacher_model_name_or_path": str(folder / "teacher"),
        "distillation_sft_ratio": 0.3,
        "chat_template": "none",
        "do_train": True,
        "per_device_train_batch_size": 2,
        "max_length": 32,
        "src_length": 16,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "device": "cpu",
        **keys,
    }
    (folder / f"{output}.json").write_text(json.dumps(settings))
    return [str(LLM / "run_finetune.py"), str(folder / f"{output}.json")]


@pytest.mark.parametrize(
    ("keys", "sharding"), [(SAMPLED, ""), ({}, "stage1"), (SAMPLED, "stage2")], ids=["data", "stage1", "stage2"]
)
def test_distillation_on_two_processes_matches_one_process(
    run_folders: Path, keys: dict[str, Any], sharding: str
) -> None:
    write_tiny_model(run_folders / "teacher")
    AutoModelForCausalLM.from_config(TINY_LLAMA, seed=9).save_pretrained(run_folders / "teacher")
    one = start(1, write_keys(run_folders, "one", gradient_accumulation_steps=2, **keys), run_folders)
    assert one.returncode == 0, logs(run_folders)
    two = start(2, write_keys(run_folders, "two", sharding=sharding, **keys), run_folders)
    assert two.returncode == 0, logs(run_folders)
    histories = [
        json.loads((run_folders / name / "trainer_state.json").read_text())["log_history"] for name in ("one", "two")
    ]
    for entry, other in zip(*histories, strict=True):
        assert entry.keys() == other.keys()
        assert entry.get("completions/mean_length") == other.get("completions/mean_length")
        for name in ("loss", "divergence", "cross_entropy", "grad_norm"):
            assert entry[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
    assert any("completions/mean_length" in entry for entry in histories[0]) == bool(keys)
    single, double = (load_file(run_folders / name / "model.safetensors") for name in ("one", "two"))
    for name, values in single.items():
        np.testing.assert_allclose(double[name], values, rtol=1e-4, atol=1e-5, err_msg=name)
