"""Launches of Triton kernels on two GPUs that a library in place of CUDA's driver pretends to be."""

from __future__ import annotations

import importlib.util
import json
from types import SimpleNamespace

import paddle
import pytest

from paddlenlp_ext.devices import AbsentGpu
from paddlenlp_ext.doctor.op_checks.case import OP_CASES
from paddlenlp_ext.ops.dispatch import dispatched_ops
from paddlenlp_ext.ops.triton_utils.launch import on_gpu_with_triton, specialization
from tests.ops.fake_gpus import run_on_fake_gpus

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (pip install -e '.[triton]')", allow_module_level=True)


@pytest.fixture(scope="module")
def launches():
    """Return the cases of fake_gpus/launches.py; it runs in a process of its own because Triton is not interpreted."""
    done = run_on_fake_gpus("launches")
    assert done.returncode == 0, done.stderr
    assert "fp_fusion" not in done.stderr.lower()  # Triton warns where its default decides
    return json.loads(done.stdout.splitlines()[-1])


def test_launch_passes_grid_pointers_and_strides(launches):
    (launch,) = launches["other current device"]
    assert launch["pointers"][:5] == launches["pointers"]
    assert launch["numbers"][:3] == [600, 48, 96]  # rows, row size, row stride
    assert launch["grid"] == [19, 1, 1]  # 19 programs of 32 rows each


def test_launch_of_a_known_signature_passes_its_own_grid_pointers_and_numbers(launches):
    (launch,) = launches["other rows"]
    assert launches["kernels after other rows"] == 1
    assert launch["pointers"][:5] == launches["pointers, other rows"] != launches["pointers"]
    assert launch["numbers"][:3] == [616, 48, 96] and launch["grid"] == [20, 1, 1]


def test_launch_on_an_unaligned_pointer_takes_a_kernel_of_its_own(launches):
    (launch,) = launches["unaligned"]
    assert launches["kernels after unaligned"] == 2
    assert launch["pointers"][:5] == launches["pointers, unaligned"]


def test_arguments_of_one_specialization_are_specialized_alike_by_triton():
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import native_specialize_impl

    edges = [0, 16, 1 << 31, 1 << 32, 1 << 63]
    numbers = [sign * edge + step for edge in edges for sign in (1, -1) for step in (-17, -16, -1, 0, 1, 2, 15, 16)]
    tensors = [paddle.zeros([64], dtype)[first:] for dtype in ("float32", "int32", "uint8") for first in range(33)]
    found = {}
    for argument in [*filter(lambda n: -(1 << 63) <= n < 1 << 64, numbers), 0.0, 1.0, 2.5, None, True, False, *tensors]:
        by_triton = native_specialize_impl(CUDABackend, argument, False, True, True)
        assert found.setdefault(specialization(argument), by_triton) == by_triton, argument
    assert len(set(map(str, found.values()))) > 12


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


@pytest.mark.parametrize(("device", "capability", "grid"), [(0, 90, [2, 19, 1]), (1, 80, [4, 10, 1])])
def test_sizes_are_those_of_the_gpu_of_the_tensors(launches, device, capability, grid):
    assert launches[f"capability {device}"] == capability
    (launch,) = launches[f"sizes {device}"]
    assert (launch["device"], launch["grid"]) == (device, grid)  # tiles of 32 x 128, and of 64 x 64


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


@pytest.mark.parametrize(
    ("release", "reason"),
    [
        ("3.7.1", "triton 3.7.1 is installed, but 3.8 or later is needed"),
        ("2.9.0", "triton 2.9.0 is installed, but 3.8 or later is needed"),
        ("3.8.0", None),
        ("3.10.0+git1", None),
    ],
)
def test_triton_that_cannot_launch_without_pytorch_is_a_reason_against_the_backend(monkeypatch, release, reason):
    monkeypatch.setattr("importlib.metadata.version", lambda name: release)
    assert on_gpu_with_triton(SimpleNamespace(place=AbsentGpu((9, 0)))) == reason


def test_ops_on_a_gpu_before_compute_capability_8_take_no_triton_kernels():
    x = SimpleNamespace(place=AbsentGpu((7, 5)), dtype=paddle.float16)
    reason = "Triton needs a GPU of compute capability 8.0 or higher, but this GPU has 7.5"
    assert OP_CASES.names()  # imports all ops
    with_triton = [op for op in dispatched_ops() if "triton" in op.backends]
    assert len(with_triton) > 10
    for op in with_triton:
        assert op.unavailable_reason("triton", x) == reason, op.name


def test_ops_of_the_doctor_launch_on_paddle_tensors():
    done = run_on_fake_gpus("ops", "swiglu", "LoRA linear")
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) >= {"swiglu: 2 launches", "LoRA linear: 9 launches"}
