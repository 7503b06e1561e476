"""LoRA of single experts, as transformers 4 has them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddlenlp_ext.checkpoint.safetensors import SafetensorsFile, write_safetensors
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.merge.merge_adapter import merge_adapter
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.common.adapters import logits_of, tiny_model
from tests.common.arrays import normal
from tests.golden import DATA
from tests.golden.cases.peft_cases import SINGLE_EXPERTS, SINGLE_EXPERTS_BASE
from tests.peft.methods import golden_checks as shared

SIZE = 36  # hidden and inner size of the tiny model, which has 2 layers with 5 experts
EXPERTS = "model.layers.{}.mlp.experts.{}.{}"


def write(folder: Path, ranks: dict[str, int], **fields: Any) -> dict[str, np.ndarray]:
    """Write an adapter of linear layers with these ranks; return its tensors."""
    tensors = {}
    for number, (layer, rank) in enumerate(ranks.items()):
        outputs = 5 if layer.endswith("mlp.gate") else SIZE
        tensors[f"{layer}.lora_A.weight"] = normal(2 * number, rank, SIZE)
        tensors[f"{layer}.lora_B.weight"] = normal(2 * number + 1, outputs, rank)
    write_safetensors(
        folder / "adapter_model.safetensors", {f"base_model.model.{name}": value for name, value in tensors.items()}
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["gate_proj"], **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return tensors


def all_experts(*parts: str, rank: int = 2) -> dict[str, int]:
    return {EXPERTS.format(i, e, part): rank for i in range(2) for e in range(5) for part in parts}


def check_merged(model: PeftModel, tensors: dict[str, np.ndarray], scaling: dict[str, float]) -> None:
    """Compare each merged weight with W + s B A of the factors of its expert and part, the file's s by layer."""
    base, merged = tiny_model("experts").state_dict(), model.merge_and_unload().state_dict()
    expected = {name: value.numpy().copy() for name, value in base.items()}
    for name in tensors:
        layer = name.removesuffix(".lora_A.weight")
        if layer == name:
            continue
        update = scaling[layer] * tensors[f"{layer}.lora_B.weight"] @ tensors[name]
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)", layer)
        if not found:
            expected[f"{layer}.weight"] += update
        elif found[3] == "down_proj":
            expected[f"{found[1]}.down_proj.weight"][int(found[2])] += update
        else:
            start = SIZE if found[3] == "up_proj" else 0
            expected[f"{found[1]}.gate_up_proj.weight"][int(found[2]), start : start + SIZE] += update
    for name, value in expected.items():
        np.testing.assert_allclose(merged[name].numpy(), value, rtol=0, atol=2e-5, err_msg=name)


def test_single_experts_give_the_logits_of_peft(tmp_path: Path):
    folder = DATA / "adapters" / SINGLE_EXPERTS
    model = PeftModel.from_pretrained(shared.base_model(SINGLE_EXPERTS_BASE), folder)
    logits = model(shared.ids_of(SINGLE_EXPERTS_BASE))
    shared.close(logits, shared.golden_of(folder)["logits"])
    model.save_pretrained(tmp_path)
    names = SafetensorsFile(tmp_path / "adapter_model.safetensors").names()
    prefix = "base_model.model.model.layers.0.mlp"
    assert f"{prefix}.experts.base_layer.lora_B.weight" in names and f"{prefix}.gate.lora_A.weight" in names
    assert not any(".experts.0." in name or "block_sparse_moe" in name for name in names)
    fields = json.loads((tmp_path / "adapter_config.json").read_text())
    assert fields["target_modules"] == ["k_proj"]
    assert fields["rank_pattern"] == {"mlp.experts.gate_up_proj": 4}
    assert fields["alpha_pattern"] == {"mlp.experts.gate_up_proj": 6}
    again = PeftModel.from_pretrained(shared.base_model(SINGLE_EXPERTS_BASE), tmp_path)
    np.testing.assert_array_equal(again(shared.ids_of(SINGLE_EXPERTS_BASE)).numpy(), logits.numpy())


