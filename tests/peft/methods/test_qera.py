"""QERA: corrections of quantized layers compared with the paper's formulas in NumPy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.qera import QERAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import dequantize_linears
from paddlenlp_ext.quantization.quantize_weight import quantize
from tests.common.adapters import logits_of, loss_of, same_bits, state_of, tiny_model, train

NF4, INT4 = QuantizationConfig(algo="nf4"), QuantizationConfig(algo="weight_only_int4")
RANK = 4


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the tiny model."""
    folder = tmp_path_factory.mktemp("original")
    tiny_model().save_pretrained(folder)
    return folder


def adapted(folder: Path, config: Any, options: QuantizationConfig = NF4) -> PeftModel:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, quantization_config=options), config)
    model.train()
    return model


def initialized(folder: Path, options: QuantizationConfig = NF4, **more: Any) -> PeftModel:
    """Return a QERA model after the batches of its initialization."""
    model = adapted(folder, QERAConfig(**{"rank": RANK, "batches": 2, **more}), options)
    model.hooks.before_training(lambda: loss_of(model).backward())
    for parameter in model.parameters():
        parameter.clear_gradient(False)
    model.eval()
    return model


def inputs_of(folder: Path, options: QuantizationConfig) -> dict[str, np.ndarray]:
    """Return the inputs [tokens, in] of each linear layer of the quantized model."""
    model, seen = adapted(folder, LoRAConfig(rank=RANK), options), {}
    for name, layer in adapter_layers(model.base_model):
        layer.register_forward_pre_hook(lambda _, x, name=name: seen.update({name: x[0].numpy()}))
    logits_of(model)
    return {name: x.reshape(-1, x.shape[-1]).astype(np.float64) for name, x in seen.items()}


def best_update(error: np.ndarray, x: np.ndarray, rank: int) -> np.ndarray:
    """Return the product of rank r that best approximates the output error, by theorem 1 of the paper."""
    values, q = np.linalg.eigh(x.T @ x)
    values = np.maximum(values, 1e-6 * values.max())
    root, inverse = (q * np.sqrt(values)) @ q.T, (q / np.sqrt(values)) @ q.T
    u, s, v_t = np.linalg.svd(error @ root)
    return (u[:, :rank] * s[:rank]) @ v_t[:rank] @ inverse


def correction_of(layer: Any) -> np.ndarray:
    """Return the correction that is added to the weight before training."""
    assert not layer.lora_B.weight.numpy().any()
    return layer.delta_weight().numpy()


@pytest.mark.parametrize("options", [NF4, INT4], ids=lambda options: options.algo)
def test_minimize_output_error_is_optimal_for_rank(original: Path, options: QuantizationConfig):
    model, weights = initialized(original, options), tiny_model().state_dict()
    inputs = inputs_of(original, options)
    for name, layer in adapter_layers(model.base_model):
        error = (weights[f"{name}.weight"].numpy() - layer.base.weight_value().numpy()).astype(np.float64)
        expected = best_update(error, inputs[name], RANK)
        found = correction_of(layer)
        assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max(), name
        left = [np.linalg.norm((error - update) @ inputs[name].T) for update in (found, expected, np.zeros_like(found))]
        assert left[0] < 1.0001 * left[1] < left[2], name


def test_qera_independent_inputs_use_diagonal_only(original: Path):
    model, weights = initialized(original, inputs="independent"), tiny_model().state_dict()
    inputs = inputs_of(original, NF4)
    for name, layer in adapter_layers(model.base_model):
        error = (weights[f"{name}.weight"].numpy() - layer.base.weight_value().numpy()).astype(np.float64)
        size = np.linalg.norm(inputs[name], axis=0)
        u, s, v_t = np.linalg.svd(error * size)
        expected = (u[:, :RANK] * s[:RANK]) @ v_t[:RANK] / size
        found = correction_of(layer)
        assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max(), name


def test_qera_corrected_model_is_closer_to_original(original: Path):
    expected, plain = logits_of(tiny_model()), logits_of(adapted(original, LoRAConfig(rank=RANK)))
    independent, correlated = (
        logits_of(initialized(original, inputs=inputs)) for inputs in ("independent", "correlated")
    )
    distances = [np.linalg.norm(logits - expected) for logits in (plain, independent, correlated)]
    assert distances[2] < distances[1] < distances[0]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_qera_correction_stays_frozen(original: Path, dropout: float):
    model = initialized(original, dropout=dropout)
    before = {name: correction_of(layer) for name, layer in adapter_layers(model.base_model)}
    train(model, steps=2)
    for name, layer in adapter_layers(model.base_model):
        assert layer.lora_B.weight.numpy().any()
        layer.lora_B.weight.set_value(paddle.zeros_like(layer.lora_B.weight))
        assert np.array_equal(correction_of(layer), before[name]), name


