"""Runs of a tiny model on one and several processes, whose results must agree; workers read their cases from a file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.init_weights import random_weight
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.trainer.build_trainer import build_trainer
from paddlenlp_ext.trainer.load_data import RunData
from paddlenlp_ext.trainer.optimizers.optimizer_state import optimizer_state
from paddlenlp_ext.trainer.optimizers.parameter_groups import updated_parameters
from paddlenlp_ext.utils.distributed_env import rank
from tests.common.models import TINY_LLAMA
from tests.common.scripts import ROOT, script_environment
from tests.common.training import PreferenceRows, RewardRows, Rows, Tokenizer, make_config

WORKER = ROOT / "tests" / "parallel" / "parallel_worker.py"
NUM_STEPS = 10


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        name: name of its folder.
        keys: flat configuration keys in addition to the defaults of `run_case`.
        model: changes to the tiny model's configuration.
        switch, peft: the JSON key that selects the adapter method, and its options; None trains all weights.
    """

    name: str
    keys: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    switch: str | None = None
    peft: dict[str, Any] = field(default_factory=dict)

    def on_one_process(self, data_ranks: int = 1) -> Case:
        """Return the same run for one process, which runs the micro-batches of all data ranks in sequence."""
        layout_keys = {key for key in self.keys if "parallel" in key or key.startswith("sharding")}
        keys = {key: value for key, value in self.keys.items() if key not in layout_keys}
        keys["gradient_accumulation_steps"] = keys.get("gradient_accumulation_steps", 1) * data_ranks
        return dataclasses.replace(self, name=f"{self.name}-one-process", keys=keys)


@dataclass(frozen=True)
class Outcome:
    """Results of a run: loss and gradient norm of every step, evaluation loss, trainable parameters, saved weights."""

    losses: np.ndarray
    norms: np.ndarray
    evaluation: float
    num_trained: int
    weights: dict[str, np.ndarray]
    folder: Path


def write_model(case: Case, folder: Path) -> Path:
    """Save the case's model once; equal changes to the configuration give the same folder."""
    path = folder / "models" / hashlib.sha256(json.dumps(case.model, sort_keys=True).encode()).hexdigest()[:16]
    if not path.is_dir():
        model = AutoModelForCausalLM.from_config({**TINY_LLAMA, **case.model}, seed=1)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # from zero, Adam would amplify rounding only
                parameter.set_value(random_weight(name, tuple(parameter.shape), 1, 0.2))
        model.save_pretrained(path)
    return path


def run_case(case: Case, folder: Path) -> None:
    """Train, evaluate and save as `run_finetune.py` does, on rows in memory."""
    keys = {
        "model_name_or_path": str(write_model(case, folder)),
        "device": "cpu",
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "max_steps": NUM_STEPS,
        "learning_rate": 1e-3,
        # Adam divides a gradient by its own size: near zero, rounding would become a full step.
        "adam_epsilon": 1e-4,
        "do_eval": True,
        "save_strategy": "no",
        "zero_padding": True,
        **case.keys,
    }
    config = make_config(folder / case.name, **keys)
    if case.switch is not None:
        config = dataclasses.replace(config, peft=peft_methods()[case.switch](**case.peft), peft_switch=case.switch)
    source = ModelSource.from_config(config.model)
    if config.reward is not None:
        source = source.as_classifier(config.train.seed, Tokenizer.pad_token_id)
    rows = [_rows(case, folder, num_rows, seed) for num_rows, seed in ((26, 3), (7, 4))]
    data = RunData(source, Tokenizer(), SimpleNamespace(stop_token_ids=()), *rows)
    trainer = build_trainer(config, data)
    held = watch_gradients(trainer)
    trainer.train()
    held["values"] = num_bytes(p for p in trainer.model.parameters() if p._is_initialized())
    held["state"] = num_bytes(optimizer_state(trainer.optimizer, updated_parameters(trainer.model)).values())
    (folder / case.name / f"held-{rank()}.json").write_text(json.dumps(held))
    trainer.save_model()
    trainer.evaluate()


def _rows(case: Case, folder: Path, num_rows: int, seed: int) -> Rows:
    """Return rows in memory; preference runs have pairs, or rated answers for KTO, and reward models have pairs."""
    if "center_rewards_coefficient" in case.keys:
        return RewardRows(num_rows, folder / f"{case.name}-{seed}", seed)
    if "loss_type" not in case.keys:
        return Rows(num_rows, seed=seed)
    return PreferenceRows(num_rows, folder / f"{case.name}-{seed}", seed, in_pairs=case.keys["loss_type"] != "kto")


