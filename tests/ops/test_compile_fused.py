"""Triton kernels of losses, LoRA, optimizers and decoding, compiled for GPUs on a machine without one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.common.scripts import script_environment

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (pip install -e '.[triton]')", allow_module_level=True)


@pytest.mark.slow
def test_fused_kernels_compile_for_hopper(tmp_path):
    # In a separate process, because this process has the interpreter's kernels.
    environment = script_environment(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    command = [sys.executable, "-m", "tests.ops.compile_fused"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 9
    for kernel, _, shared, wide_loads, tensor_cores in lines:
        assert int(shared) <= 64 << 10, f"{kernel} does not fit the shared memory of older GPUs"
        assert int(wide_loads) > 0, f"{kernel} has no wide loads"
        assert (int(tensor_cores) > 0) == ("low_rank" in kernel or kernel == "norm_linear_kernel"), (
            f"{kernel} has {tensor_cores} tensor-core instructions"
        )
