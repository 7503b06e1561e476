"""Prefix tuning: positions, projection, PaddleNLP's folders, training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.nn.rotary_embedding import RotaryEmbedding
from paddlenlp_ext.peft.merge.merge_adapter import merge_adapter
from paddlenlp_ext.peft.methods.prefix_tuning import PrefixTuningConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from tests.common.adapters import FAMILIES, INPUT_IDS, logits_of, loss_of, same_bits, tiny_model, train

PROJECTED = {"num_tokens": 6, "projection": True, "projection_hidden_size": 9}


def arrays(model: PeftModel) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in model.adapter_state().items()}


def prefixed(**options: Any) -> PeftModel:
    model = get_peft_model(tiny_model(), PrefixTuningConfig(**{"num_tokens": 6, **options}))
    model.eval()
    return model


@pytest.mark.parametrize("options", [{}, PROJECTED], ids=["plain", "projected"])
def test_prefix_training_lowers_loss(options: dict):
    model = prefixed(**options)
    before = float(loss_of(model))
    train(model, steps=60)
    assert float(loss_of(model)) < 0.8 * before


@pytest.mark.parametrize("options", [{}, PROJECTED], ids=["plain", "projected"])
def test_prefix_packed_documents_match_single_documents(options: dict):
    """Compare documents in a pack, single documents, and left-padded generation with a cache."""
    model = prefixed(**options)
    train(model, steps=5)
    prompts = [INPUT_IDS[0, :3].tolist(), INPUT_IDS[1, :7].tolist(), INPUT_IDS[1, :5].tolist()]
    packed = paddle.to_tensor([[token for prompt in prompts for token in prompt]])
    with paddle.no_grad():
        together = model(packed, document_lengths=((3, 7, 5),)).numpy()[0]
        first_tokens = []
        for prompt, last in zip(prompts, (2, 9, 14), strict=True):
            single = model(paddle.to_tensor([prompt])).numpy()[0, -1]
            np.testing.assert_allclose(together[last], single, rtol=0, atol=1e-5)
            first_tokens.append(int(single.argmax()))
    generated = model.generate(prompts, max_new_tokens=4, eos_token_id=None)
    assert [tokens[0] for tokens in generated] == first_tokens
    for prompt, tokens in zip(prompts, generated, strict=True):
        ids = paddle.to_tensor([prompt + tokens[:-1]])
        with paddle.no_grad():
            assert model(ids).numpy()[0, len(prompt) - 1 :].argmax(-1).tolist() == tokens


def test_prefix_recompute_with_dropout_keeps_gradients():
    """Allow for other rounding: a recomputed layer may run its feed-forward in another backend than a stored one."""
    gradients = []
    for recompute in (False, True):
        model = prefixed(**PROJECTED, dropout=0.3).train()
        if recompute:
            model.enable_recompute()
        paddle.seed(3)
        loss_of(model).backward()
        gradients.append({name: tensor.grad.numpy() for name, tensor in model.adapter_state().items()})
    for name, gradient in gradients[0].items():
        assert np.abs(gradient).max() > 0, name
        np.testing.assert_allclose(gradients[1][name], gradient, rtol=1e-5, atol=3e-6, err_msg=name)


def test_prefix_projection_files_hold_network_and_result(tmp_path: Path):
    model = prefixed(**PROJECTED)
    train(model, steps=3)
    model.save_pretrained(tmp_path / "projected")
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path / "projected")
    assert same_bits(arrays(model), arrays(loaded))
    assert np.array_equal(logits_of(loaded), logits_of(model))
    # the tensor that readers without projection use
    stored = model.peft_config.to_stored(model.adapter_state())["prompt_embeddings"]
    assert stored.shape == [6, 2 * 2 * 12]
    plain = prefixed()
    plain.load_tensors({"prompt_embeddings": stored.numpy()}, "here")
    np.testing.assert_allclose(logits_of(plain), logits_of(model), rtol=0, atol=1e-5)


@pytest.mark.parametrize("projection", [False, True], ids=["plain", "projected"])
def test_to_stored_twelve_layers_are_in_numeric_order(projection: bool):
    """Set the prefix of layer i to the number i; the tensors come in order of names, layer 10 before layer 2."""
    config, names = PrefixTuningConfig(num_tokens=6, projection=projection), [f"layers.{i}.prefix" for i in range(12)]
    if projection:
        tensors = {f"prefix_encoder.{name}": paddle.zeros([6, 6]) for name in ("embedding", "weight")}
        tensors |= {"prefix_encoder.bias": paddle.zeros([6])}
        tensors |= {f"{name}_weight": paddle.zeros([24, 6]) for name in names}
        tensors |= {f"{name}_bias": paddle.full([24], float(i)) for i, name in enumerate(names)}
    else:
        tensors = {name: paddle.full([6, 2, 2, 6], float(i)) for i, name in enumerate(names)}
    stored = config.to_stored({name: tensors[name] for name in sorted(tensors)})["prompt_embeddings"].numpy()
    assert np.array_equal(stored, np.tile(np.repeat(np.arange(12.0), 24), (6, 1)))


def test_load_tensors_columns_go_to_layers_in_numeric_order():
    deep = AutoModelForCausalLM.from_config({**FAMILIES["llama"], "num_hidden_layers": 12}, seed=3)
    model = get_peft_model(deep, PrefixTuningConfig(num_tokens=6))
    model.load_tensors({"prompt_embeddings": np.tile(np.repeat(np.arange(12.0, dtype=np.float32), 24), (6, 1))}, "here")
    for index, layer in enumerate(model.base_model.model.layers):
        assert np.all(layer.self_attn.prefix.numpy() == index)


def as_paddlenlp(folder: Path, value_L2KPH: np.ndarray, **fields: Any) -> None:
    folder.mkdir()
    config = {
        "dtype": "float32",
        "num_prefix_tokens": value_L2KPH.shape[3],
        "num_attention_heads": 6,
        "multi_query_group_num": 2,
        "num_hidden_layers": 2,
        "hidden_size": 36,
        "prefix_projection": True,
        "prefix_projection_hidden_size": 36,
        "tensor_parallel_degree": -1,
        "prefix_dropout": 0.0,
    }
    (folder / "prefix_config.json").write_text(json.dumps({**config, **fields}))
    (folder / "prefix_model_state.pdparams").write_bytes(b"a pickle, which nobody opens")
    np.save(folder / "pre_caches.npy", value_L2KPH)


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_parameters": _YARN},
        {"model_type": "ernie4_5", "head_dim": 6},
        {"model_type": "smollm3", "no_rope_layer_interval": 2, "rope_parameters": {**_YARN, "rope_theta": 100.0}},
    ],
    ids=["llama", "yarn", "interleaved", "layer-without-rotation"],
)
def test_prefix_paddlenlp_folder_keeps_logits(changes: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Compare with a model whose positions are shifted: PaddleNLP's documents start at 0 after a prefix."""
    sizes = {**FAMILIES["llama"], **changes}
    value = np.random.default_rng(0).standard_normal((2, 2, 2, 6, 6)).astype(np.float32)
    as_paddlenlp(tmp_path / "theirs", value)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_config(sizes, seed=3), tmp_path / "theirs")
    logits = logits_of(model)

    reference = get_peft_model(AutoModelForCausalLM.from_config(sizes, seed=3), PrefixTuningConfig(num_tokens=6))
    reference.eval()
    by_layer = value.transpose(0, 3, 1, 2, 4)
    reference.load_tensors({f"model.layers.{i}.self_attn.prefix": part for i, part in enumerate(by_layer)}, "reference")
    original = RotaryEmbedding.__call__
    monkeypatch.setattr(RotaryEmbedding, "__call__", lambda self, positions: original(self, positions - 6))
    np.testing.assert_allclose(logits, logits_of(reference), rtol=0, atol=1e-4)