def test_qera_fused_and_separate_products_agree(original: Path):
    logits = []
    for dropout in (0.0, 0.3):
        model = initialized(original, dropout=dropout)
        for _, layer in adapter_layers(model.base_model):
            layer.lora_B.weight.set_value(paddle.full_like(layer.lora_B.weight, 0.05))
            layer.train()  # any dropout disables the fused product ...
            layer.dropout = min(dropout, 1e-9)  # ... even if it drops nothing
        logits.append(logits_of(model))
    np.testing.assert_allclose(logits[0], logits[1], rtol=0, atol=2e-5)


def test_input_recorder_layers_with_same_input_share_correlation(original: Path):
    model = adapted(original, QERAConfig(rank=RANK, batches=1))
    layers = dict(adapter_layers(model.base_model))
    model.adapter._record_inputs(layers, lambda: loss_of(model).backward())
    sums = {name: id(layer.inputs) for name, layer in layers.items()}
    correlation_of = {
        leaf: sums[next(name for name in sums if name.endswith(leaf))] for leaf in ("q_proj", "k_proj", "v_proj")
    }
    assert len(set(correlation_of.values())) == 1
    assert (
        len(set(sums.values())) == 4 * 2
    )  # four inputs: of both norms, of attention's output and of the gated product


def test_qera_full_precision_layers_get_no_correction(original: Path, tmp_path: Path):
    """Test a saved model whose weights are exact levels of nf4."""
    exact = AutoModelForCausalLM.from_pretrained(original, quantization_config=NF4)
    dequantize_linears(exact)
    exact.save_pretrained(tmp_path)
    model = initialized(tmp_path)
    assert all(np.abs(correction_of(layer)).max() < 1e-4 for _, layer in adapter_layers(model.base_model))


def test_qera_files_hold_lora_of_twice_the_rank(original: Path, tmp_path: Path):
    model = initialized(original)
    train(model)
    model.save_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(original, quantization_config=NF4)
    loaded = PeftModel.from_pretrained(base, tmp_path)
    assert type(loaded.peft_config) is QERAConfig
    assert np.array_equal(logits_of(loaded), logits_of(model))
    fields = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (fields["r"], fields["init_lora_weights"]) == (2 * RANK, True)
    del fields["paddlenlp_ext"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(original, quantization_config=NF4), tmp_path)
    assert type(plain.peft_config) is LoRAConfig
    np.testing.assert_allclose(logits_of(plain), logits_of(model), rtol=0, atol=1e-5)


def test_qera_path_keeps_stored_corrections(original: Path, tmp_path: Path):
    model = initialized(original)
    model.save_pretrained(tmp_path)
    warm = adapted(original, QERAConfig(path=str(tmp_path), batches=5))
    before = state_of(warm)
    warm.hooks.before_training(lambda: pytest.fail("the adapter has its repairs"))
    assert same_bits(before, state_of(warm))
    assert warm.peft_config.batches == 5


def test_qera_base_without_original_weights_raises(original: Path, tmp_path: Path):
    quantized = AutoModelForCausalLM.from_pretrained(original, quantization_config=NF4)
    quantized.save_pretrained(tmp_path)
    stored = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path), QERAConfig(rank=RANK))
    with pytest.raises(ValueError, match=r"has quantized weights, but qera needs .*; load the original"):
        stored.hooks.before_training(lambda: None)


def test_qera_weights_of_other_model_raise(original: Path):
    model = adapted(original, QERAConfig(rank=RANK, batches=1))
    other = AutoModelForCausalLM.from_config(tiny_model().config.source, seed=4)
    for name, layer in adapter_layers(model.base_model):
        layer.base._set_packed(quantize(other.state_dict()[f"{name}.weight"].numpy(), NF4))
    with pytest.raises(ValueError, match=r"q_proj: this base was not quantized from .*continue_training: true"):
        model.hooks.before_training(lambda: loss_of(model).backward())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"batches": 0}, "qera_batches"),
        ({"inputs": "correlate"}, r"qera_inputs.*correlated"),
    ],
)
def test_qera_config_value_out_of_range_raises(config: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        QERAConfig(**config)


def test_qera_rank_above_layer_size_raises(original: Path):
    with pytest.raises(ValueError, match=r"lora_rank=20 exceeds the .* singular values of .*k_proj"):
        initialized(original, rank=20)


def test_qera_non_finite_inputs_raise(original: Path):
    model = adapted(original, QERAConfig(rank=RANK, batches=1))
    model.base_model.model.embed_tokens.weight.set_value(paddle.full([61, 36], float("nan")))
    with pytest.raises(ValueError, match="not finite"):
        model.hooks.before_training(lambda: loss_of(model).backward())
