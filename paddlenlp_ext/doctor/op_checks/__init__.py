"""Checks of ops: compare each backend on each target with the reference on the CPU."""

from __future__ import annotations

import functools

import numpy as np

from paddlenlp_ext.doctor.backends import probe, reference_ops
from paddlenlp_ext.doctor.check import Check, Difference, relative_difference
from paddlenlp_ext.doctor.devices_and_dtypes import Target, on_device
from paddlenlp_ext.doctor.op_checks.case import OP_CASES, Inputs, OpCase, error_limit
from paddlenlp_ext.ops.dispatch import DispatchedOp, dispatched_ops

AREA = "ops"


def op_checks(target: Target) -> list[Check]:
    """Return one check per op and available backend for a target; on the CPU, the reference needs no check."""
    cases, x, limit = dict(OP_CASES.items()), probe(target), error_limit(target)
    return [
        Check(AREA, f"{op.name}: {backend}", target, limit, functools.partial(_measure, op, backend, target))
        for op in dispatched_ops()
        if op.name in cases and target.dtype in cases[op.name].dtypes(target)
        for backend in op.backends
        if op.unavailable_reason(backend, x) is None and (backend != "reference" or target.device != "cpu")
    ]


def _measure(op: DispatchedOp, backend: str, target: Target) -> Difference | None:
    case = OP_CASES.get(op.name)
    with op.restricted_to(backend) as used:
        actual = _results(case, target, target.dtype)
    assert used.chosen or used.unavailable_reason, f"the test case of {op.name} does not call the op"
    return relative_difference(actual, reference_results(op.name, target.dtype)) if used.chosen else None


@functools.cache
def reference_results(name: str, dtype: str) -> list[np.ndarray]:
    """Return the results of a test case with the reference backends on the CPU, for inputs rounded to `dtype`."""
    case = OP_CASES.get(name)
    with reference_ops():
        return _results(case, Target("cpu", dtype if case.keeps_dtype else "float32"), dtype)


def _results(case: OpCase, target: Target, rounded_to: str) -> list[np.ndarray]:
    """Run a test case on a target; return the outputs, followed by the gradients of the inputs."""
    with on_device(target.device):
        inputs = Inputs(target.dtype, rounded_to)
        outputs = list(case.run(inputs))
        results = [*outputs, *inputs.gradients(outputs)]
        return [result.astype("float32").numpy() for result in results]