@pytest.mark.parametrize("rslora", [False, True])
def test_single_experts_of_all_parts_merge_to_the_formula(rslora: bool, tmp_path: Path):
    ranks = {**all_experts("gate_proj", "up_proj", "down_proj"), "model.layers.1.mlp.gate": 2}
    ranks |= {"model.layers.0.mlp.shared_experts.up_proj": 2, "model.layers.1.self_attn.q_proj": 2}
    tensors = write(tmp_path, ranks, use_rslora=rslora, target_modules="all-linear")
    model = PeftModel.from_pretrained(tiny_model("experts"), tmp_path)
    assert model.adapter_state()["model.layers.0.mlp.experts.gate_up_proj.lora_A.weight"].shape == [5, 4, SIZE]
    check_merged(model, tensors, dict.fromkeys(ranks, 3 / (2**0.5 if rslora else 2)))


def test_single_experts_of_uneven_ranks_merge_to_the_formula(tmp_path: Path):
    """Adapt up of two experts only, with ranks and scales of their own, and all of down in one layer."""
    few = {EXPERTS.format(0, 1, "up_proj"): 2, EXPERTS.format(0, 4, "up_proj"): 3, EXPERTS.format(1, 0, "gate_proj"): 2}
    ranks = {**few, **{EXPERTS.format(1, e, "down_proj"): 1 for e in range(5)}}
    patterns = {"rank_pattern": {r"experts\.4\.up_proj": 3, "down_proj": 1}, "alpha_pattern": {"down_proj": 5}}
    tensors = write(tmp_path, ranks, **patterns)
    scaling = dict.fromkeys(ranks, 1.5)
    scaling |= {layer: 1.0 for layer in ranks if ".4.up_proj" in layer}
    scaling |= {layer: 5.0 for layer in ranks if layer.endswith("down_proj")}
    model = PeftModel.from_pretrained(tiny_model("experts"), tmp_path)
    logits = logits_of(model)
    model.save_pretrained(tmp_path / "stacked")
    again = PeftModel.from_pretrained(tiny_model("experts"), tmp_path / "stacked")
    np.testing.assert_array_equal(logits_of(again), logits)
    check_merged(model, tensors, scaling)


def test_single_experts_can_be_merged_into_files_and_trained_further(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    write(tmp_path, all_experts("gate_proj", "up_proj"), lora_dropout=0.1)
    tiny_model("experts").save_pretrained(tmp_path / "base")
    report = merge_adapter(tmp_path, tmp_path / "merged", AutoModelForCausalLM.from_pretrained, tmp_path / "base")
    assert report.num_merged == 2 and report.difference < 1e-4
    assert "lora_dropout=0.1 is not available for experts" in caplog.text
    model = get_peft_model(tiny_model("experts"), LoRAConfig(path=str(tmp_path)))
    assert not any(parameter.stop_gradient for parameter in model.adapter_state().values())


@pytest.mark.parametrize(
    ("ranks", "fields", "message"),
    [
        ({EXPERTS.format(0, 7, "gate_proj"): 2}, {}, "the base has only 5 experts in this layer"),
        ({EXPERTS.format(0, 0, "gate_proj"): 3}, {}, "adapter_config.json gives rank 2; correct r or rank_pattern"),
        (
            {EXPERTS.format(0, 0, "gate_proj"): 2},
            {"use_dora": True},
            "DoRAConfig with one adapter per expert is not available",
        ),
    ],
)
def test_single_experts_that_do_not_fit_raise(
    ranks: dict[str, int], fields: dict[str, Any], message: str, tmp_path: Path
):
    write(tmp_path, ranks, **fields)
    with pytest.raises(ValueError, match=message) as raised:
        PeftModel.from_pretrained(tiny_model("experts"), tmp_path)
    assert "adapter_model.safetensors" in str(raised.value)


def test_single_expert_without_one_factor_raises(tmp_path: Path):
    tensors = write(tmp_path, all_experts("gate_proj"))
    stored = {f"base_model.model.{name}": value for name, value in list(tensors.items())[1:]}
    write_safetensors(tmp_path / "adapter_model.safetensors", stored)
    with pytest.raises(ValueError, match=r"experts\.0\.gate_proj\.lora_A\.weight is missing"):
        PeftModel.from_pretrained(tiny_model("experts"), tmp_path)
