"""Layers that PEFT takes for experts; `make check-peers` loads the targets offered instead in PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paddlenlp_ext.models.registry import FAMILIES
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.methods.dora import DoRAConfig
from paddlenlp_ext.peft.methods.lokr import LoKrConfig
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.sora import SoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.common.adapters import logits_of, tiny_model, train
from tests.golden import DATA

PARTS = ("gate_proj", "up_proj", "down_proj")
OFFERED = tuple(f"mlp.shared_experts.{part}.weight" for part in PARTS)
WARNING = "drops the adapters of"


def test_translated_models_are_those_of_peft():
    renamed = json.loads((DATA / "peft_types.json").read_text())["models with renamed experts"]
    translated = {name for name in FAMILIES.names() if FAMILIES.get(name).is_translated_by_peft}
    assert {*FAMILIES.names()} & {*renamed} == translated


@pytest.mark.parametrize(
    "config",
    [LoRAConfig(rank=2), DoRAConfig(rank=2), SoRAConfig(rank=2), LoRAConfig(rank=2, target_modules=["down_proj"])],
)
def test_finished_adapter_with_layers_that_peft_drops_is_saved_with_a_warning(
    config: PeftConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    model = get_peft_model(tiny_model("experts"), config)
    train(model)
    model.save_pretrained(tmp_path / "checkpoint")
    assert WARNING not in caplog.text
    model.save_finished(tmp_path / "finished")
    assert f"{WARNING} {2 if config.target_modules else 6} other layers" in caplog.text
    assert "target_parameters: mlp.shared_experts." in caplog.text
    assert ("or train with lora_target_modules: " in caplog.text) == (config.target_modules is None)


@pytest.mark.parametrize("targets", [["up_proj"], ["q_proj", "gate_proj", "down_proj"]])
def test_finished_adapter_of_one_of_gate_and_up_warns_of_the_error_of_peft(
    targets: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    get_peft_model(tiny_model("experts"), LoRAConfig(rank=2, target_modules=targets)).save_finished(tmp_path)
    assert WARNING not in caplog.text and "raises an error for an adapter of only one of" in caplog.text
    assert ("lora_target_modules: q_proj;" in caplog.text) == ("q_proj" in targets)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("experts", LoRAConfig(rank=2, target_modules=["q_proj", "o_proj"])),
        ("experts", LoRAConfig(rank=2, target_modules=["o_proj"], target_parameters=OFFERED)),
        ("experts", LoRAConfig(rank=2, target_parameters=OFFERED)),
        ("experts", LoKrConfig(rank=2)),
        ("llama", LoRAConfig(rank=2)),
    ],
)
def test_finished_adapter_that_peft_reads_is_saved_without_a_warning(
    family: str, config: PeftConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    get_peft_model(tiny_model(family), config).save_finished(tmp_path)
    assert WARNING not in caplog.text


def test_lora_of_linear_layers_by_target_parameters_equals_the_one_by_target_modules(tmp_path: Path):
    by_parameters = LoRAConfig(rank=3, target_modules=["o_proj"], target_parameters=OFFERED)
    by_modules = LoRAConfig(rank=3, target_modules=["o_proj", *(f"shared_experts.{part}" for part in PARTS)])
    models = [get_peft_model(tiny_model("experts"), config) for config in (by_parameters, by_modules)]
    for model in models:
        train(model, steps=2)
    np.testing.assert_array_equal(*map(logits_of, models))
    models[0].save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (fields["target_modules"], fields["target_parameters"]) == (["o_proj"], sorted(OFFERED))
    loaded = PeftModel.from_pretrained(tiny_model("experts"), tmp_path)
    np.testing.assert_array_equal(logits_of(loaded), logits_of(models[0]))
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/adapter_config.json").read_text() == (tmp_path / "adapter_config.json").read_text()
