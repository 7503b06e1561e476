"""Rules of device and precision: unavailable devices and formats are refused or noted."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddlenlp_ext import devices
from paddlenlp_ext.config import processor
from tests.config.config_cases import SMALLEST, load, problems, write


@pytest.mark.parametrize(("visible", "found"), [(None, True), ("0", True), ("1,0", True), ("", False), ("-1", False)])
def test_has_gpu_respects_cuda_visible_devices(monkeypatch, visible, found):
    monkeypatch.setattr(devices, "_paddle_built_for_gpu", lambda: True)
    monkeypatch.setattr(devices, "_GPU_NODES", ("/",))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.has_gpu() is found


def test_device_gpu_is_refused_without_one_and_used_with_one(tmp_path, monkeypatch):
    path = write(tmp_path, SMALLEST | {"device": "gpu"})
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    (found,) = problems(path)
    assert found.line == 6 and "--device cpu" in found.message
    assert load(path, "--device", "cpu").precision.device == "cpu"
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    assert load(path).precision.device == "gpu"
    config = load(path, "--device", "null", "--bf16", "--use_flash_attention")
    assert config.precision.device == "gpu" and config.precision.compute_dtype == "bfloat16" and not config.notes
    config = load(path, "--bf16", "--fp16_opt_level", "O0")
    assert config.precision.compute_dtype == "float32" and "fp16_opt_level O0" in config.notes[0]


def test_fp16_on_gpu_scales_the_loss_and_needs_fp32_copies_of_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    path = write(tmp_path, SMALLEST | {"device": "gpu", "fp16": True, "scale_loss": 1024})
    config = load(path)
    assert (config.precision.compute_dtype, config.precision.scale_loss) == ("float16", 1024.0)
    assert config.precision.scales_loss and not config.notes
    assert not load(path, "--fp16_opt_level", "O2").notes
    (found,) = problems(path, "--fp16_opt_level", "O2", "--master_weight", "false")
    assert found.key == "master_weight" and "bf16: true in place of fp16" in found.message
    config = load(path, "--fp16", "false", "--bf16")
    assert not config.precision.scales_loss and "scale_loss has no effect" in config.notes[0]
    (found,) = problems(path, "--scale_loss", "0.5")
    assert found.key == "scale_loss"


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_bf16_on_cpu_is_accepted(tmp_path, level):
    config = load(write(tmp_path, SMALLEST | {"device": "cpu", "bf16": True, "fp16_opt_level": level}))
    assert config.precision.compute_dtype == "bfloat16" and not config.notes


@pytest.mark.parametrize(
    ("flags", "dtype", "note"),
    [
        ({"avx2", "avx512_bf16"}, "bfloat16", "fp16 runs as bf16 on this processor"),
        ({"amx_bf16"}, "bfloat16", "fp16 runs as bf16 on this processor"),
        ({"avx512f"}, "float32", "fp16 has no effect on this processor"),
        (set(), "float32", "fp16 has no effect on this processor"),
    ],
)
def test_fp16_on_cpu_runs_as_bf16_where_the_processor_has_it(tmp_path, monkeypatch, flags, dtype, note):
    monkeypatch.setattr(processor, "_processor_flags", lambda: frozenset(flags))
    config = load(write(tmp_path, SMALLEST | {"device": "cpu", "fp16": True}))
    assert config.precision.compute_dtype == dtype
    assert len(config.notes) == 1 and note in config.notes[0] and "bf16: true" in config.notes[0]


def test_processor_flags_are_those_of_proc_cpuinfo():
    path = Path("/proc/cpuinfo")
    listed = path.read_text() if path.exists() else ""
    assert processor.has_bf16_arithmetic() == any(f" {flag} " in listed for flag in ("avx512_bf16", "amx_bf16"))


@pytest.mark.parametrize(
    ("keys", "note"),
    [
        ({"bf16": True}, "unless fp16_opt_level is O2"),
        ({"bf16": True, "fp16_opt_level": "O2", "lora": True}, "the weights of an adapter are float32"),
        ({"bf16": True, "fp16_opt_level": "O2"}, None),
    ],
)
def test_masters_without_half_weights_are_noted(tmp_path, keys, note):
    masters = {"device": "cpu", "multi_precision": False, "amp_master_grad": True}
    config = load(write(tmp_path, SMALLEST | masters | keys))
    assert config.precision.master_weight is False and config.precision.float32_gradients
    for key in ("master_weight", "amp_master_grad"):
        found = [each for each in config.notes if key in each]
        assert len(found) == (note is not None) and all(note in each for each in found)
