"""Checks of training: compare losses and gradient norms of two steps with the reference backends on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from paddlenlp_ext.doctor.backends import reference_ops
from paddlenlp_ext.doctor.check import Check, Difference, relative_difference
from paddlenlp_ext.doctor.devices_and_dtypes import CPU_TARGETS, GPU_TARGETS, Target
from paddlenlp_ext.doctor.tiny_run import STEPS, precision_keys, run_training
from paddlenlp_ext.peft.registry import PEFT_METHODS

AREA = "training"
LIMITS = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}
REFERENCE = Target("cpu", "float32")
"""Target of the reference results for training and generation."""


class Run(NamedTuple):
    """Training run of a check.

    Attributes:
        switch: adapter method; None: train all weights.
        algorithm: quantized format of the frozen base model; None: not quantized.
        keys: configuration keys of the run.
        dtypes: dtypes in which the run is checked; empty: all dtypes.
        kind: kind of rows and loss, a key of `tiny_run.KINDS`.
        only_on: device on which the run is checked; None: all devices.
        is_method: whether the run checks only an adapter method; all ops that it uses are also checked by other runs.
    """

    switch: str | None = None
    algorithm: str | None = None
    keys: Mapping[str, Any] = MappingProxyType({})
    dtypes: tuple[str, ...] = ()
    kind: str = "sft"
    only_on: str | None = None
    is_method: bool = False


def training_runs() -> dict[str, Run]:
    """Return runs by name: optimizers, DPO, reward models, quantized base models and adapter methods."""
    runs = {"full": Run(), "full, recompute": Run(keys={"recompute": True})}
    runs |= {f"full, {optimizer}": Run(keys={"optim": optimizer}) for optimizer in ("adamw_mini", "adamw_8bit", "muon")}
    in_16_bits = {"fp16_opt_level": "O2"}
    runs["full, 16-bit weights"] = Run(keys=in_16_bits, dtypes=("bfloat16", "float16"))
    of_weights = {"stochastic rounding": {"master_weight": False}, "fp32 gradients": {"amp_master_grad": True}}
    for name, keys in of_weights.items():
        runs[f"full, 16-bit weights, {name}"] = Run(keys={**in_16_bits, **keys}, dtypes=("bfloat16",))
    runs["full, recompute, offloaded inputs"] = Run(keys={"recompute": True, "offload_recompute_inputs": True})
    runs["full, offloaded optimizer state"] = Run(keys={"offload_optim": True}, only_on="gpu")
    runs["dpo"] = Run(kind="dpo")
    runs["kto"] = Run(kind="dpo", keys={"loss_type": "kto"})
    runs["dpo, lora over nf4"] = Run("lora", "nf4", kind="dpo")
    runs["reward model"] = Run(kind="reward")
    for algorithm in ("nf4", "fp4", "weight_only_int8", "weight_only_int4"):
        runs[f"lora over {algorithm}"] = Run("lora", algorithm)
    for switch in PEFT_METHODS.names():
        base = "nf4" if getattr(PEFT_METHODS.get(switch), "needs_quantized_base", False) else None
        runs[f"{switch} over nf4" if base else switch] = Run(switch, base, is_method=switch != "lora")
    return runs


def training_checks(target: Target) -> list[Check]:
    """Return one check per run that applies to a target.

    Checks of runs with `is_method` are late, except on the first CPU target and on the first GPU target.
    """
    is_second, limit = target not in (CPU_TARGETS[0], GPU_TARGETS[0]), LIMITS[target.dtype]
    return [
        Check(AREA, name, target, limit, functools.partial(measure_training, name, target), run.is_method and is_second)
        for name, run in training_runs().items()
        if (not run.dtypes or target.dtype in run.dtypes) and run.only_on in (None, target.device)
    ]


def measure_training(name: str, target: Target) -> Difference:
    """Return the largest relative difference in losses and gradient norms between a run and its reference."""
    run = training_runs()[name]
    found = run_training({**run.keys, **precision_keys(target)}, run.switch, run.algorithm, kind=run.kind)
    return difference_of_steps(found, reference_training(name))


def difference_of_steps(found: list[float], expected: list[float]) -> Difference:
    """Return the largest relative difference between two results of `run_training`."""
    names = [f"{number} of step {step}" for number in ("loss", "gradient norm") for step in range(1, STEPS + 1)]
    return relative_difference(map(np.array, found), map(np.array, expected), names)


@functools.cache
def reference_training(name: str) -> list[float]:
    """Return the losses and gradient norms of a run in float32 on the CPU with the reference backend of every op."""
    run = training_runs()[name]
    keys = {key: value for key, value in run.keys.items() if key != "fp16_opt_level"}
    with reference_ops():
        return run_training({**keys, **precision_keys(REFERENCE)}, run.switch, run.algorithm, kind=run.kind)
