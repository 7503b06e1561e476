"""Devices: their names, what each type can do, and the errors for devices that this Paddle does not have."""

from __future__ import annotations

import re
from pathlib import Path

import paddle
import pytest

import paddlenlp_ext
from paddlenlp_ext import devices
from paddlenlp_ext.devices import AbsentGpu, Capabilities, capabilities, choose_device, device_name, device_type
from tests.config.config_cases import SMALLEST, load, problems, write

PACKAGE = Path(paddlenlp_ext.__file__).parent
QUESTIONS = re.compile(
    r"is_gpu_place|is_cuda_pinned_place|is_xpu_place|is_compiled_with|CUDAPlace|device_count\(\)|[!=]= \"gpu\""
    r"|startswith\(\"gpu|(?<!version)\.cuda\(\)"
)


@pytest.fixture
def npus(monkeypatch):
    """Let Paddle list two devices of a plug-in, npu:0 and npu:1, which compute in bfloat16."""
    monkeypatch.setattr(paddle.device, "get_available_custom_device", lambda: ["npu:0", "npu:1"])
    monkeypatch.setattr(paddle.amp, "is_bfloat16_supported", lambda device: device == "npu")
    monkeypatch.setattr(paddle.amp, "is_float16_supported", lambda device: False)
    devices._reported_capabilities.cache_clear()
    yield
    devices._reported_capabilities.cache_clear()


def test_devices_is_the_only_module_that_asks_for_gpus():
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if QUESTIONS.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"devices.py"}


def test_capabilities_of_known_and_reported_types(npus):
    assert capabilities("cpu") == capabilities(paddle.CPUPlace()) == Capabilities(cpp=True)
    assert capabilities("gpu:1") == capabilities(AbsentGpu()) == devices._KNOWN["gpu"]
    assert capabilities("npu:1") == Capabilities(bf16=True, memory_figures=True)
    assert capabilities("mlu") == Capabilities()


@pytest.mark.parametrize("has_gpu", [False, True])
def test_auto_has_the_capabilities_and_the_place_of_the_default_device(monkeypatch, has_gpu):
    monkeypatch.setattr(devices, "has_gpu", lambda: has_gpu)
    default = devices.default_device()
    assert capabilities("auto") == capabilities(default) == devices._KNOWN[default]
    monkeypatch.setattr(paddle.device, "device_to_place", lambda name: f"place of {name}")
    assert devices.place_of("auto") == f"place of {default}"


def test_device_names_of_places():
    assert [device_type(name) for name in ("cpu", "gpu:3", "npu")] == ["cpu", "gpu", "npu"]
    assert device_name(paddle.ones([1]).place) == "cpu"


@pytest.mark.parametrize("name", ["npu", "npu:0", "npu:1", "cpu", "auto"])
def test_available_devices_are_accepted(npus, name):
    assert devices.unavailable_reason(name) is None


@pytest.mark.parametrize("name", ["npu:2", "npu:", "npu:x", "npu:-1", "cpu:0", "mlu", "xpu", "gpu:0", ""])
def test_other_devices_are_refused_with_the_devices_of_this_paddle(npus, monkeypatch, name):
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    with pytest.raises(ValueError, match=re.escape("this Paddle has: cpu, npu (npu:0 to npu:1)")):
        choose_device(name)


def test_types_without_a_device_are_not_listed(npus, monkeypatch):
    monkeypatch.setattr(paddle.device, "get_available_custom_device", list)
    assert "this Paddle has: cpu;" in str(devices.unavailable_reason("npu"))


def test_refused_devices_of_other_vendors_name_the_plug_in(npus):
    assert "such as paddle-custom-mlu" in str(devices.unavailable_reason("mlu"))
    for name in ("npu:2", "", "CPU", "auto:1"):
        assert "plug-in" not in str(devices.unavailable_reason(name))


def test_configuration_accepts_devices_of_plug_ins(npus, tmp_path):
    path = write(tmp_path, SMALLEST | {"device": "npu:1", "bf16": True})
    config = load(path)
    assert (config.precision.device, config.precision.compute_dtype, config.notes) == ("npu:1", "bfloat16", [])
    (found,) = problems(path, "--device", "mlu", "--bf16", "false")
    assert found.key == "device" and "this Paddle has: cpu, npu" in found.message


def test_configuration_refuses_half_precision_that_the_device_lacks(npus, tmp_path):
    (found,) = problems(write(tmp_path, SMALLEST | {"device": "npu", "fp16": True}))
    assert found.key == "fp16" and found.message.endswith("set fp16: false")


def test_configuration_that_is_refused_for_half_precision_names_all_keys_to_change(npus, tmp_path):
    path = write(tmp_path, SMALLEST | {"device": "npu", "fp16": True, "fp16_opt_level": "O2"})
    (found,) = problems(path)
    assert found.message.endswith("set fp16: false and fp16_opt_level: O1")
    assert load(path, "--fp16", "false", "--fp16_opt_level", "O1").precision.compute_dtype == "float32"


def test_configuration_refuses_an_index_in_several_processes(npus, tmp_path, monkeypatch):
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    (found,) = problems(write(tmp_path, SMALLEST | {"device": "npu:1"}))
    assert "write device: npu" in found.message
    assert load(write(tmp_path, SMALLEST | {"device": "npu"})).notes == []


@pytest.mark.parametrize(("device", "words"), [("cpu", "on the CPU"), ("npu", "the device is npu")])
def test_offloaded_optimizer_state_has_no_effect_without_page_locked_memory(npus, tmp_path, device, words):
    config = load(write(tmp_path, SMALLEST | {"device": device, "offload_optim": True}))
    assert not config.optim.offload_optim and words in config.notes[0]


def test_flash_attention_has_no_effect_without_kernels(npus, tmp_path):
    (note,) = load(write(tmp_path, SMALLEST | {"device": "npu", "use_flash_attention": True})).notes
    assert "no effect on the device npu" in note


def test_programs_of_paddle_inference_run_on_the_device():
    calls = []

    class Recorder:
        def __getattr__(self, name):
            return lambda *values: calls.append((name, *values))

    for device in ("gpu:1", "xpu", "npu:2"):
        devices.place_program(Recorder(), device)
    assert calls == [
        ("enable_use_gpu", 100, 1),
        ("enable_xpu",),
        ("set_xpu_device_id", 0),
        ("enable_custom_device", "npu", 2),
    ]
