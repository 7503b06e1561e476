"""Every backend of every op on a GPU against the reference on the CPU; skipped without a GPU."""

from __future__ import annotations

import pytest

from paddlenlp_ext.doctor.check import Check, run_checks
from paddlenlp_ext.doctor.devices_and_dtypes import GPU_TARGETS, unavailable_reason
from paddlenlp_ext.doctor.op_checks import op_checks

CHECKS = [check for target in GPU_TARGETS if unavailable_reason(target) is None for check in op_checks(target)]


@pytest.mark.gpu
@pytest.mark.skipif(not CHECKS, reason=str(unavailable_reason(GPU_TARGETS[0])))
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: f"{check.name}, {check.target}")
def test_op_on_gpu_gives_numbers_of_the_cpu(check: Check):
    (result,) = run_checks([check])
    assert result.passed, result.error or f"difference {result.difference}, limit {check.limit}"
