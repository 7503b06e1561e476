"""Models, losses and comparisons for tests against stored results of Hugging Face PEFT and pyreft.

A golden file is an .npz written by a script of tests/golden/generators. It contains `logits` and `loss` for the inputs
of `model_cases.make_inputs`, and tensors by kind and name: `gradient:<name>`, `merged:<name>` (full weights of the base
after merging), `trained:<name>` (after some AdamW steps), and results of single methods.

`base` is the name of a model of tests/golden/cases/model_cases.py.
Shapes: B batch, S sequence, V vocabulary, T = B * S, D hidden.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
from safetensors import safe_open

from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.trainer.optimizers.build_optimizer import build_optimizer
from tests.common.golden import set_golden_weights
from tests.golden.cases.model_cases import CASES as MODELS
from tests.golden.cases.model_cases import make_inputs

TOLERANCE = 1e-5


# -- models, losses and training ------------------------------------------------------------------------------------
def base_model(base: str) -> CausalLM:
    """Build the base model of a golden file, without an adapter."""
    model = CausalLM(DecoderConfig.from_dict(MODELS[base]))
    set_golden_weights(model, base)
    return model


def golden_of(folder: Path) -> dict[str, np.ndarray]:
    """Load the golden file in an adapter's folder."""
    return dict(np.load(folder / "golden.npz"))


def part_of(golden: Mapping[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    """Return the tensors of a kind (`gradient`, `merged`, ...) by name."""
    return {name.removeprefix(f"{kind}:"): value for name, value in golden.items() if name.startswith(f"{kind}:")}


def ids_of(base: str) -> paddle.Tensor:
    """Return the golden files' input_ids, [B, S]."""
    return paddle.to_tensor(make_inputs(base)[0])


def mean_loss(model: PeftModel, input_ids: np.ndarray, labels: np.ndarray, **inputs: Any) -> paddle.Tensor:
    """Return the mean loss over the labels [B, S] that are not -100, plus that of routers, with its graph."""
    hidden_TD = model.hidden_states(paddle.to_tensor(input_ids), **inputs).flatten(0, 1)
    loss_sum, _ = model.cross_entropy(hidden_TD, paddle.to_tensor(labels.flatten()))
    balance = model.load_balance
    return loss_sum / int((labels != -100).sum()) + (0.0 if balance is None or balance.loss is None else balance.loss)


def loss_of(model: PeftModel, base: str, **inputs: Any) -> paddle.Tensor:
    """Return the mean loss for the inputs of the golden files."""
    return mean_loss(model, *make_inputs(base), **inputs)


def adamw(model: PeftModel, learning_rate: float, weight_decay: float, epsilon: float) -> paddle.optimizer.AdamW:
    """Build the package's AdamW with PyTorch's default betas."""
    options = SimpleNamespace(optim="adamw", learning_rate=learning_rate, weight_decay=weight_decay)
    options.adam_beta1, options.adam_beta2, options.adam_epsilon = 0.9, 0.999, epsilon
    return build_optimizer(model, options)


def take_steps(optimizer: paddle.optimizer.AdamW, steps: int, loss: Callable[[], paddle.Tensor]) -> None:
    """Take optimizer steps on one loss function."""
    for _ in range(steps):
        loss().backward()
        optimizer.step()
        optimizer.clear_grad()


# -- comparisons ----------------------------------------------------------------------------------------------------
def close(ours: paddle.Tensor, golden: np.ndarray, name: str = "") -> None:
    """Assert equality within the absolute tolerance TOLERANCE."""
    np.testing.assert_allclose(ours.numpy(), golden, rtol=0, atol=TOLERANCE, err_msg=name)


def check_tensors(ours: Mapping[str, paddle.Tensor], expected: Mapping[str, np.ndarray]) -> None:
    """Assert equal names and close values."""
    assert ours.keys() == expected.keys(), f"names in only one of both: {sorted(ours.keys() ^ expected.keys())}"
    for name, tensor in ours.items():
        close(tensor, expected[name], name)


def check_gradients(ours: Mapping[str, paddle.Tensor], expected: Mapping[str, np.ndarray]) -> None:
    """Assert that the tensors' gradients have the expected names and values."""
    check_tensors({name: tensor.grad for name, tensor in ours.items()}, expected)


def check_loss_and_backward(model: PeftModel, base: str, golden: Mapping[str, np.ndarray], **inputs: Any) -> None:
    """Assert that the loss is the golden one, and run its backward pass."""
    loss = loss_of(model, base, **inputs)
    np.testing.assert_allclose(float(loss), golden["loss"], rtol=1e-6)
    loss.backward()


def check_merged(model: PeftModel, base: str, golden: Mapping[str, np.ndarray], logits: np.ndarray) -> None:
    """Merge the adapter; assert unchanged `logits` [B, S, V] and the golden merged weights."""
    merged = model.merge_and_unload()
    close(merged(ids_of(base)), logits)
    state, expected = merged.state_dict(), part_of(golden, "merged")
    assert expected, "the golden file has no merged weight"
    for name, weight in expected.items():
        close(merged.config.file_layout.to_transformers(name, state[name]), weight, name)


def check_same_tensors(written: Path, theirs: Path, but: Collection[str] = ()) -> set[str]:
    """Assert that two folders have tensors with equal keys, except those in `but`, and bytes; return the keys."""
    with (
        safe_open(theirs / "adapter_model.safetensors", "np") as expected,
        safe_open(written / "adapter_model.safetensors", "np") as file,
    ):
        keys = sorted(set(expected.keys()) - set(but))
        assert sorted(file.keys()) == keys, f"{sorted(file.keys())} is not {keys}"
        for key in keys:
            assert np.array_equal(file.get_tensor(key), expected.get_tensor(key)), key
        return set(file.keys())


def check_config_fields(
    written: Path, theirs: Path, but: Collection[str] = ("target_modules",)
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Assert that `written` has only fields of `theirs`, with equal values except in `but`; return both configs."""
    ours, expected = (json.loads((folder / "adapter_config.json").read_text()) for folder in (written, theirs))
    assert ours.keys() <= expected.keys(), f"not a field of PEFT: {sorted(ours.keys() - expected.keys())}"
    for field in ours.keys() - set(but):
        assert ours[field] == expected[field], f"{field}: {ours[field]!r} is not {expected[field]!r}"
    return ours, expected
