"""DoRA and PiSSA as Hugging Face PEFT computes them (adapters of tests/golden/make_lora_variants_golden.py)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from safetensors import safe_open

from paddlenlp_ext.models.config import DecoderConfig
from paddlenlp_ext.models.decoder import CausalLM
from paddlenlp_ext.ops.linear_cross_entropy import linear_cross_entropy
from paddlenlp_ext.peft.base import PeftModel, get_peft_model
from paddlenlp_ext.peft.combine import save_as_lora
from paddlenlp_ext.peft.layer import adapter_layers
from paddlenlp_ext.peft.lora import LoRAConfig
from paddlenlp_ext.peft.lora_ga import LoRAGAConfig
from paddlenlp_ext.peft.pissa import PissaConfig
from paddlenlp_ext.train.optim import build_optimizer

GOLDEN = Path(__file__).parents[1] / "golden"
sys.path.insert(0, str(GOLDEN))
from lora_variant_cases import CASES, GRADIENT_CASE  # noqa: E402
from model_cases import CASES as MODELS  # noqa: E402
from model_cases import make_inputs, make_weight  # noqa: E402
from peft_cases import EPSILON, LEARNING_RATE, STEPS  # noqa: E402

TOLERANCE = 1e-5


def base_model(base: str) -> CausalLM:
    model = CausalLM(DecoderConfig.from_dict(MODELS[base]))
    for name, parameter in model.named_parameters():
        parameter.set_value(make_weight(base, name, tuple(parameter.shape)))
    model.eval()
    return model


def load(case: str) -> PeftModel:
    return PeftModel.from_pretrained(base_model(CASES[case]["base"]), GOLDEN / "adapters" / case)


def loss_of(model: PeftModel, base: str) -> paddle.Tensor:
    input_ids, labels = (paddle.to_tensor(array) for array in make_inputs(base))
    hidden_TD = model.hidden_states(input_ids).flatten(0, 1)
    loss_sum, _ = linear_cross_entropy(hidden_TD, model.head_weight(), labels.flatten())
    return loss_sum / int((labels != -100).sum())


def close(ours: paddle.Tensor, golden: np.ndarray, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(ours.numpy(), golden, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_logits_gradients_and_merged_weights_as_in_peft(case: str):
    golden = np.load(GOLDEN / "adapters" / case / "golden.npz")
    model, base = load(case), CASES[case]["base"]
    input_ids = paddle.to_tensor(make_inputs(base)[0])
    logits = model(input_ids)
    close(logits, golden["logits"])
    loss = loss_of(model, base)
    np.testing.assert_allclose(float(loss), golden["loss"], rtol=1e-6)
    loss.backward()
    for name, tensor in model.adapter_state().items():
        close(tensor.grad, golden[f"gradient:{name}"])
    merged = model.merge_and_unload()
    close(merged(input_ids), logits.numpy())
    state, wanted = merged.state_dict(), [name for name in golden if name.startswith("merged:")]
    assert wanted
    for name in wanted:
        close(state[name.removeprefix("merged:")], golden[name])


@pytest.mark.parametrize("case", CASES)
def test_weights_after_some_steps_of_adamw_as_in_peft(case: str):
    golden = np.load(GOLDEN / "adapters" / case / "golden.npz")
    model = load(case).train()
    options = SimpleNamespace(
        optim="adamw",
        learning_rate=LEARNING_RATE,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=EPSILON,
    )
    optimizer = build_optimizer(model, options)
    for _ in range(STEPS):
        loss_of(model, CASES[case]["base"]).backward()
        optimizer.step()
        optimizer.clear_grad()
    for name, tensor in model.adapter_state().items():
        close(tensor, golden[f"trained:{name}"])


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_of_peft_saved_again_reads_as_pefts_own(case: str, tmp_path: Path):
    theirs = GOLDEN / "adapters" / case
    load(case).save_pretrained(tmp_path)
    with (
        safe_open(theirs / "adapter_model.safetensors", "np") as wanted,
        safe_open(tmp_path / "adapter_model.safetensors", "np") as written,
    ):
        assert sorted(written.keys()) == sorted(wanted.keys())
        for key in wanted.keys():  # noqa: SIM118 (a safetensors file, not a dict)
            assert np.array_equal(written.get_tensor(key), wanted.get_tensor(key))
    ours = json.loads((tmp_path / "adapter_config.json").read_text())
    golden = json.loads((theirs / "adapter_config.json").read_text())
    assert ours.keys() <= golden.keys()
    for field in ours.keys() - {"target_modules"}:
        assert ours[field] == golden[field], field


@pytest.mark.parametrize("svd", ["fast", "exact"])
@pytest.mark.parametrize("case", ["llama_pissa", "qwen2_pissa"])
def test_pissa_takes_the_part_of_the_weight_that_peft_takes(case: str, svd: str):
    golden, options = np.load(GOLDEN / "adapters" / case / "golden.npz"), CASES[case]["lora"]
    config = PissaConfig(
        rank=options["r"],
        alpha=options["lora_alpha"],
        rslora=options.get("use_rslora", False),
        target_modules=options["target_modules"],
        rank_pattern=options.get("rank_pattern", {}),
        svd=svd,
    )
    model = get_peft_model(base_model(CASES[case]["base"]), config)
    layers = dict(adapter_layers(model.base_model))
    wanted = {name.removeprefix("start:product:"): golden[name] for name in golden if name.startswith("start:")}
    assert wanted
    for name, product in wanted.items():
        layer = layers[name]
        ours = paddle.matmul(layer.lora_B_start, layer.lora_A_start) * layer.scaling
        close(ours, product)


def test_a_pissa_adapter_of_peft_goes_on_and_becomes_a_plain_lora(tmp_path: Path):
    base, theirs = CASES["llama_pissa"]["base"], GOLDEN / "adapters" / "llama_pissa"
    model = get_peft_model(base_model(base), PissaConfig(path=str(theirs)))
    optimizer = paddle.optimizer.AdamW(0.01, parameters=[p for p in model.parameters() if not p.stop_gradient])
    loss_of(model, base).backward()
    optimizer.step()
    model.eval()
    input_ids = paddle.to_tensor(make_inputs(base)[0])
    logits = model(input_ids).numpy()
    assert np.abs(logits - np.load(theirs / "golden.npz")["logits"]).max() > 0.1
    model.save_pretrained(tmp_path / "pissa")
    again = PeftModel.from_pretrained(base_model(base), tmp_path / "pissa")
    assert np.array_equal(again(input_ids).numpy(), logits)
    save_as_lora(model, tmp_path / "plain")
    plain = PeftModel.from_pretrained(base_model(base), tmp_path / "plain")
    assert type(plain.peft_config) is LoRAConfig
    close(plain(input_ids), logits)


def test_pefts_conversion_of_a_pissa_adapter_is_the_same_model():
    converted = PeftModel.from_pretrained(
        base_model(CASES["llama_pissa"]["base"]), GOLDEN / "adapters" / "llama_pissa_converted"
    )
    golden = np.load(GOLDEN / "adapters" / "llama_pissa" / "golden.npz")
    input_ids = paddle.to_tensor(make_inputs(CASES["llama_pissa"]["base"])[0])
    close(converted(input_ids), golden["logits"])


@pytest.mark.parametrize("recompute", [False, True])
def test_lora_ga_starts_from_the_gradient_that_torch_computes(recompute: bool):
    """A0 and B0 by the paper's formula in NumPy, from the base's own gradients."""
    gradients = np.load(GOLDEN / "lora_ga_gradients.npz")
    config = LoRAGAConfig(rank=4, alpha=8, target_modules=["q_proj", "k_proj", "down_proj"], ga_stable_gamma=9.0)
    model = get_peft_model(base_model(GRADIENT_CASE), config)
    if recompute:
        model.enable_recompute()
    model.train()
    model.before_training(lambda: loss_of(model, GRADIENT_CASE).backward())
    layers = dict(adapter_layers(model.base_model))
    assert len(gradients.files) == 3
    for name in gradients.files:
        gradient, layer = gradients[name], layers[name]
        u, _, v_t = np.linalg.svd(gradient)
        scale = gradient.shape[0] ** 0.25 / 9.0**0.5
        a, b = layer.lora_A.weight.numpy() / scale, layer.lora_B.weight.numpy() / scale
        np.testing.assert_allclose(np.abs(np.sum(a * v_t[:4], axis=1)), 1, atol=1e-4, err_msg=name)
        np.testing.assert_allclose(np.abs(np.sum(b * u[:, 4:8], axis=0)), 1, atol=1e-4, err_msg=name)
        assert np.array_equal(layer.lora_A_start.numpy(), layer.lora_A.weight.numpy())
        assert np.array_equal(layer.lora_B_start.numpy(), layer.lora_B.weight.numpy())
        assert layer.gradient is None
