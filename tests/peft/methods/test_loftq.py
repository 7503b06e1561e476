"""LoftQ and PiSSA over quantized weights: initial factors compared with the papers' formulas in NumPy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file

from paddlenlp_ext.ops.dequantize import dequantize
from paddlenlp_ext.peft.formats.read_adapter import read_adapter
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.lora_conversion import save_as_lora
from paddlenlp_ext.peft.methods.loftq import LoftQConfig
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.pissa import PiSSAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantize_linears
from paddlenlp_ext.quantization.quantize_weight import quantize
from tests.common.adapters import logits_of, tiny_model, train
from tests.golden import DATA
from tests.golden.cases.quant_cases import LOFTQ_RANK, LOFTQ_STEPS, loftq_weight

NF4, INT8 = QuantizationConfig(algo="nf4"), QuantizationConfig(algo="weight_only_int8")


def quantized(config: Any, options: QuantizationConfig = NF4) -> Any:
    model = tiny_model()
    quantize_linears(model, options, config.before_quantizing)
    model.eval()
    return model


def adapted(config: Any, options: QuantizationConfig = NF4) -> PeftModel:
    model = get_peft_model(quantized(config, options), config)
    model.eval()
    return model


def rounded(weight: np.ndarray, options: QuantizationConfig) -> np.ndarray:
    return dequantize(quantize(weight.astype(np.float32), options)).numpy()


def leading(matrix: np.ndarray, rank: int) -> np.ndarray:
    u, s, v_t = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ v_t[:rank]


@pytest.mark.parametrize(
    "options", [NF4, INT8, QuantizationConfig(algo="fp4", double_quant=True)], ids=lambda o: o.algo
)
@pytest.mark.parametrize("iters", [1, 4])
def test_loftq_alternates_quantization_and_error_svd(iters: int, options: QuantizationConfig):
    model, originals = adapted(LoftQConfig(rank=4, iters=iters, svd="exact"), options), tiny_model().state_dict()
    for name, layer in adapter_layers(model.base_model):
        weight = originals[f"{name}.weight"].numpy()
        taken = np.zeros_like(weight)
        for _ in range(iters):
            base = rounded(weight - taken, options)
            taken = leading(weight - base, 4)
        assert layer.base.is_residual == (iters > 1)
        # a weight between two levels may fall to either side in the last digit
        found_base = layer.base.weight_value().numpy()
        assert np.isclose(found_base, base, atol=1e-5).mean() > (0.999 if iters == 1 else 0.98), name
        found = 2 * layer.lora_B.weight.numpy() @ layer.lora_A.weight.numpy()
        np.testing.assert_allclose(found, leading(weight - found_base, 4), atol=1e-5, err_msg=name)


@pytest.mark.parametrize("steps", LOFTQ_STEPS)
def test_loftq_base_and_initial_factors_equal_peft(steps: int):
    with np.load(DATA / "loftq.npz") as golden:
        base, update = golden[f"{steps}/base"], golden[f"{steps}/update"]
    weight = paddle.to_tensor(loftq_weight())
    config = LoftQConfig(rank=LOFTQ_RANK, alpha=LOFTQ_RANK, iters=steps)
    ours = dequantize(quantize(config.before_quantizing("w", weight, lambda w: dequantize(quantize(w, NF4))), NF4))
    np.testing.assert_allclose(ours.numpy(), base, atol=1e-6)
    start = config.initial_factors["w"]
    np.testing.assert_allclose(paddle.matmul(start.b, start.a).numpy(), update, atol=1e-5)


def errors_of(config: Any, options: QuantizationConfig) -> float:
    """Return the squared distance of all weights, adapters included, to the original weights."""
    originals, total = tiny_model().state_dict(), 0.0
    for name, layer in adapter_layers(adapted(config, options).base_model):
        weight = (layer.base.weight_value() + layer.delta_weight()).numpy()
        total += float(np.square(weight - originals[f"{name}.weight"].numpy()).sum())
    return total


@pytest.mark.parametrize("algo", ["nf4", "fp4", "weight_only_int4", "weight_only_int8"])
def test_loftq_start_is_closer_to_original_than_quantized_base(algo: str):
    options = QuantizationConfig(algo=algo)
    plain = errors_of(LoRAConfig(rank=4), options)
    once, often = (errors_of(LoftQConfig(rank=4, iters=iters), options) for iters in (1, 5))
    pissa = errors_of(PiSSAConfig(rank=4), options)
    assert once < 0.75 * plain
    assert often < 0.97 * once
    assert pissa < 0.9 * plain


def test_loftq_one_iteration_keeps_plain_quantized_base():
    ours, plain = quantized(LoftQConfig(iters=1)), quantized(LoRAConfig())
    for (name, tensor), (_, other) in zip(ours.state_dict().items(), plain.state_dict().items(), strict=True):
        assert np.array_equal(tensor.numpy(), other.numpy()), name


def test_pissa_quantized_base_holds_residual():
    config = PiSSAConfig(rank=4, svd="exact", alpha=8.0)
    model, originals = adapted(config), tiny_model().state_dict()
    for name, layer in adapter_layers(model.base_model):
        weight = originals[f"{name}.weight"].numpy()
        found = 2 * layer.lora_B.weight.numpy() @ layer.lora_A.weight.numpy()
        np.testing.assert_allclose(found, leading(weight, 4), atol=1e-5)
        close = np.isclose(layer.base.weight_value().numpy(), rounded(weight - leading(weight, 4), NF4), atol=1e-5)
        assert close.mean() > 0.999


def test_pissa_residual_base_does_not_subtract_initial_factors():
    model = adapted(PiSSAConfig(rank=4))
    train(model, steps=2)
    _, layer = next(adapter_layers(model.base_model))
    x = np.random.default_rng(0).standard_normal((7, 36)).astype(np.float32)
    base, a, b = (t.numpy() for t in (layer.base.weight_value(), layer.lora_A.weight, layer.lora_B.weight))
    np.testing.assert_allclose(layer(paddle.to_tensor(x)).numpy(), x @ base.T + (x @ a.T) @ b.T, atol=1e-5)
    np.testing.assert_allclose(layer.delta_weight().numpy(), b @ a, atol=1e-6)


def test_loftq_before_quantizing_changes_targets_only():
    config = LoftQConfig(rank=4, iters=2, target_modules=["q_proj"])
    model = quantized(config)
    assert set(config.initial_factors) == {f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)}
    assert model.model.layers[0].self_attn.q_proj.is_residual
    assert not model.model.layers[0].self_attn.k_proj.is_residual
    get_peft_model(model, config)
    assert not config.initial_factors, "factors must be moved to the layers"


@pytest.mark.parametrize("config", [PiSSAConfig(rank=4), LoftQConfig(rank=4, iters=2)], ids=["pissa", "loftq"])
def test_wrap_base_quantized_for_another_adapter_raises(config: Any, tmp_path: Path):
    with pytest.raises(ValueError, match="quantized without this adapter's config"):
        get_peft_model(quantized(LoRAConfig()), config)
    model = adapted(config)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="quantized without this adapter"):
        PeftModel.from_pretrained(quantized(LoRAConfig()), tmp_path)


@pytest.mark.parametrize("config", [PiSSAConfig(rank=4), LoftQConfig(rank=4, iters=3)], ids=["pissa", "loftq"])
def test_files_over_original_base_differ_by_quantization_only(config: Any, tmp_path: Path):
    """Merge into the original weights: W + s (B A - B' A')."""
    model = adapted(config, INT8)
    train(model, steps=3)
    model.save_pretrained(tmp_path)
    over_original = PeftModel.from_pretrained(tiny_model(), tmp_path)
    trained, merged = logits_of(model), logits_of(over_original.merge_and_unload())
    effect = np.abs(trained - logits_of(tiny_model())).max()
    assert 0 < np.abs(trained - merged).max() < 0.1 * effect


def test_loftq_one_iteration_files_load_on_any_quantized_base(tmp_path: Path):
    model = adapted(LoftQConfig(rank=4))
    train(model, steps=3)
    model.save_pretrained(tmp_path)
    assert np.array_equal(logits_of(PeftModel.from_pretrained(quantized(LoRAConfig()), tmp_path)), logits_of(model))
    fields = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (fields["peft_type"], fields["r"]) == ("LORA", 8)
    assert fields["paddlenlp_ext"]["iters"] == 1
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    starts = [value[4:] for name, value in tensors.items() if "lora_A" in name]
    assert len(starts) == 14 and not any(value.any() for value in starts)


def test_loftq_one_iteration_over_a_base_of_other_quantization_raises(tmp_path: Path):
    adapted(LoftQConfig(rank=4)).save_pretrained(tmp_path)
    for base, found in ((tiny_model(), "full precision"), (quantized(LoRAConfig(), INT8), "weight_only_int8")):
        before = base.state_dict()
        with pytest.raises(ValueError, match=rf"corrects the errors of weights in nf4.*base has weights in {found}"):
            PeftModel.from_pretrained(base, tmp_path)
        assert base.state_dict().keys() == before.keys()


def test_loftq_path_continues_stored_adapter(tmp_path: Path):
    model = adapted(LoftQConfig(rank=4, iters=2))
    train(model, steps=3)
    model.save_pretrained(tmp_path)
    config = LoftQConfig(path=str(tmp_path), rank=7)  # the initial factors are those of the folder, not of the run
    warm = get_peft_model(quantized(config), config)
    warm.eval()
    assert np.array_equal(logits_of(warm), logits_of(model))
    assert warm.peft_config.iters == 2


@pytest.mark.parametrize("config", [PiSSAConfig(rank=4), LoftQConfig(rank=4, iters=2)], ids=["pissa", "loftq"])
def test_before_quantizing_stored_factors_are_removed(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Check that the stored factors are subtracted and not recomputed, since SVDs differ between devices."""
    model = adapted(config)
    train(model, steps=2)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("paddlenlp_ext.peft.lora.init_before_quantization.leading_svd", None)
    stored = read_adapter(tmp_path)
    assert np.array_equal(logits_of(PeftModel.from_files(quantized(stored), stored)), logits_of(model))
    warm = type(config)(path=str(tmp_path))
    assert np.array_equal(logits_of(get_peft_model(quantized(warm), warm).eval()), logits_of(model))