def test_prefix_paddlenlp_folder_for_norms_after_rotation_raises(tmp_path: Path):
    as_paddlenlp(tmp_path / "theirs", np.zeros((2, 2, 2, 6, 6), np.float32))
    model = AutoModelForCausalLM.from_config({**FAMILIES["llama"], "model_type": "hunyuan_v1_dense"})
    with pytest.raises(ValueError, match="cannot be used in a model with QK norms after RoPE"):
        PeftModel.from_pretrained(model, tmp_path / "theirs")


def test_prefix_paddlenlp_folder_of_another_head_size_raises(tmp_path: Path):
    as_paddlenlp(tmp_path / "theirs", np.zeros((2, 2, 2, 6, 6), np.float32))
    model = AutoModelForCausalLM.from_config({**FAMILIES["llama"], "head_dim": 8})
    with pytest.raises(ValueError, match=r"misshapen.*stored \[6, 2, 2, 6\]"):
        PeftModel.from_pretrained(model, tmp_path / "theirs")


def test_prefix_unreadable_files_raise(tmp_path: Path):
    as_paddlenlp(tmp_path / "flat", np.zeros((2, 2, 2, 6, 6), np.float32))
    np.save(tmp_path / "flat" / "pre_caches.npy", np.zeros((6, 12)))
    with pytest.raises(ValueError, match=r"pre_caches.npy: expected shape .* got \[6, 12\]"):
        PeftModel.from_pretrained(tiny_model(), tmp_path / "flat")
    (tmp_path / "flat" / "pre_caches.npy").unlink()
    with pytest.raises(ValueError, match=r"pre_caches.npy is missing"):
        PeftModel.from_pretrained(tiny_model(), tmp_path / "flat")
    model = prefixed()
    with pytest.raises(ValueError, match=r"has shape \[6, 40\].* need \[tokens, 48\]; use the model"):
        model.load_tensors({"prompt_embeddings": np.zeros((6, 40), np.float32)}, "here")
    with pytest.raises(ValueError, match=r"2 misshapen.*stored \[7, 2, 2, 6\]"):
        model.load_tensors({"prompt_embeddings": np.zeros((7, 48), np.float32)}, "here")


def test_merge_files_prefix_raises(tmp_path: Path):
    model = prefixed()
    model.save_pretrained(tmp_path / "prefix")
    with pytest.raises(ValueError, match=r"PREFIX_TUNING .*cannot be merged"):
        merge_adapter(tmp_path / "prefix", tmp_path / "merged", AutoModelForCausalLM.from_pretrained, base="nowhere")
    assert not (tmp_path / "merged").exists()


def test_prefix_warm_start_keeps_run_dropout(tmp_path: Path):
    prefixed(**PROJECTED).save_pretrained(tmp_path)
    config = get_peft_model(tiny_model(), PrefixTuningConfig(path=str(tmp_path), num_tokens=3, dropout=0.2)).peft_config
    assert (config.num_tokens, config.projection, config.projection_hidden_size, config.dropout) == (6, True, 9, 0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_tokens": 0}, "num_prefix_tokens: 0 is out of range"),
        ({"dropout": 1.0}, "prefix_dropout: 1.0 is out of range"),
        ({"projection_hidden_size": 0}, "projection_hidden_size: 0 is out of range"),
    ],
)
def test_prefix_config_value_out_of_range_raises(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        PrefixTuningConfig(**options)
