"""Compare DoRA, PiSSA and OLoRA with Hugging Face PEFT.

The adapters are written by tests/golden/generators/make_lora_variants_golden.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.lora_conversion import save_as_lora
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.lora_ga import LoRAGAConfig
from paddlenlp_ext.peft.methods.olora import OLoRAConfig
from paddlenlp_ext.peft.methods.pissa import PiSSAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.golden import DATA
from tests.golden.cases.lora_variant_cases import CASES, GRADIENT_CASE
from tests.golden.cases.peft_cases import EPSILON, LEARNING_RATE, STEPS
from tests.peft.methods import golden_checks as shared


def evaluated_base(base: str) -> CausalLM:
    model = shared.base_model(base)
    model.eval()
    return model


def load(case: str) -> PeftModel:
    return PeftModel.from_pretrained(evaluated_base(CASES[case]["base"]), DATA / "adapters" / case)


@pytest.mark.parametrize("case", CASES)
def test_lora_variant_peft_adapter_gives_peft_logits_gradients_and_merged_weights(case: str):
    golden, model, base = shared.golden_of(DATA / "adapters" / case), load(case), CASES[case]["base"]
    logits = model(shared.ids_of(base))
    shared.close(logits, golden["logits"])
    shared.check_loss_and_backward(model, base, golden)
    shared.check_gradients(model.adapter_state(), shared.part_of(golden, "gradient"))
    shared.check_merged(model, base, golden, logits.numpy())


@pytest.mark.parametrize("case", CASES)
def test_lora_variant_adamw_steps_give_peft_weights(case: str):
    golden, model = shared.golden_of(DATA / "adapters" / case), load(case).train()
    optimizer = shared.adamw(model, LEARNING_RATE, 0.0, EPSILON)
    shared.take_steps(optimizer, STEPS, lambda: shared.loss_of(model, CASES[case]["base"]))
    shared.check_tensors(model.adapter_state(), shared.part_of(golden, "trained"))


@pytest.mark.parametrize("case", CASES)
def test_lora_variant_peft_adapter_round_trips(case: str, tmp_path: Path):
    load(case).save_pretrained(tmp_path)
    shared.check_same_tensors(tmp_path, DATA / "adapters" / case)
    shared.check_config_fields(tmp_path, DATA / "adapters" / case)


@pytest.mark.parametrize("svd", ["fast", "exact"])
@pytest.mark.parametrize("case", ["llama_pissa", "qwen2_pissa"])
def test_pissa_initial_product_equals_peft(case: str, svd: str):
    options = CASES[case]["lora"]
    config = PiSSAConfig(
        rank=options["r"],
        alpha=options["lora_alpha"],
        rslora=options.get("use_rslora", False),
        target_modules=options["target_modules"],
        rank_pattern=options.get("rank_pattern", {}),
        svd=svd,
    )
    model = get_peft_model(evaluated_base(CASES[case]["base"]), config)
    layers = dict(adapter_layers(model.base_model))
    expected = shared.part_of(shared.golden_of(DATA / "adapters" / case), "start:product")
    assert expected
    for name, product in expected.items():
        layer = layers[name]
        ours = paddle.matmul(layer.lora_B_start, layer.lora_A_start) * layer.scaling
        shared.close(ours, product)


def test_pissa_peft_adapter_continues_and_saves_as_lora(tmp_path: Path):
    base, theirs = CASES["llama_pissa"]["base"], DATA / "adapters" / "llama_pissa"
    model = get_peft_model(evaluated_base(base), PiSSAConfig(path=str(theirs)))
    optimizer = paddle.optimizer.AdamW(0.01, parameters=[p for p in model.parameters() if not p.stop_gradient])
    shared.loss_of(model, base).backward()
    optimizer.step()
    model.eval()
    input_ids = shared.ids_of(base)
    logits = model(input_ids).numpy()
    assert np.abs(logits - shared.golden_of(theirs)["logits"]).max() > 0.1
    model.save_pretrained(tmp_path / "pissa")
    again = PeftModel.from_pretrained(evaluated_base(base), tmp_path / "pissa")
    assert np.array_equal(again(input_ids).numpy(), logits)
    save_as_lora(model, tmp_path / "plain")
    plain = PeftModel.from_pretrained(evaluated_base(base), tmp_path / "plain")
    assert type(plain.peft_config) is LoRAConfig
    shared.close(plain(input_ids), logits)


def test_pissa_peft_conversion_to_lora_gives_equal_model():
    base = CASES["llama_pissa"]["base"]
    converted = PeftModel.from_pretrained(evaluated_base(base), DATA / "adapters" / "llama_pissa_converted")
    shared.close(converted(shared.ids_of(base)), shared.golden_of(DATA / "adapters" / "llama_pissa")["logits"])


@pytest.mark.parametrize("init", ["pissa_niter_4", "pissa_niter_400"])
def test_pissa_file_with_randomized_start_is_refused(tmp_path: Path, init: str):
    folder = shutil.copytree(DATA / "adapters" / "llama_pissa", tmp_path / "adapter")
    config = folder / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "init_lora_weights": init}))
    message = f"init_lora_weights='{init}' subtracts factors .* path_initial_model_for_weight_conversion"
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(evaluated_base(CASES["llama_pissa"]["base"]), folder)


@pytest.mark.parametrize("rslora", [False, True])
def test_olora_new_adapter_subtracts_its_start_for_any_scale(rslora: bool):
    config = OLoRAConfig(rank=3, alpha=5, rslora=rslora, target_modules=["q_proj"])
    layer = dict(adapter_layers(get_peft_model(evaluated_base(GRADIENT_CASE), config).base_model))[
        "model.layers.0.self_attn.q_proj"
    ]
    q, r = np.linalg.qr(layer.base.weight.numpy().astype(np.float64))
    product = layer.scaling * layer.lora_B.weight.numpy() @ layer.lora_A.weight.numpy()
    np.testing.assert_allclose(product, q[:, :3] @ r[:3], atol=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_lora_ga_gradient_equals_torch(recompute: bool):
    """Compare A0 and B0 with the paper's formula, applied in NumPy to the gradients of PyTorch."""
    gradients = np.load(DATA / "lora_ga_gradients.npz")
    config = LoRAGAConfig(rank=4, alpha=8, target_modules=["q_proj", "k_proj", "down_proj"], ga_stable_gamma=9.0)
    model = get_peft_model(evaluated_base(GRADIENT_CASE), config)
    if recompute:
        model.enable_recompute()
    model.train()
    model.hooks.before_training(lambda: shared.loss_of(model, GRADIENT_CASE).backward())
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
