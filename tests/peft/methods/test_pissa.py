"""PiSSA: properties beyond the conformance suite."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file, save_file

from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.pissa import PiSSAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.common.adapters import FAMILIES, logits_of, loss_of, tiny_model, train


def adapted(**options: object) -> PeftModel:
    model = get_peft_model(tiny_model(), PiSSAConfig(**{"rank": 4, **options}))
    model.eval()
    return model


def test_pissa_starts_at_leading_triplets_with_scale_one():
    model, base = adapted(), tiny_model().state_dict()
    for name, layer in adapter_layers(model.base_model):
        weight = base[f"{name}.weight"].numpy()
        u, s, v_t = np.linalg.svd(weight, full_matrices=False)
        assert layer.scaling == 1
        product = layer.lora_B.weight.numpy() @ layer.lora_A.weight.numpy()
        np.testing.assert_allclose(product, (u[:, :4] * s[:4]) @ v_t[:4], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("options", [{}, {"alpha": 12.0}, {"rslora": True}, {"svd": "exact"}])
def test_pissa_start_equals_base_bitwise(options: dict[str, object]):
    assert np.array_equal(logits_of(adapted(**options)), logits_of(tiny_model()))


def test_pissa_equals_residual_model_of_paper():
    """Compare with y = x (W - s B0 A0)^T + s x A^T B^T and its gradients in NumPy."""
    model = adapted(alpha=8.0)
    train(model, steps=2)
    _, layer = next(adapter_layers(model.base_model))
    x = np.random.default_rng(0).standard_normal((7, 36)).astype(np.float32)
    weight, a, b = (t.numpy() for t in (layer.base.weight, layer.lora_A.weight, layer.lora_B.weight))
    residual = weight - 2 * layer.lora_B_start.numpy() @ layer.lora_A_start.numpy()
    output = layer(paddle.to_tensor(x))
    np.testing.assert_allclose(output.numpy(), x @ residual.T + 2 * (x @ a.T) @ b.T, atol=1e-5)
    output.sum().backward()
    np.testing.assert_allclose(
        layer.lora_B.weight.grad.numpy(), 2 * np.ones((7, len(b))).T @ (x @ a.T), rtol=1e-4, atol=1e-5
    )


def test_pissa_files_hold_lora_of_twice_the_rank(tmp_path: Path):
    model = adapted(rslora=True)
    train(model, steps=3)
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (fields["peft_type"], fields["r"], fields["init_lora_weights"]) == ("LORA", 8, True)
    assert not any("start" in key for key in load_file(tmp_path / "adapter_model.safetensors"))
    own = fields.pop("paddlenlp_ext")
    assert own["switch"] == "pissa"
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    plain = PeftModel.from_pretrained(tiny_model(), tmp_path)
    assert type(plain.peft_config) is LoRAConfig
    np.testing.assert_allclose(logits_of(plain), logits_of(model), rtol=0, atol=1e-5)


def test_pissa_loading_computes_no_svd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = adapted()
    train(model)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("paddlenlp_ext.peft.lora.init_before_quantization.leading_svd", None)
    assert np.array_equal(logits_of(PeftModel.from_pretrained(tiny_model(), tmp_path)), logits_of(model))


def test_pissa_training_lowers_loss():
    model = adapted()
    before = float(loss_of(model))
    train(model, steps=15)
    assert float(loss_of(model)) < 0.8 * before


def test_pissa_rank_above_weight_size_raises():
    with pytest.raises(ValueError, match=r"lora_rank=16 exceeds the .* singular values of .*k_proj.*\[12, 36\]"):
        adapted(rank=16)


def test_pissa_peft_file_without_initial_factors_raises(tmp_path: Path):
    model = adapted()
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "adapter_config.json").read_text())
    del fields["paddlenlp_ext"]
    (tmp_path / "adapter_config.json").write_text(json.dumps({**fields, "init_lora_weights": "pissa_fast"}))
    with pytest.raises(ValueError, match="init_lora_weights='pissa_fast' subtracts factors from the base"):
        PeftModel.from_pretrained(tiny_model(), tmp_path)


def test_pissa_paddlenlp_folder_gives_trained_model(tmp_path: Path):
    """Load PaddleNLP's folder, which stores only A [in, r] and B [r, out]; its scale is 1 whatever alpha is."""
    rng, tensors, base = np.random.default_rng(0), {}, tiny_model()
    expected = tiny_model()
    for name, parameter in base.named_parameters():
        if not name.endswith("q_proj.weight"):
            continue
        weight = parameter.numpy()
        u, s, v_t = np.linalg.svd(weight, full_matrices=False)
        a, b = 0.1 * rng.standard_normal((36, 4)), 0.1 * rng.standard_normal((4, 36))
        module = name.removesuffix(".weight").replace("model.", "llama.", 1)
        tensors |= {f"{module}.lora_A": a.astype(np.float32), f"{module}.lora_B": b.astype(np.float32)}
        value = weight - (u[:, :4] * s[:4]) @ v_t[:4] + (a @ b).T
        dict(expected.named_parameters())[name].set_value(value.astype(np.float32))
    save_file(tensors, tmp_path / "peft_model.safetensors")
    fields = {"r": 4, "lora_alpha": 8, "pissa": True, "scaling": 2.0, "target_modules": [".*q_proj.*"]}
    (tmp_path / "lora_config.json").write_text(json.dumps(fields))
    model = PeftModel.from_pretrained(base, tmp_path)
    np.testing.assert_allclose(logits_of(model), logits_of(expected), rtol=0, atol=1e-5)
    np.testing.assert_allclose(logits_of(model.merge_and_unload()), logits_of(expected), rtol=0, atol=1e-5)


def test_pissa_lazy_model_has_shapes_without_weights():
    with paddle.LazyGuard():
        model = get_peft_model(CausalLM(DecoderConfig.from_dict(FAMILIES["llama"])), PiSSAConfig(rank=4))
    assert sum(p.size for p in model.parameters() if not p.stop_gradient) > 0