def test_pissa_trained_in_full_precision_continues_on_quantized_base(tmp_path: Path):
    model = get_peft_model(tiny_model(), PiSSAConfig(rank=4))
    train(model, steps=2)
    model.save_pretrained(tmp_path)
    stored = read_adapter(tmp_path)
    over_int8 = logits_of(PeftModel.from_files(quantized(stored, INT8), stored))
    lost = np.abs(logits_of(quantized(LoRAConfig(), INT8)) - logits_of(tiny_model())).max()
    assert 0 < np.abs(over_int8 - logits_of(model)).max() < 2 * lost


@pytest.mark.parametrize("config", [PiSSAConfig(rank=4), LoftQConfig(rank=4, iters=2)], ids=["pissa", "loftq"])
def test_get_peft_model_residual_base_of_other_adapter_raises(config: Any, tmp_path: Path):
    base = quantized(config)
    with pytest.raises(ValueError, match=r"another adapter .* were subtracted .*; load the original model again"):
        get_peft_model(base, LoRAConfig())
    model = get_peft_model(base, config)
    with pytest.raises(ValueError, match="fit only the quantized base"):
        save_as_lora(model, tmp_path)


def test_loftq_full_precision_base_starts_as_lora():
    config = LoftQConfig(rank=4)
    assert np.array_equal(logits_of(get_peft_model(tiny_model(), config)), logits_of(tiny_model()))


def test_loftq_invalid_config_raises(tmp_path: Path):
    with pytest.raises(ValueError, match="loftq_iters: 0 is out of range"):
        LoftQConfig(iters=0)
    with pytest.raises(ValueError, match=r"lora_rank=16 exceeds the .* singular values of .*k_proj"):
        quantized(LoftQConfig(rank=16))
    adapted(LoftQConfig(rank=4)).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "adapter_config.json").read_text())
    del fields["paddlenlp_ext"]
    (tmp_path / "adapter_config.json").write_text(json.dumps({**fields, "init_lora_weights": "loftq"}))
    with pytest.raises(ValueError, match="init_lora_weights='loftq' depends on a base"):
        read_adapter(tmp_path)