def watch_gradients(trainer: Any) -> dict[str, int]:
    """Return a dict that is filled during training with the peak bytes of gradients on this process.

    "gradients": at the end of a step's micro-batches; "backward": after each gradient of a backward pass.
    """
    held, sum_gradients = {"gradients": 0, "backward": 0}, trainer.process_group.sum_gradients
    trained = [parameter for parameter in trainer.model.parameters() if not parameter.stop_gradient]

    def record(when: str) -> None:
        held[when] = max(held[when], num_bytes(p.grad for p in trained if p.grad is not None))

    def record_and_sum(parameters) -> None:
        record("gradients")
        sum_gradients(parameters)

    for parameter in trained:
        parameter._register_backward_hook(lambda: record("backward"))
    trainer.process_group.sum_gradients = record_and_sum
    return held


def num_bytes(tensors) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.size * tensor.element_size() for tensor in tensors)


def outcome(case: Case, folder: Path) -> Outcome:
    """Read the results that `run_case` wrote."""
    history = json.loads((folder / case.name / "trainer_state.json").read_text())["log_history"]
    steps = [entry for entry in history if "loss" in entry]
    is_adapter = case.switch is not None
    stored = open_weights(folder / case.name / ("adapter_model.safetensors" if is_adapter else "model.safetensors"))
    evaluation = json.loads((folder / case.name / "eval_results.json").read_text())["eval_loss"]
    return Outcome(
        np.array([entry["loss"] for entry in steps]),
        np.array([entry["grad_norm"] for entry in steps]),
        evaluation,
        json.loads((folder / case.name / "train_results.json").read_text())["trainable_parameters"],
        {name: stored.read(name) for name in stored.names()},
        folder / case.name,
    )


def launch(
    processes: int, cases: list[Case], folder: Path, timeout: float = 300.0, plugin: dict[str, str] | None = None
) -> dict[str, Outcome]:
    """Run the cases in sequence on several processes, in a single launch; see `launch_arguments`."""
    for case in cases:
        write_model(case, folder)
    (folder / "cases.json").write_text(json.dumps([dataclasses.asdict(case) for case in cases]))
    result = start(processes, [str(WORKER), str(folder)], folder, timeout, plugin)
    assert result.returncode == 0, logs(folder)
    return {case.name: outcome(case, folder) for case in cases}


def selected_cases(request: pytest.FixtureRequest) -> list[Case]:
    """Return the parameter `case` of the selected tests that use the calling fixture, so that no other case runs."""
    items = (item for item in request.session.items if item.getparent(pytest.Module) is request.node)
    found = (item.callspec.params["case"] for item in items if {"case", request.fixturename} <= {*item.fixturenames})
    return list({case.name: case for case in found}.values())


def start(
    processes: int, command: list[str], folder: Path, timeout: float = 300.0, plugin: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python -m paddle.distributed.launch` with one thread per process; logs go to `folder/log`."""
    arguments = launch_arguments(processes, command, folder, plugin)
    return subprocess.run(**arguments, capture_output=True, text=True, timeout=timeout, check=False)


def launch_arguments(
    processes: int, command: list[str], folder: Path, plugin: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return the keyword arguments of `subprocess.run` for `start`.

    Args:
        processes: number of processes.
        command: script and its arguments.
        folder: working directory; logs go to `folder/log`.
        plugin: environment variables of a plug-in with two devices, which the processes share and which connects them;
            None: the processes run on the CPU over gloo.
    """
    launcher = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", str(processes)]
    devices = ",".join(str(process % 2) for process in range(processes))
    where = ["--backend", "gloo"] if plugin is None else ["--devices", devices]
    return {
        "args": [*launcher, *where, "--log_dir", str(folder / "log"), *command],
        "cwd": folder,
        "env": script_environment(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", **(plugin or {})),
    }


def logs(folder: Path) -> str:
    """Return the end of every process's log."""
    files = sorted((folder / "log").glob("workerlog.*"))
    return "\n".join(f"== {file.name}\n{file.read_text()[-3000:]}" for file in files)


def differences(got: Outcome, want: Outcome) -> dict[str, float]:
    """Return relative differences of losses, norms, evaluation and weights, by name.

    A weight is compared as a full tensor, |got - want| / |want|: single values near zero have no meaningful ratio.
    """
    assert got.weights.keys() == want.weights.keys()
    assert len(got.losses) == len(want.losses)
    assert got.num_trained == want.num_trained
    differing = {
        "losses": np.abs(got.losses / want.losses - 1).max(),
        "norms": np.abs(got.norms / want.norms - 1).max(),
    }
    differing["evaluation"] = abs(got.evaluation / want.evaluation - 1)
    for name, value in want.weights.items():
        differing[name] = np.linalg.norm((got.weights[name] - value).ravel()) / np.linalg.norm(value.ravel())
    return {name: float(share) for name, share in differing.items()}


def assert_same_run(got: Outcome, want: Outcome, tolerance: float = 2e-5) -> None:
    """Assert that no relative difference exceeds `tolerance`; the message names those that do.

    AdamW divides gradients by their size, so a matrix that starts from zero has the relative rounding errors of sums in
    float32 over all rows, several steps long.
    """
    too_large = {name: share for name, share in differences(got, want).items() if not share <= tolerance}
    assert not too_large, too_large
