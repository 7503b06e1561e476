"""Training on a GPU, and in parallel layouts on two GPUs, against the CPU; skipped without them."""

from __future__ import annotations

import pytest

from paddlenlp_ext.doctor.check import Check, run_checks
from paddlenlp_ext.doctor.devices_and_dtypes import GPU_TARGETS, unavailable_reason
from paddlenlp_ext.doctor.parallel_layout_checks import layout_checks, layout_target
from paddlenlp_ext.doctor.training_checks import training_checks

TRAINING = [check for target in GPU_TARGETS if unavailable_reason(target) is None for check in training_checks(target)]
HAS_TWO = layout_target().device == "gpu"


def assert_passes(check: Check) -> None:
    (result,) = run_checks([check])
    assert result.passed, result.error or f"difference {result.difference}, limit {check.limit}"


@pytest.mark.gpu
@pytest.mark.skipif(not TRAINING, reason=str(unavailable_reason(GPU_TARGETS[0])))
@pytest.mark.parametrize("check", TRAINING, ids=lambda check: f"{check.name}, {check.target}")
def test_training_on_gpu_gives_losses_of_the_cpu(check: Check):
    assert_passes(check)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_TWO, reason="needs two GPUs")
@pytest.mark.parametrize("check", layout_checks(layout_target()), ids=lambda check: check.name)
def test_layout_on_two_gpus_gives_losses_of_one_process(check: Check):
    assert_passes(check)
