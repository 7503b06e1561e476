"""LoRA on experts and routers; test_lora_golden.py compares it with Hugging Face PEFT."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.safetensors import SafetensorsFile, write_safetensors
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.peft.merge.merge_adapter import merge_adapter
from paddlenlp_ext.peft.methods.dora import DoRAConfig
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.vera import VeRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantize_linears
from tests.common.adapters import logits_of, same_bits, tiny_model, train
from tests.golden.cases.model_cases import CASES

GATE_UP, DOWN, ROUTER = "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"
EVERYTHING = (GATE_UP, DOWN, ROUTER)
LAYER = "model.layers.0.mlp"


def state(model: PeftModel) -> dict[str, np.ndarray]:
    """Return the adapter's tensors as arrays."""
    return {name: tensor.numpy() for name, tensor in model.adapter_state().items()}


def adapted(**options: Any) -> PeftModel:
    """Return a model with experts and an adapter that was trained for two steps."""
    model = get_peft_model(tiny_model("experts"), LoRAConfig(**{"rank": 3, "target_parameters": EVERYTHING, **options}))
    train(model, steps=2)
    return model


def save(model: PeftModel, folder: Path, dtype: str = "float32") -> Path:
    """Save the base in `dtype` and the adapter; return the adapter's folder."""
    base = tiny_model("experts")
    base.to(dtype=dtype)
    base.save_pretrained(folder / "base")
    model.config.__dict__["name_or_path"] = str(folder / "base")
    model.save_pretrained(folder / "adapter")
    return folder / "adapter"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lora_of_experts_comes_back_from_files_and_merges(dtype: str, tmp_path: Path):
    model = adapted()
    folder = save(model, tmp_path, dtype)
    loaded = PeftModel.from_pretrained(tiny_model("experts"), folder)
    np.testing.assert_array_equal(logits_of(loaded), logits_of(model))
    # Rounding to bfloat16 changes the experts that tokens choose, and is refused.
    merge_adapter(folder, tmp_path / "merged", AutoModelForCausalLM.from_pretrained, dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    expected = adapted().merge_and_unload().state_dict()
    base = tiny_model("experts").state_dict()
    for name in (f"{GATE_UP}.weight", f"{DOWN}.weight", ROUTER):
        name = f"model.layers.0.{name}"
        tolerance = 1e-6 if dtype == "float32" else 5e-3
        np.testing.assert_allclose(merged[name].numpy(), expected[name].numpy(), rtol=tolerance, atol=tolerance)
        assert not np.allclose(merged[name].numpy(), base[name].numpy(), atol=tolerance)
    names = SafetensorsFile(next((tmp_path / "merged").glob("*.safetensors"))).names()
    assert f"{LAYER}.experts.4.up_proj.weight" in names and not any("gate_up_proj" in name for name in names)


@pytest.mark.parametrize("parameters", [(f"layers.1.{DOWN}",), (GATE_UP,), (f"layers.0.{GATE_UP}", DOWN, ROUTER)])
def test_lora_of_some_weights_writes_entries_that_select_the_same(parameters: tuple[str, ...], tmp_path: Path):
    model = adapted(target_parameters=parameters, target_modules=[])
    folder = save(model, tmp_path)
    fields = json.loads((folder / "adapter_config.json").read_text())
    assert fields["target_modules"] == [] and all(".lora_" in name for name in model.adapter_state())
    loaded = PeftModel.from_pretrained(tiny_model("experts"), folder)
    assert same_bits(state(loaded), state(model))
    resumed = get_peft_model(tiny_model("experts"), LoRAConfig(path=str(folder)))
    assert same_bits(state(resumed), state(model))


def test_lora_of_experts_resumes_with_other_entries_for_the_same_weights(tmp_path: Path):
    model = adapted()
    folder = save(model, tmp_path)
    new = get_peft_model(tiny_model("experts"), LoRAConfig(rank=3, target_parameters=("gate_up_proj", DOWN, ROUTER)))
    new.load_weights(folder)
    assert same_bits(state(new), state(model))


def test_interleaved_experts_to_save_have_the_shapes_of_transformers(tmp_path: Path):
    def gpt_oss() -> CausalLM:
        return AutoModelForCausalLM.from_config(CASES["gpt_oss"], seed=0)

    model = get_peft_model(gpt_oss(), LoRAConfig(rank=3, modules_to_save=["experts"]))
    train(model, steps=1)
    model.save_pretrained(tmp_path)
    file, own = SafetensorsFile(tmp_path / "adapter_model.safetensors"), state(model)
    stored = file.read(f"base_model.model.{LAYER}.experts.gate_up_proj")
    gate = own[f"{LAYER}.experts.gate_up_proj.weight"][:, : stored.shape[2] // 2]
    np.testing.assert_array_equal(stored[:, :, ::2], gate.transpose(0, 2, 1))
    bias = file.read(f"base_model.model.{LAYER}.experts.gate_up_proj_bias")
    np.testing.assert_array_equal(bias[:, ::2], own[f"{LAYER}.experts.gate_up_proj_bias"][:, : bias.shape[1] // 2])
    assert same_bits(state(PeftModel.from_pretrained(gpt_oss(), tmp_path)), own)


def test_experts_to_save_have_the_keys_of_transformers(tmp_path: Path):
    model = get_peft_model(tiny_model("experts"), LoRAConfig(rank=3, modules_to_save=["experts"]))
    train(model, steps=1)
    folder = save(model, tmp_path)
    names = SafetensorsFile(folder / "adapter_model.safetensors").names()
    assert f"base_model.model.{LAYER}.experts.gate_up_proj" in names
    assert same_bits(state(PeftModel.from_pretrained(tiny_model("experts"), folder)), state(model))


def test_lora_of_experts_gives_idle_experts_zero_gradients():
    model = adapted(target_modules=[])
    model(paddle.to_tensor([[3]])).sum().backward()
    chosen = 0
    for name, tensor in model.adapter_state().items():
        gradient = tensor.grad.numpy()
        assert np.isfinite(gradient).all(), name
        if ".experts." in name and ".lora_A" in name:
            chosen += (np.abs(gradient).max(axis=(1, 2)) > 0).sum()
    assert chosen == 2 * 2 * 2  # two weights in two layers; a token chooses two experts
    assert all(parameter.grad is None for parameter in model.base_model.parameters() if parameter.stop_gradient)


def test_lora_of_experts_starts_without_effect_and_can_be_disabled():
    base = logits_of(tiny_model("experts"))
    new = get_peft_model(tiny_model("experts"), LoRAConfig(target_parameters=EVERYTHING, init_a="gaussian"))
    new.eval()
    np.testing.assert_array_equal(logits_of(new), base)
    deviation = float(new.adapter_state()[f"{LAYER}.experts.down_proj.lora_A.weight"].std())
    assert deviation == pytest.approx(1 / 8, rel=0.1)
    model = adapted()
    assert np.abs(logits_of(model) - base).max() > 0.01
    with model.disable_adapter():
        np.testing.assert_array_equal(logits_of(model), base)


def test_lora_without_target_parameters_leaves_experts_frozen_and_says_so(caplog: pytest.LogCaptureFixture):
    model = get_peft_model(tiny_model("experts"), LoRAConfig())
    assert not any(".experts." in name or ".gate." in name for name in model.adapter_state())
    assert any(".shared_experts." in name for name in model.adapter_state())
    assert "experts and routers are not adapted; name them in target_parameters" in caplog.text


@pytest.mark.parametrize("algo", ["nf4", "weight_only_int8", {"experts.down_proj": "weight_only_int4"}], ids=str)
def test_lora_of_quantized_experts_comes_back_from_files_and_merges(algo: Any, tmp_path: Path):
    """Merge into the dequantized weights, in memory and in files, and into the original ones."""
    base, options = tiny_model("experts"), QuantizationConfig(algo=algo)
    base.save_pretrained(tmp_path / "base")
    quantize_linears(base, options)
    model = get_peft_model(base, LoRAConfig(rank=3, target_parameters=EVERYTHING))
    started = logits_of(model)
    train(model, steps=2)
    model.config.__dict__["name_or_path"] = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    expected = logits_of(model)
    assert np.abs(expected - started).max() > 1e-3
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=options), tmp_path / "adapter"
    )
    np.testing.assert_array_equal(logits_of(loaded), expected)
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged", AutoModelForCausalLM.from_pretrained)
    assert report.difference < 2e-5
    np.testing.assert_allclose(logits_of(model.merge_and_unload()), expected, rtol=0, atol=1e-5)
    merge_adapter(
        tmp_path / "adapter", tmp_path / "original", AutoModelForCausalLM.from_pretrained, merge_base="original"
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "original").state_dict()
    plain, name = tiny_model("experts").state_dict(), f"{LAYER}.experts.down_proj"
    adapter = dict(loaded.named_sublayers())[f"base_model.{name}"]
    update = adapter.merged_weight() - adapter.base.weight_value()
    np.testing.assert_allclose((plain[f"{name}.weight"] + update).numpy(), merged[f"{name}.weight"].numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: LoRAConfig(target_parameters=[DOWN], dropout=0.1), "lora_dropout is not available for experts"),
        (lambda: LoRAConfig(target_parameters=[DOWN], lora_bias=True), "lora_bias is not available for experts"),
        (lambda: DoRAConfig(target_parameters=[DOWN]), "target_parameters=.* variants of LoRA do not have this option"),
        (lambda: VeRAConfig(target_parameters=[DOWN]), r"target_parameters=.* is not available"),
    ],
)
def test_config_with_target_parameters_where_they_do_not_apply_raises(config: Any, message: str):
    with pytest.raises(ValueError, match=message):
        config()


