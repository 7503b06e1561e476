"""GRPO on two processes over gloo, compared with one process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.cli.test_run_grpo import REWARDS
from tests.common.parallel import logs, start
from tests.common.scripts import LLM

pytestmark = pytest.mark.layouts

PROMPTS = [f"{word} fig =" for word in ("red", "blue", "lime", "plum")]


def write_keys(folder: Path, output: str, **keys: object) -> list[str]:
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"src": prompt, "answer": "fig"}) + "\n" for prompt in PROMPTS)
    )
    (folder / "rewards.py").write_text(REWARDS)
    settings = {
        "model_name_or_path": str(folder / "model"),
        "train_dataset_path": str(folder / "prompts.jsonl"),
        "output_dir": str(folder / output),
        "reward_funcs": [f"{folder}/rewards.py:even"],
        "chat_template": "none",
        "do_train": True,
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "max_completion_length": 6,
        "max_steps": 4,
        "num_iterations": 2,
        "beta": 0.1,
        "learning_rate": 1e-3,
        "scale_rewards": "batch",
        "logging_steps": 1,
        "device": "cpu",
        **keys,
    }
    (folder / f"{output}.json").write_text(json.dumps(settings))
    return [str(LLM / "run_grpo.py"), str(folder / f"{output}.json")]


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["", "dynamic_sampling"])
@pytest.mark.parametrize("keys", [{}, {"sharding": "stage2"}], ids=["data", "stage2"])
def test_grpo_on_two_processes_matches_one_process(run_folders, keys, is_dynamic):
    if is_dynamic:
        funcs = [f"{run_folders}/rewards.py:even_unless_plum"]
        keys = {**keys, "dynamic_sampling": True, "reward_funcs": funcs}
    alone = {name: value for name, value in keys.items() if name != "sharding"}
    one = start(1, write_keys(run_folders, "one", gradient_accumulation_steps=2, **alone), run_folders)
    assert one.returncode == 0, logs(run_folders)
    two = start(2, write_keys(run_folders, "two", **keys), run_folders)
    assert two.returncode == 0, logs(run_folders)
    files = [sorted((run_folders / name / "rollouts").iterdir()) for name in ("one", "two")]
    for first, second in zip(*files, strict=True):
        groups = [[json.loads(line) for line in file.read_text().splitlines()] for file in (first, second)]
        for group, other in zip(*groups, strict=True):
            assert group["completion_ids"] == other["completion_ids"] and group["row"] == other["row"]
    histories = [
        json.loads((run_folders / name / "trainer_state.json").read_text())["log_history"] for name in ("one", "two")
    ]
    for entry, other in zip(*histories, strict=True):
        assert entry.keys() == other.keys()
        for name in ("loss", "grad_norm", "kl", "entropy", "clip_ratio/high_max"):
            assert entry[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
    single, double = (load_file(run_folders / name / "model.safetensors") for name in ("one", "two"))
    for name, values in single.items():
        np.testing.assert_allclose(double[name], values, rtol=1e-4, atol=1e-5, err_msg=name)


def test_grpo_with_tensor_parallelism_is_refused(run_folders):
    result = start(2, write_keys(run_folders, "out", tensor_parallel_degree=2), run_folders)
    assert result.returncode != 0
    assert "tensor_parallel_degree: GRPO samples with the full model in each process" in logs(run_folders)
