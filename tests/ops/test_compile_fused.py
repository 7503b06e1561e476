"""Triton kernels of losses, LoRA, optimizers and decoding, compiled for GPUs on a machine without one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.common.scripts import script_environment

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (pip install -e '.[triton]')", allow_module_level=True)


def compiled(script: str, cache: Path) -> list[list[str]]:
    """Return the words of each line that a script of this folder prints.

    It runs in a separate process, because this process has the interpreter's kernels.
    """
    environment = script_environment(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(cache))
    command = [sys.executable, "-m", f"tests.ops.{script}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.layouts
def test_fused_kernels_compile_for_hopper(tmp_path):
    lines = compiled("compile_fused", tmp_path)
    assert len(lines) == 11
    for kernel, _, shared, _, wide_loads, tensor_cores in lines:
        assert int(shared) <= 64 << 10, f"{kernel} does not fit the shared memory of older GPUs"
        assert int(wide_loads) > 0, f"{kernel} has no wide loads"
        assert (int(tensor_cores) > 0) == (
            "low_rank" in kernel or kernel in ("norm_linear_kernel", "lora_linear_kernel")
        ), f"{kernel} has {tensor_cores} tensor-core instructions"


@pytest.mark.layouts
def test_attention_kernels_compile_for_hopper_and_ampere_without_large_spills(tmp_path):
    lines = compiled("compile_attention", tmp_path)
    assert len(lines) == 8
    for _, kernel, capability, shared, spilled, wide_loads, tensor_cores in lines:
        assert int(shared) <= {"90": 227, "86": 99}[capability] << 10, f"{kernel} on {capability}: {shared} bytes"
        assert int(spilled) <= 128, f"{kernel} on {capability} spills {spilled} bytes of registers"
        assert int(wide_loads) > 0, f"{kernel} has no wide loads"
        assert (int(tensor_cores) > 0) == ("deltas" not in kernel), f"{kernel}: {tensor_cores} tensor-core instructions"
