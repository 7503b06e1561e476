"""Resumed runs of run_grpo.py: the same bits as a run without interruption, after kills at several moments."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddlenlp_ext.generation.continuous_batching import Engine
from paddlenlp_ext.trainer.train_step import OptimizerStep
from tests.cli.test_run_grpo import metrics, run  # noqa: F401
from tests.common.training import KilledError

KEYS = {
    "max_steps": 6,
    "num_train_epochs": 3,
    "learning_rate": 1e-2,
    "beta": 0.1,
    "temperature": 0.8,
    "lora": "true",
    "lora_rank": 2,
    "save_strategy": "steps",
    "save_steps": 1,
}
SEVERAL_STEPS = {"num_iterations": 2, "gradient_accumulation_steps": 1, "steps_per_generation": 2}


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: int) -> None:
    """Raise an error at a call of a method, counted from 1."""
    calls, original = iter(range(1, 10_000)), getattr(owner, name)

    def method(*arguments):
        if next(calls) == call:
            raise KilledError
        return original(*arguments)

    monkeypatch.setattr(owner, name, method)


def adapter(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("keys", [{}, SEVERAL_STEPS], ids=["one_step", "several_steps"])
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [(OptimizerStep, "_collate_local", 3), (OptimizerStep, "_collate_local", 4), (Engine, "step", 9)],
    ids=["before_step_3", "before_step_4", "in_sampling"],
)
def test_run_that_is_killed_resumes_to_the_same_bits(run, run_folders, monkeypatch, owner, name, call, keys):  # noqa: F811
    straight = run(**{**KEYS, **keys}, output_dir=run_folders / "straight")
    with monkeypatch.context() as patch:
        kill_at(patch, owner, name, call)
        with pytest.raises(KilledError):
            run(**{**KEYS, **keys}, output_dir=run_folders / "killed")
    assert len(metrics(run_folders / "killed")) < 6
    killed = run(**{**KEYS, **keys}, output_dir=run_folders / "killed", resume_from_checkpoint="true")
    for tensor, values in adapter(straight).items():
        np.testing.assert_array_equal(adapter(killed)[tensor], values)
    for one, other in zip(metrics(straight), metrics(killed), strict=True):
        assert [one[key] for key in ("loss", "grad_norm", "kl")] == [other[key] for key in ("loss", "grad_norm", "kl")]
    for file in (straight / "rollouts").iterdir():
        assert file.read_bytes() == (killed / "rollouts" / file.name).read_bytes()


@pytest.mark.parametrize(("owner", "name", "call"), [(OptimizerStep, "_collate_local", 4), (Engine, "step", 20)])
def test_run_with_dynamic_sampling_resumes_to_the_same_bits(run, run_folders, monkeypatch, owner, name, call):  # noqa: F811
    rewards = {"reward_funcs": f"{run_folders}/rewards.py:even_unless_plum", "reward_weights": None}
    keys = {**KEYS, **SEVERAL_STEPS, **rewards, "dynamic_sampling": "true", "max_gen_batches": 3}
    straight = run(**keys, output_dir=run_folders / "straight")
    assert max(step.get("dynamic_sampling/num_rounds", 0) for step in metrics(straight)) > 1
    with monkeypatch.context() as patch:
        kill_at(patch, owner, name, call)
        with pytest.raises(KilledError):
            run(**keys, output_dir=run_folders / "killed")
    killed = run(**keys, output_dir=run_folders / "killed", resume_from_checkpoint="true")
    for tensor, values in adapter(straight).items():
        np.testing.assert_array_equal(adapter(killed)[tensor], values)
    for file in (straight / "rollouts").iterdir():
        assert file.read_bytes() == (killed / "rollouts" / file.name).read_bytes()


def test_history_of_a_resumed_run_has_the_answers_of_the_current_batch(run, run_folders):  # noqa: F811
    run(**{**KEYS, **SEVERAL_STEPS})
    for step in range(2, 7):  # resume within the first batch; the files of the later batches remain
        shutil.rmtree(run_folders / "out" / f"checkpoint-{step}")
    run(**{**KEYS, **SEVERAL_STEPS}, resume_from_checkpoint="true")
    lines = [json.loads(line) for line in (run_folders / "out" / "history.jsonl").read_text().splitlines()]
    answers = {line["step"]: line["answers"] for line in lines if line.get("event") == "sampled_answers"}
    assert answers[1] == answers[2] != answers[5]


def test_resume_without_the_rollouts_of_the_checkpoint_names_the_file(run, run_folders, monkeypatch):  # noqa: F811
    with monkeypatch.context() as patch:
        kill_at(patch, OptimizerStep, "_collate_local", 3)
        with pytest.raises(KilledError):
            run(**{**KEYS, **SEVERAL_STEPS})
    shutil.rmtree(run_folders / "out" / "rollouts")
    with pytest.raises(ValueError, match=r"epoch-0-batch-000000\.jsonl is missing"):
        run(**{**KEYS, **SEVERAL_STEPS}, resume_from_checkpoint="true")


def test_resume_with_other_rewards_is_an_error(run):  # noqa: F811
    run(**{**KEYS, "max_steps": 1})
    with pytest.raises(ValueError, match=r"a different objective: reward_weights was .*1,0.5"):
        run(**KEYS, resume_from_checkpoint="true", reward_weights="1,2")


def test_resume_with_other_limits_of_sampling_and_rewards_continues(run):  # noqa: F811
    keys = {**KEYS, "num_iterations": 2}
    run(**{**keys, "max_steps": 1})
    limits = {"reward_time_limit": 600, "sampling_batch_size": 8, "num_generations_eval": 2, "steps_per_generation": 2}
    resumed = run(**{**keys, "max_steps": 2}, **limits, resume_from_checkpoint="true")
    assert len(metrics(resumed)) == 2
