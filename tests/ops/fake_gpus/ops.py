"""Launch the Triton kernels of ops on Paddle tensors over the GPUs of libcuda.c, as the doctor calls the ops.

    python -m tests.ops.fake_gpus.ops             every op: some minutes, because every kernel is compiled
    python -m tests.ops.fake_gpus.ops swiglu      one op

The interpreter accepts arguments that Triton refuses on a GPU, such as numbers of NumPy or dtypes without a name. Here
Triton binds, specializes, compiles and launches as on a GPU; results are not computed. Tensors are float32, because
Paddle's own ops run on the CPU. Prints a line for each op.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from types import SimpleNamespace

import paddle

from paddlenlp_ext.devices import AbsentGpu
from paddlenlp_ext.doctor.op_checks.case import OP_CASES, Inputs
from paddlenlp_ext.ops.dispatch import DispatchedOp, dispatched_ops
from tests.ops.fake_gpus import run_on_fake_gpus
from tests.ops.fake_gpus.launches import Gpus


def pretend_gpu(op: DispatchedOp) -> None:
    """Let the Triton backend take tensors for those of a GPU."""
    run, condition = op._backends["triton"]

    def condition_on_a_gpu(x: paddle.Tensor) -> str | None:
        return condition(SimpleNamespace(place=AbsentGpu(), dtype=x.dtype))

    op._backends["triton"] = (run, condition_on_a_gpu)


def run_triton(op: DispatchedOp) -> None:
    """Run the case of an op, forward and backward, with the Triton backend on tensors on the CPU."""
    with op.restricted_to("triton"):
        inputs = Inputs("float32", "float32")
        inputs.gradients(list(OP_CASES.get(op.name).run(inputs)))


def main(names: Iterable[str]) -> None:
    """Run the named ops, or all."""
    gpus, cases = Gpus(), OP_CASES.names()
    for op in dispatched_ops():
        if "triton" in op.backends and op.name in (names or cases):
            pretend_gpu(op)
            if op.unavailable_reason("triton", paddle.zeros([1])):
                continue
            before = gpus.num_launches
            run_triton(op)
            print(f"{op.name}: {gpus.num_launches - before} launches", flush=True)
            assert gpus.num_launches > before, f"the doctor's case of {op.name} reaches no kernel"


if __name__ == "__main__":
    if "TRITON_LIBCUDA_PATH" in os.environ:
        main(sys.argv[1:])
    else:
        done = run_on_fake_gpus("ops", *sys.argv[1:])
        print(done.stdout, done.stderr if done.returncode else "", sep="", end="")
        sys.exit(done.returncode)