@pytest.mark.parametrize(
    ("family", "entry", "message"),
    [
        (
            "experts",
            "experts.down_porj",
            r"matches no .*; did you mean '.*down_proj'\? Known: mlp\.gate\.weight",
        ),
        ("experts", "q_proj", r"To adapt linear layers, use target_modules, or list their weights"),
        ("llama", "experts.down_proj", "This model has no experts"),
    ],
)
def test_target_parameters_that_match_nothing_raise(family: str, entry: str, message: str):
    with pytest.raises(ValueError, match=message):
        get_peft_model(tiny_model(family), LoRAConfig(target_parameters=[entry]))


def rewritten(folder: Path, rename: tuple[str, str] | None = None, **fields: Any) -> Path:
    """Change names of tensors and fields of a stored adapter."""
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **fields}))
    file = SafetensorsFile(folder / "adapter_model.safetensors")
    tensors = {re.sub(*rename, name) if rename else name: file.read(name) for name in file.names()}
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    return folder


@pytest.mark.parametrize(
    ("rename", "fields", "message"),
    [
        (None, {"target_parameters": [DOWN]}, "does not name the adapted weight"),
        (None, {"target_parameters": None}, "does not name the adapted weight"),
        (None, {"r": 4}, "is not a multiple of the rank 4"),
    ],
)
def test_files_of_experts_that_do_not_fit_raise(rename: Any, fields: dict[str, Any], message: str, tmp_path: Path):
    folder = rewritten(save(adapted(), tmp_path), rename, **fields)
    with pytest.raises(ValueError, match=message) as raised:
        PeftModel.from_pretrained(tiny_model("experts"), folder)
    assert "adapter_model.safetensors" in str(raised.value)


def test_combining_adapters_of_experts_raises():
    model = adapted()
    with pytest.raises(ValueError, match=r"not factors of a linear layer .*, and cannot be combined"):
        model.add_weighted_adapter(["default"], [1.0], "sum")


def test_print_trainable_parameters_counts_by_kind(capsys: pytest.CaptureFixture[str]):
    adapted(target_modules=["q_proj", "shared_experts.up_proj"]).print_trainable_parameters()
    report = capsys.readouterr().out
    experts = 2 * 5 * 3 * (36 + 2 * 36 + 36 + 36)
    assert f"experts {experts:,}, routers {2 * 3 * (36 + 5):,}, shared experts {2 * 3 * (36 + 36):,}" in report
