"""Trainable tokens: refused options, merged files; numbers are in test_weight_adapters_golden.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.merge.merge_adapter import merge_adapter
from paddlenlp_ext.peft.methods.trainable_tokens import TrainableTokensConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from tests.common.adapters import FAMILIES, INPUT_IDS, logits_of, loss_of, tiny_model, train

BOTH = ("embed_tokens", "lm_head")
IN_INPUT = int(INPUT_IDS[0, 0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "trainable_tokens_indices is empty; list the ids"),
        ({"indices": (3, 61)}, "trainable_tokens_indices: 61 is not below the model's vocab_size 61"),
        ({"indices": (3, 4, 3)}, "trainable_tokens_indices: 3 is listed twice"),
        ({"indices": "3,x"}, r"trainable_tokens_indices: expected a list of token ids such as \[3, 7\], got '3,x'"),
        ({"indices": [3, True]}, "expected a list of token ids"),
        ({"indices": (3, -1)}, "trainable_tokens_indices: -1 is negative"),
        ({"indices": (3,), "target_modules": ("q_proj",)}, "'q_proj' matches no embedding of this model"),
    ],
)
def test_trainable_tokens_invalid_option_raises(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        get_peft_model(tiny_model(), TrainableTokensConfig(**options))


@pytest.mark.parametrize("written", [[5, 2], "5,2", "[5, 2]"])
def test_trainable_tokens_indices_of_file_and_command_line_are_equal(written: object):
    assert TrainableTokensConfig(indices=written) == TrainableTokensConfig(indices=(5, 2))


def test_trainable_tokens_on_tied_lm_head_raises():
    with pytest.raises(ValueError, match="lm_head cannot have an adapter of this method"):
        get_peft_model(tiny_model("qwen2"), TrainableTokensConfig(indices=(3,), target_modules=BOTH))


@pytest.mark.parametrize("family", FAMILIES)
def test_trainable_tokens_change_the_logits_of_tied_tables_only(family: str):
    """Change the row of a token that is not in the input: only a tied lm_head uses it."""
    model, absent = get_peft_model(tiny_model(family), TrainableTokensConfig(indices=(3,))), 3
    assert absent not in INPUT_IDS
    model.eval()
    before = logits_of(model)
    rows = model.base_model.model.embed_tokens.trainable_tokens_delta
    rows.set_value(rows + 1.0)
    changed = np.flatnonzero(np.abs(logits_of(model) - before).max(axis=(0, 1)))
    assert changed.tolist() == ([absent] if family == "qwen2" else [])


def test_trainable_tokens_gradient_equals_the_rows_of_the_full_gradient():
    """Compare with the gradient of the full tied embedding, for tokens in the input and one that is not."""
    indices = (3, IN_INPUT, 49)
    full = tiny_model("qwen2")
    full.model.embed_tokens.weight.stop_gradient = False
    loss_of(full).backward()
    model = get_peft_model(tiny_model("qwen2"), TrainableTokensConfig(indices=indices))
    loss_of(model).backward()
    gradient = model.base_model.model.embed_tokens.trainable_tokens_delta.grad.numpy()
    np.testing.assert_allclose(
        gradient, full.model.embed_tokens.weight.grad.numpy()[list(indices)], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(("family", "targets"), [("qwen2", BOTH[:1]), ("llama", BOTH)])
def test_merge_adapter_trainable_tokens_files_have_trained_rows(family: str, targets: tuple[str, ...], tmp_path: Path):
    tiny_model(family).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = get_peft_model(base, TrainableTokensConfig(indices=(IN_INPUT, 3), target_modules=targets))
    train(model, steps=2)
    model.save_pretrained(tmp_path / "adapter")
    report = merge_adapter(tmp_path / "adapter", tmp_path / "merged", AutoModelForCausalLM.from_pretrained)
    assert report.num_merged == len(targets)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    merged.eval()
    np.testing.assert_allclose(logits_of(merged), logits_of(model), atol=1e-6)
    table, original = merged.model.embed_tokens.weight.numpy(), tiny_model(family).model.embed_tokens.weight.numpy()
    assert sorted(np.flatnonzero((table != original).any(axis=1))) == sorted(
        {IN_INPUT, 3} if family == "qwen2" else {IN_INPUT}
    )


def test_trainable_tokens_generate_uses_the_rows():
    model = get_peft_model(tiny_model("qwen2"), TrainableTokensConfig(indices=(7,)))
    rows = model.base_model.model.embed_tokens.trainable_tokens_delta
    hidden = model.hidden_states(paddle.to_tensor([[1, 2]]))[0, -1]
    rows.set_value((10 * hidden / (hidden**2).sum()).unsqueeze(0) * 10)
    model.eval()
    assert model.generate([[1, 2]], max_new_tokens=1) == [[7]]


def test_trainable_tokens_head_of_a_bf16_table_has_the_trained_rows_and_returns_their_gradient():
    """Read the table of a tied lm_head from the logits of unit vectors."""
    model = AutoModelForCausalLM.from_config(FAMILIES["qwen2"], seed=3).to(dtype="bfloat16")
    layer = get_peft_model(model, TrainableTokensConfig(indices=(3, 5))).base_model.model.embed_tokens
    delta = layer.trainable_tokens_delta
    delta.set_value(delta * 0 + paddle.arange(2, dtype="float32").unsqueeze(1).astype(delta.dtype))
    hidden = paddle.eye(layer.weight.shape[1])
    (inner, selection) = layer.logit_updates(hidden)[0]
    table = layer.weight.astype("float32") + paddle.matmul(selection, inner, transpose_y=True)
    expected = layer.base.weight.astype("float32").numpy()
    expected[[3, 5]] = [[0.0], [1.0]]
    np.testing.assert_allclose(table.numpy(), expected, atol=1e-6)
    (table * 2).sum().backward()
    np.testing.assert_array_equal(delta.grad.astype("float32").numpy(), 2.0)
