"""Forward pass `model(input_ids, attention_mask, labels)` of plain and adapted models."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.generation.padded_kv_cache import KVCache
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.prefix_tuning import PrefixTuningConfig
from paddlenlp_ext.peft.methods.prompt_tuning import PromptTuningConfig
from paddlenlp_ext.peft.methods.reft import ReFTConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from tests.common.adapters import tiny_model, train

ROWS = [[5, 3, 8, 1, 9, 4, 7], [2, 6, 6], [11, 12, 13, 14, 15]]
CONFIGS = {
    "plain": None,
    "lora": LoRAConfig(rank=2),
    "prefix": PrefixTuningConfig(num_tokens=3),
    "prompt": PromptTuningConfig(num_tokens=3),
    "reft": ReFTConfig(position="f1+l1"),
}


def model_with(kind: str) -> Any:
    model = tiny_model()
    if CONFIGS[kind] is not None:
        model = get_peft_model(model, CONFIGS[kind])
        train(model, steps=2)
        model.eval()
    return model


def padded(side: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows padded to 9 positions, and their mask."""
    ids, mask = np.full((len(ROWS), 9), 60), np.zeros((len(ROWS), 9), np.int64)
    for number, row in enumerate(ROWS):
        start = {"left": 9 - len(row), "right": 0, "both": 1}[side]
        ids[number, start : start + len(row)] = row
        mask[number, start : start + len(row)] = 1
    return ids, mask


def sum_cross_entropy(logits_SV: np.ndarray, labels_S: np.ndarray) -> tuple[float, int]:
    """Return the sum of losses over the shifted labels that are not -100, and their number."""
    logits, targets = logits_SV[:-1].astype(np.float64), labels_S[1:]
    log_sums = np.log(np.exp(logits).sum(axis=-1))
    losses = [log_sums[i] - logits[i, target] for i, target in enumerate(targets) if target != -100]
    return float(np.sum(losses)), len(losses)


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("kind", CONFIGS)
@paddle.no_grad()
def test_forward_padded_rows_match_single_rows(kind: str, side: str):
    model = model_with(kind)
    ids, mask = padded(side)
    logits = model(paddle.to_tensor(ids), paddle.to_tensor(mask)).numpy()
    for number, row in enumerate(ROWS):
        single = model(paddle.to_tensor([row])).numpy()[0]

        np.testing.assert_allclose(logits[number][mask[number] == 1], single, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["int64", "bool", "float32"])
@paddle.no_grad()
def test_forward_attention_mask_of_ones_changes_nothing(dtype: str):
    model, ids = tiny_model(), paddle.to_tensor([ROWS[0]])
    assert np.array_equal(model(ids, paddle.ones([1, 7], dtype)).numpy(), model(ids).numpy())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["plain", "lora", "prompt"])
def test_forward_labels_give_mean_loss_of_shifted_target_tokens(kind: str, side: str):
    model = model_with(kind)
    ids, mask = padded(side)
    labels = np.where(mask == 1, ids, -100)
    labels[0, np.flatnonzero(mask[0])[:3]] = -100  # prompt tokens
    output = model(paddle.to_tensor(ids), attention_mask=paddle.to_tensor(mask), labels=paddle.to_tensor(labels))
    sums = []
    for number, row in enumerate(ROWS):
        single = model(paddle.to_tensor([row])).numpy()[0]
        sums.append(sum_cross_entropy(single, labels[number][mask[number] == 1]))
    expected = sum(loss for loss, _ in sums) / sum(count for _, count in sums)
    assert float(output.loss) == pytest.approx(expected, abs=1e-5)
    assert output.loss.shape == [] and output.logits.shape == [3, 9, 61]


@paddle.no_grad()
def test_forward_accepts_numpy_arrays():
    model = tiny_model()
    ids, mask = padded("left")
    tensors = model(*map(paddle.to_tensor, (ids, mask, ids)))
    arrays = model(input_ids=ids, attention_mask=mask, labels=ids)
    assert float(arrays) == float(tensors) and np.array_equal(arrays.logits.numpy(), tensors.logits.numpy())


def test_forward_labels_do_not_cross_documents():
    model = tiny_model()
    ids = paddle.to_tensor([ROWS[0] + ROWS[2]])
    together = model(ids, labels=ids, document_lengths=[[7, 5]])
    sums = []
    for row in (ROWS[0], ROWS[2]):
        sums.append(sum_cross_entropy(model(paddle.to_tensor([row])).numpy()[0], np.array(row)))
    assert float(together) == pytest.approx(sum(loss for loss, _ in sums) / sum(count for _, count in sums), abs=1e-5)


def test_forward_output_unpacks_indexes_and_acts_as_the_loss():
    model, ids = model_with("lora"), paddle.to_tensor([ROWS[0]])
    output = model(ids, labels=ids)
    loss, logits = output
    assert loss is output.loss is output[0] is output["loss"]
    assert logits is output.logits is output[1] is output["logits"]
    assert np.array_equal(logits.numpy(), model(ids).numpy())
    assert float(output) == output.item() == float(loss)
    assert float(output / 2) == float(2 * output) / 4 == float(output * 0.5)
    assert float(sum([output, output])) == float(loss + loss)
    output.backward()
    gradients = [p.grad is not None for name, p in model.named_parameters() if "lora_" in name]
    assert gradients and all(gradients)
    with pytest.raises(AttributeError):
        output.hidden_states_of_nothing  # noqa: B018
    with pytest.raises(IndexError):
        output[2]


def test_forward_reft_takes_prompt_lengths_from_labels():
    """Compare labels of a three-token prompt with its explicit length; ReFT changes its first and last position."""
    model, ids = model_with("reft"), paddle.to_tensor([ROWS[0]])
    labels = paddle.to_tensor([[-100, -100, -100, *ROWS[0][3:]]])
    by_labels = model(ids, labels=labels)
    np.testing.assert_array_equal(by_labels.logits.numpy(), model(ids, prompt_lengths=[[3]]).numpy())
    assert not np.array_equal(by_labels.logits.numpy(), model(ids).numpy())


def test_forward_invalid_inputs_raise():
    model, ids = tiny_model(), paddle.to_tensor([ROWS[0]])
    with pytest.raises(ValueError, match="row 0 has padding between tokens"):
        model(ids, paddle.to_tensor([[1, 1, 0, 1, 1, 1, 1]]))
    with pytest.raises(ValueError, match="attention_mask has shape"):
        model(ids, paddle.ones([1, 1, 7, 7]))
    with pytest.raises(ValueError, match="labels have shape"):
        model(ids, labels=ids[:, 1:])
    for other in ({"document_lengths": [[7]]}, {"cache": KVCache([0])}):
        with pytest.raises(ValueError, match="pass only one of the three"):
            model(ids, paddle.ones([1, 7]), **other)


@paddle.no_grad()
def test_forward_row_of_padding_only_stays_finite():
    model = tiny_model()
    mask = paddle.to_tensor([[1, 1, 1], [0, 0, 0]])
    assert np.isfinite(model(paddle.to_tensor([[1, 2, 3], [0, 0, 0]]), mask).numpy()).all()
