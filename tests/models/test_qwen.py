"""Qwen 1 against its formulas in NumPy, and against Qwen2 with the same weights.

transformers has no class for Qwen 1, whose code is in the model's repository. Qwen2 computes the same function and is
compared with transformers in test_decoder_golden.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.safetensors import LazyTensor, save_sharded
from paddlenlp_ext.config.sections.model import ModelConfig
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.context_extension import STRATEGIES, context_overrides
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model

D, F, HEADS, DIM, LAYERS, VOCAB, EPS, THETA = 24, 20, 3, 8, 2, 37, 1e-5, 500.0
CONFIG: dict[str, Any] = {
    "model_type": "qwen",
    "architectures": ["QWenLMHeadModel"],
    "hidden_size": D,
    "intermediate_size": 2 * F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "kv_channels": DIM,
    "vocab_size": VOCAB,
    "seq_length": 32,
    "max_position_embeddings": 64,
    "layer_norm_epsilon": EPS,
    "rotary_emb_base": THETA,
    "rotary_pct": 1.0,
    "no_bias": True,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
    "attn_dropout_prob": 0.0,
    "emb_dropout_prob": 0.0,
    "tie_word_embeddings": False,
}
IDS = np.random.default_rng(1).integers(0, VOCAB, (2, 11))
LABELS = np.random.default_rng(2).integers(0, VOCAB, (2, 11))
QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": VOCAB,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}


def weights() -> dict[str, np.ndarray]:
    """Return random tensors with the names and shapes of Qwen 1."""
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (VOCAB, D), "transformer.ln_f.weight": (D,)}
    for layer in range(LAYERS):
        prefix = f"transformer.h.{layer}."
        shapes |= {prefix + "ln_1.weight": (D,), prefix + "ln_2.weight": (D,)}
        shapes |= {prefix + "attn.c_attn.weight": (3 * D, D), prefix + "attn.c_attn.bias": (3 * D,)}
        shapes |= {prefix + "attn.c_proj.weight": (D, D), prefix + "mlp.c_proj.weight": (D, F)}
        shapes |= {prefix + "mlp.w1.weight": (F, D), prefix + "mlp.w2.weight": (F, D)}
    shapes["lm_head.weight"] = (VOCAB, D)
    rng = np.random.default_rng(0)
    noise = {name: 0.3 * rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return {name: values + 1 if ".ln_" in name else values for name, values in noise.items()}


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def rotated(x_SNH: np.ndarray) -> np.ndarray:
    """Rotate the halves of each head by the position times theta^(-2i / H)."""
    angles = np.arange(len(x_SNH))[:, None] / THETA ** (np.arange(0, DIM, 2) / DIM)
    cos, sin = (np.tile(f(angles), 2)[:, None] for f in (np.cos, np.sin))
    first, second = np.split(x_SNH, 2, axis=-1)
    return x_SNH * cos + np.concatenate([-second, first], axis=-1) * sin


def reference_logits(tensors: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Return the logits [S, VOCAB] of one row, in float64."""
    tensors = {name: values.astype(np.float64) for name, values in tensors.items()}
    x_SD = tensors["transformer.wte.weight"][ids]
    for layer in range(LAYERS):
        own = {name.split(".", 3)[3]: v for name, v in tensors.items() if name.startswith(f"transformer.h.{layer}.")}
        mixed = norm(x_SD, own["ln_1.weight"]) @ own["attn.c_attn.weight"].T + own["attn.c_attn.bias"]
        q, k, v = (part.reshape(len(ids), HEADS, DIM) for part in np.split(mixed, 3, axis=-1))
        scores = np.einsum("snh,tnh->nst", rotated(q), rotated(k)) / np.sqrt(DIM)
        scores = np.where(np.tri(len(ids), dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        x_SD = x_SD + np.einsum("nst,tnh->snh", shares, v).reshape(len(ids), -1) @ own["attn.c_proj.weight"].T
        normed = norm(x_SD, own["ln_2.weight"])
        up, gate = normed @ own["mlp.w1.weight"].T, normed @ own["mlp.w2.weight"].T
        x_SD = x_SD + (up * gate / (1 + np.exp(-gate))) @ own["mlp.c_proj.weight"].T
    return norm(x_SD, tensors["transformer.ln_f.weight"]) @ tensors["lm_head.weight"].T


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {name: LazyTensor(v.shape, "float32", lambda v=v: v) for name, v in weights().items()}
    save_sharded(tmp_path / "qwen", tensors)
    (tmp_path / "qwen" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "qwen"


def loss_gradients(model: CausalLM) -> dict[str, np.ndarray]:
    hidden = model.hidden_states(paddle.to_tensor(IDS)).flatten(0, 1)
    model.cross_entropy(hidden, paddle.to_tensor(LABELS).flatten())[0].backward()
    return {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


def test_qwen_logits_follow_the_formulas(folder: Path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    with paddle.no_grad():
        found = model(paddle.to_tensor(IDS)).numpy()
    expected = np.stack([reference_logits(weights(), row) for row in IDS])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_qwen_gradients_equal_those_of_qwen2_with_the_same_weights(folder: Path):
    model, peer = AutoModelForCausalLM.from_pretrained(folder), CausalLM(DecoderConfig.from_dict(QWEN2))
    values = dict(model.named_parameters())
    for name, parameter in peer.named_parameters():
        parameter.set_value(values.pop(name))
    assert not values
    found, expected = loss_gradients(model), loss_gradients(peer)
    assert found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in found)


def test_qwen_is_saved_with_the_tensors_and_keys_of_its_files(folder: Path, tmp_path: Path):
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    source, stored = open_weights(tmp_path / "saved"), weights()
    assert sorted(source.names()) == sorted(stored)
    assert all(np.array_equal(source.read(name), stored[name]) for name in stored)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert {key: config[key] for key in CONFIG} == CONFIG


def test_qwen_adapter_of_the_fused_layer_is_saved_and_loaded(folder: Path, tmp_path: Path):
    config = LoRAConfig(rank=2, target_modules=["c_attn", "o_proj", "gate_proj"])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    paddle.seed(0)
    for tensor in model.adapter_state().values():
        tensor.set_value(tensor + 0.1 * paddle.randn(tensor.shape))
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter")
    ids = paddle.to_tensor(IDS)
    with paddle.no_grad():
        expected, plain = model(ids).numpy(), AutoModelForCausalLM.from_pretrained(folder)(ids).numpy()
        np.testing.assert_allclose(again(ids).numpy(), expected, atol=1e-5)
    assert np.abs(expected - plain).max() > 1e-2


def test_generate_of_qwen_beyond_seq_length_raises():
    """Published models scale queries and frequencies of longer sequences, unless both settings are off."""
    model = AutoModelForCausalLM.from_config(CONFIG)
    assert len(model.generate([[1, 2]], max_new_tokens=30, eos_token_id=None)[0]) == 30
    with pytest.raises(
        ValueError, match=r"prompt 1 has 3 tokens and may get 30 new tokens, .* pass max_total_length=32"
    ):
        model.generate([[1, 2], [1, 2, 3]], max_new_tokens=30)
    assert len(model.generate([[1, 2, 3]], max_new_tokens=30, max_total_length=32, eos_token_id=None)[0]) == 29
    for changes in (
        {"use_logn_attn": False, "use_dynamic_ntk": False},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ):
        model = AutoModelForCausalLM.from_config({**CONFIG, **changes})
        assert len(model.generate([[1, 2, 3]], max_new_tokens=30, eos_token_id=None)[0]) == 30


@pytest.mark.parametrize("name", sorted(STRATEGIES.keys() - {"RotaryEmbedding", "LongRoPEScalingRotaryEmbedding"}))
def test_long_sequence_strategy_changes_qwen_as_it_changes_qwen2(name: str):
    options = ModelConfig(use_long_sequence_strategies=True, strategy_name=name, rope_scaling_factor=4.0)
    plain = {**QWEN2, "head_dim": DIM, "max_position_embeddings": 32}
    own, expected = (
        DecoderConfig.from_dict({**config, **context_overrides(config, options)}) for config in (CONFIG, plain)
    )
    assert own.ropes == expected.ropes and own.max_context == expected.max_context and own.longest_answer is None


def test_qwen_config_has_the_context_of_seq_length_and_rejects_dropout():
    config = DecoderConfig.from_dict(CONFIG)
    assert (config.max_context, config.intermediate_size, config.head_dim) == (32, F, DIM)
    with pytest.raises(ValueError, match=r"attn_dropout_prob 0\.1 in config\.json is not supported for qwen"):
        DecoderConfig.from_dict({**CONFIG, "attn_dropout_prob": 0.1})
