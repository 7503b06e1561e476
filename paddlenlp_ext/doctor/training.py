"""Checks of training: losses and gradient norms of two steps on a target, against the references on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from paddlenlp_ext.doctor.check import Check, relative_difference
from paddlenlp_ext.doctor.targets import Target, reference_ops
from paddlenlp_ext.doctor.tiny_run import precision_keys, run_training
from paddlenlp_ext.peft.registry import PEFT_METHODS

AREA = "training"
LIMITS = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}
REFERENCE = Target("cpu", "float32")
"""Target of the reference numbers of training, generation and layouts."""


class Run(NamedTuple):
    """Training run of a check.

    Attributes:
        switch: adapter method; None trains all weights.
        algorithm: format of the frozen base; None: not quantized.
        keys: keys of the run.
        dtypes: dtypes in which the run exists; empty: all.
    """

    switch: str | None = None
    algorithm: str | None = None
    keys: Mapping[str, Any] = MappingProxyType({})
    dtypes: tuple[str, ...] = ()


def training_runs() -> dict[str, Run]:
    """Return the runs by name: full training, each adapter method, formats of the base, and optimizers."""
    runs = {"full": Run(), "full, recompute": Run(keys={"recompute": True})}
    runs |= {f"full, {optimizer}": Run(keys={"optim": optimizer}) for optimizer in ("adamw_mini", "adamw_8bit", "muon")}
    runs["full, 16-bit weights"] = Run(keys={"fp16_opt_level": "O2"}, dtypes=("bfloat16", "float16"))
    for switch in PEFT_METHODS.names():
        needs_quantized = getattr(PEFT_METHODS.get(switch), "needs_quantized_base", False)
        runs[f"{switch} over nf4" if needs_quantized else switch] = Run(switch, "nf4" if needs_quantized else None)
    for algorithm in ("nf4", "fp4", "weight_only_int8", "weight_only_int4"):
        runs[f"lora over {algorithm}"] = Run("lora", algorithm)
    return runs


def training_checks(target: Target) -> list[Check]:
    """Return a check of each run on a target."""
    return [
        Check(AREA, name, target, LIMITS[target.dtype], functools.partial(measure_training, name, target))
        for name, run in training_runs().items()
        if not run.dtypes or target.dtype in run.dtypes
    ]


def measure_training(name: str, target: Target) -> float:
    """Return the relative difference of the losses and norms of a run from those of the references."""
    run = training_runs()[name]
    found = run_training({**run.keys, **precision_keys(target)}, run.switch, run.algorithm)
    return relative_difference(each_alone(found), each_alone(reference_training(name)))


def each_alone(numbers: list[float]) -> list[np.ndarray]:
    """Return an array for each number, so that each is compared relative to itself."""
    return [np.array([number]) for number in numbers]


@functools.cache
def reference_training(name: str) -> list[float]:
    """Return losses and norms of a run in float32 on the CPU with the references of all ops."""
    run = training_runs()[name]
    keys = {key: value for key, value in run.keys.items() if key != "fp16_opt_level"}
    with reference_ops():
        return run_training({**keys, **precision_keys(REFERENCE)}, run.switch, run.algorithm)
