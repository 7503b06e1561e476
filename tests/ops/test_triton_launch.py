"""Launches of Triton kernels on two GPUs that a library in place of CUDA's driver pretends to be."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import paddle
import pytest

from tests.common.scripts import ROOT, script_environment

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (pip install -e '.[triton]')", allow_module_level=True)

SOURCE = Path(__file__).parent / "fake_gpus" / "libcuda.c"


@pytest.fixture(scope="module")
def launches():
    """Return the cases of fake_gpus/launches.py; it runs in a process of its own because Triton is not interpreted."""
    import triton

    folder = ROOT / "build" / f"fake_gpus-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}"
    library = folder / "libcuda.so.1"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
        built = library.with_suffix(f".{os.getpid()}")
        compiler = shlex.split(os.environ.get("CC", "gcc"))
        subprocess.run([*compiler, "-shared", "-fPIC", f"-I{headers}", str(SOURCE), "-o", str(built)], check=True)
        built.replace(library)
    places = dict.fromkeys(("LD_LIBRARY_PATH", "TRITON_LIBCUDA_PATH", "TRITON_CACHE_DIR"), str(folder))
    environment = script_environment(TRITON_INTERPRET="0", **places)
    command = [sys.executable, "-m", "tests.ops.fake_gpus.launches"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fp_fusion" not in done.stderr.lower()  # Triton warns where its default decides
    return json.loads(done.stdout.splitlines()[-1])


def test_launch_passes_grid_pointers_and_strides(launches):
    (launch,) = launches["other current device"]
    assert launch["pointers"][:5] == launches["pointers"]
    assert launch["numbers"][:3] == [600, 48, 96]  # rows, size of a row, distance of rows
    assert launch["grid"] == [19, 1, 1]  # of 32 rows


def test_launch_is_on_the_device_and_stream_of_the_tensor(launches):
    places = {name: [(launch["device"], launch["stream"]) for launch in launches[name]] for name in PLACES}
    assert places == PLACES


PLACES = {
    "other current device": [(0, 70)],
    "second GPU": [(1, 71)],
    "other stream": [(1, 81)],
    "thread": [(1, 81)],
    "PyTorch for CPUs": [(1, 81)],
}


def test_device_capability_is_that_of_the_gpu(launches):
    assert launches["capability"] == 90


def test_launch_leaves_device_and_driver_as_they_were(launches):
    assert launches["device after"] == 1
    assert launches["error"] and launches["device after the error"] == 0
    assert launches["Triton's own stream"] == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("float32", "fp32"),
        ("bfloat16", "bf16"),
        ("float16", "fp16"),
        ("int64", "i64"),
        ("int32", "i32"),
        ("int8", "i8"),
        ("uint8", "u8"),
    ],
)
def test_triton_names_the_dtypes_of_paddle(name, expected):
    from triton._utils import canonicalize_dtype

    assert canonicalize_dtype(paddle.zeros([1], name).dtype) == expected
