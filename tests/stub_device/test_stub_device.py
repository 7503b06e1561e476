"""Runs on a device with memory of its own, which the C++ library and NumPy cannot read, compared with the CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.common.scripts import LLM, ROOT
from tests.stub_device.plugin import run_with_stub

WORKER = Path(__file__).with_name("worker.py")
DOCTOR = ("-m", "paddlenlp_ext.doctor")


@pytest.fixture
def results_on(stub_folder, run_folders):
    """Return a function that runs the worker on a device and returns its results."""

    def results(device: str) -> dict[str, Any]:
        output = run_folders / device.replace(":", "_")
        words = (device, run_folders / "model", run_folders / "data", output)
        done = run_with_stub(stub_folder, WORKER, *words, PYTHONPATH=str(ROOT))
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return results


@pytest.mark.slow
def test_lora_run_on_the_second_device_equals_the_run_on_the_cpu(results_on):
    on_cpu, on_device = results_on("cpu"), results_on("stub:1")
    assert (on_cpu.pop("place"), on_device.pop("place")) == ("cpu", "stub:1")
    for key in ("answers", "served"):
        assert on_device[key] == on_cpu[key]
    for key in ("lora", "resumed", "logits"):
        np.testing.assert_allclose(on_device[key], on_cpu[key], rtol=1e-5, atol=1e-5, err_msg=key)
    assert on_device["resumed"] == on_device["lora"]


def test_export_on_the_device_compares_graph_and_model(stub_folder, run_folders):
    words = ("--model_name_or_path", run_folders / "model", "--output_path", run_folders / "graph")
    script = LLM / "predict" / "export_model.py"
    done = run_with_stub(stub_folder, script, *words, "--device", "stub:1", "--dtype", "float32")
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"differ by up to (\S+) of the largest logit", done.stdout + done.stderr)
    assert found is not None and float(found[1]) < 1e-5


def test_doctor_compares_ops_and_generation_with_the_cpu(stub_folder):
    done = run_with_stub(stub_folder, *DOCTOR, "--device", "stub:1", "--areas", "ops,generation", "--seconds", "0")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert re.search(r"\| ops \| stub:1 float32 \| (\d+) of \1 \|", done.stdout)
    assert re.search(r"\| generation \| stub:1 float32 \| 4 of 4 \|", done.stdout)
    assert "## Operators without a kernel for stub:1" in done.stdout
    assert re.search(r"\| matmul, matmul_grad \| ops, ", done.stdout)


def test_doctor_names_operators_that_are_missing(stub_folder):
    words = ("--device", "stub:0", "--areas", "ops", "--seconds", "0")
    done = run_with_stub(stub_folder, *DOCTOR, *words, FLAGS_use_stride_kernel="1")
    assert done.returncode == 1
    assert re.search(r"\| rope: reference \| .* of kernel `contiguous` is not registered", done.stdout)
    assert re.search(r"\| adamw in 8 bits: reference \| .* \| pass \|", done.stdout)


@pytest.mark.layouts  # a minute beside other tests
def test_doctor_trains_every_method_as_on_the_cpu(stub_folder):
    done = run_with_stub(stub_folder, *DOCTOR, "--device", "stub:1", "--areas", "training", "--seconds", "0")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert re.search(r"\| training \| stub:1 float32 \| (\d+) of \1 \|", done.stdout)


@pytest.mark.parametrize("device", ["stub:2", "npu"])
def test_doctor_on_a_missing_device_names_the_devices(stub_folder, device):
    done = run_with_stub(stub_folder, *DOCTOR, "--device", device)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"device '{device}' is not available; this Paddle has: cpu, stub (stub:0 to stub:1)" in done.stderr


@pytest.mark.slow
def test_logits_and_gradients_of_every_family_match_transformers(stub_folder):
    cases = str(ROOT / "tests" / "models" / "test_decoder_golden.py")
    code = f"""
import paddle, pytest
assert paddle.get_device() == "stub:0"
raise SystemExit(pytest.main(["-q", "-p", "no:xdist", "-p", "no:cacheprovider", {cases!r}]))
"""
    done = run_with_stub(stub_folder, "-c", code)
    assert done.returncode == 0, done.stdout[-3000:]


READ_BY = {
    "NumPy": "numpy.ctypeslib.as_array((ctypes.c_float * 4).from_address(x.data_ptr())).sum()",
    "the C++ library": "bf16.as_bf16(x)",
}
READER = """
import ctypes, numpy, paddle
from paddlenlp_ext.ops.cpp import bf16, library
paddle.set_device("stub:0")
x = paddle.ones([4]) * 2
assert x.numpy().tolist() == [2.0] * 4
if {needs_library} and library.library() is None:
    raise SystemExit("no C++ library")
{read}
"""


@pytest.mark.parametrize("reader", READ_BY)
def test_memory_of_the_stub_device_ends_a_process_that_reads_it(stub_folder, reader):
    code = READER.format(read=READ_BY[reader], needs_library=reader != "NumPy")
    done = run_with_stub(stub_folder, "-c", code)
    if "no C++ library" in done.stderr:
        pytest.skip("no C++ library")
    assert done.returncode < 0
    assert "host code accessed the memory of a device" in done.stderr


PREDICTOR = (LLM / "predict" / "predictor.py", "--model_name_or_path")


def test_command_with_a_plug_in_that_does_not_start_ends_with_cause_and_remedy(stub_folder, run_folders):
    done = run_with_stub(stub_folder, *PREDICTOR, run_folders / "model", STUB_DEVICE_LACKS_DRIVER="1")
    assert done.returncode != 0
    cause, error = done.stderr.splitlines()
    assert "Initialize stub Failed" in cause
    assert f"loaded the plug-in {stub_folder}/libpaddle-stub.so" in error and "set CUSTOM_DEVICE_ROOT= to run" in error
    without = run_with_stub(stub_folder, *PREDICTOR, "missing", STUB_DEVICE_LACKS_DRIVER="1", CUSTOM_DEVICE_ROOT="")
    assert without.returncode == 2 and "plug-in" not in without.stderr


def test_command_with_a_plug_in_that_cannot_be_loaded_ends_with_cause_and_remedy(tmp_path, run_folders):
    (tmp_path / "libpaddle-broken.so").write_text("no library")
    done = run_with_stub(tmp_path, *PREDICTOR, run_folders / "model")
    assert done.returncode == 2
    (error,) = done.stderr.splitlines()
    assert f"error: Paddle cannot load the plug-in {tmp_path}/libpaddle-broken.so: " in error and "too short" in error


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"STUB_DEVICE_BYTES": "200000"}, "the device is out of memory, or that it cannot use the device; check"),
        (
            {"FLAGS_use_stride_kernel": "1"},
            "for the device stub; set the environment variable FLAGS_use_stride_kernel=0",
        ),
    ],
)
def test_command_on_a_broken_device_ends_with_cause_and_remedy(stub_folder, run_folders, variables, words):
    keys = {
        "model_name_or_path": run_folders / "model",
        "dataset_name_or_path": run_folders / "data",
        "data_cache_dir": run_folders / "cache",
        "output_dir": run_folders / "out",
        "chat_template": "none",
        "do_train": "true",
        "max_steps": "1",
        "vera": "true",
        "device": "stub",
    }
    options = [word for key, value in keys.items() for word in (f"--{key}", value)]
    done = run_with_stub(stub_folder, LLM / "run_finetune.py", *options, **variables)
    assert done.returncode == 2, done.stderr[-3000:]
    assert words in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
