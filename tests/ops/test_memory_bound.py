"""Compilation of the Triton kernels of norms, rotations and gates for a GPU, without a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.common.scripts import script_environment
from tests.ops.interpreter import skip_without_triton

skip_without_triton()


@pytest.mark.layouts
def test_memory_bound_kernels_compile_for_hopper_to_wide_loads_and_stores(tmp_path):
    # In a separate process, because this process has the interpreter's kernels.
    environment = script_environment(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    command = [sys.executable, "-m", "tests.ops.compile_memory_bound"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 3
    for kernel, loads, stores in lines:
        assert int(loads) > 0, f"{kernel} reads element by element"
        assert int(stores) > 0, f"{kernel} writes element by element"
