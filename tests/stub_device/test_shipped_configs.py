"""Shipped configurations on the stub device: training, resuming, merging and predicting, compared with the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.common.scripts import LLM, ROOT
from tests.stub_device.plugin import run_with_stub

WORKER = Path(__file__).with_name("shipped_worker.py")
CONFIGS = LLM / "config"
# GRPO samples its rows; tests/cli/test_run_grpo.py has its runs.
NAMES = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.json") if "grpo" not in path.name)
PARTS = 8
TOLERANCE, TOLERANCE_OF_LORA_GA = 1e-5, 1e-3
"""Of the largest value. LoRA-GA starts from singular vectors of small singular values, which rounding errors rotate."""
SOME = ("llama/qlora", "qwen/pissa", "lfm2_moe/lora", "nemotron_h/sft", "smollm2/dpo_lora", "llama/reward", "qwen/gptq")


def numbers(plugin: Path, folder: Path, device: str, names: list[str]) -> dict[str, Any]:
    """Run the worker on a device, and return its results."""
    folder.mkdir()
    done = run_with_stub(plugin, WORKER, device, folder, *names, timeout=1800, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_as_on_the_cpu(plugin: Path, folder: Path, names: list[str]) -> None:
    on_cpu, on_device = (numbers(plugin, folder / device[:4], device, names) for device in ("cpu", "stub:1"))
    assert on_device.keys() == set(names)
    for name, found in on_device.items():
        expected = on_cpu[name]
        assert (expected["place"], found["place"]) == ("cpu", "stub:1"), name
        assert found["tokens"] == expected["tokens"], name
        assert found.get("resumed") == found.get("losses"), name
        tolerance = TOLERANCE_OF_LORA_GA if "lora_ga" in name else TOLERANCE
        for key in {"losses", "logits"} & expected.keys():
            bound = tolerance * max(1.0, float(np.abs(expected[key]).max()))
            np.testing.assert_allclose(found[key], expected[key], rtol=0, atol=bound, err_msg=f"{name}: {key}")


@pytest.mark.layouts
def test_some_shipped_configurations_compute_the_same_as_on_the_cpu(stub_folder, tmp_path):
    assert_as_on_the_cpu(stub_folder, tmp_path, [f"{name}_argument.json" for name in SOME])


@pytest.mark.devices
@pytest.mark.parametrize("part", range(PARTS))
def test_every_shipped_configuration_computes_the_same_as_on_the_cpu(stub_folder, tmp_path, part):
    assert_as_on_the_cpu(stub_folder, tmp_path, NAMES[part::PARTS])
