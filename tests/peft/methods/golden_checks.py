"""What the tests against stored results of Hugging Face PEFT and pyreft share: their models, losses and comparisons.

A golden file is an .npz made by a script of tests/golden/generators. It holds `logits` and `loss` of the inputs that
`model_cases.make_inputs` makes, and tensors by kind and name: `gradient:<name>`, `merged:<name>` (whole weights of the
base after merging), `trained:<name>` (after some steps of AdamW), and what one method alone has.

`base` names a model of tests/golden/cases/model_cases.py.
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

from paddlenlp_ext.models.config import DecoderConfig
from paddlenlp_ext.models.decoder import CausalLM
from paddlenlp_ext.ops.linear_cross_entropy import linear_cross_entropy
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.trainer.optimizer import build_optimizer
from tests.golden.cases.model_cases import CASES as MODELS
from tests.golden.cases.model_cases import make_inputs, make_weight

TOLERANCE = 1e-5


# -- models and what they compute -----------------------------------------------------------------------------------
def base_model(base: str) -> CausalLM:
    """The model that the scripts built, before any adapter."""
    model = CausalLM(DecoderConfig.from_dict(MODELS[base]))
    for name, parameter in model.named_parameters():
        parameter.set_value(make_weight(base, name, tuple(parameter.shape)))
    return model


def golden_of(folder: Path) -> dict[str, np.ndarray]:
    """The golden file beside an adapter."""
    return dict(np.load(folder / "golden.npz"))


def part_of(golden: Mapping[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    """The tensors of a kind (`gradient`, `merged`, ...) by name."""
    return {name.removeprefix(f"{kind}:"): value for name, value in golden.items() if name.startswith(f"{kind}:")}


def ids_of(base: str) -> paddle.Tensor:
    """input_ids [B, S]."""
    return paddle.to_tensor(make_inputs(base)[0])


def mean_loss(model: PeftModel, input_ids: np.ndarray, labels: np.ndarray, **inputs: Any) -> paddle.Tensor:
    """The mean loss of the labels [B, S] that are not -100, for a backward pass."""
    hidden_TD = model.hidden_states(paddle.to_tensor(input_ids), **inputs).flatten(0, 1)
    loss_sum, _ = linear_cross_entropy(hidden_TD, model.head_weight(), paddle.to_tensor(labels.flatten()))
    return loss_sum / int((labels != -100).sum())


def loss_of(model: PeftModel, base: str, **inputs: Any) -> paddle.Tensor:
    """The loss of the golden files' own inputs."""
    return mean_loss(model, *make_inputs(base), **inputs)


def adamw(model: PeftModel, learning_rate: float, weight_decay: float, epsilon: float) -> paddle.optimizer.AdamW:
    """The package's optimizer with PyTorch's usual betas."""
    options = SimpleNamespace(optim="adamw", learning_rate=learning_rate, weight_decay=weight_decay)
    options.adam_beta1, options.adam_beta2, options.adam_epsilon = 0.9, 0.999, epsilon
    return build_optimizer(model, options)


def take_steps(optimizer: paddle.optimizer.AdamW, steps: int, loss: Callable[[], paddle.Tensor]) -> None:
    """Some steps down the same loss."""
    for _ in range(steps):
        loss().backward()
        optimizer.step()
        optimizer.clear_grad()


# -- comparisons ----------------------------------------------------------------------------------------------------
def close(ours: paddle.Tensor, golden: np.ndarray, name: str = "") -> None:
    """Equal up to TOLERANCE, in absolute terms."""
    np.testing.assert_allclose(ours.numpy(), golden, rtol=0, atol=TOLERANCE, err_msg=name)


def check_tensors(ours: Mapping[str, paddle.Tensor], expected: Mapping[str, np.ndarray]) -> None:
    """The same names, close values."""
    assert ours.keys() == expected.keys(), f"in one alone: {sorted(ours.keys() ^ expected.keys())}"
    for name, tensor in ours.items():
        close(tensor, expected[name], name)


def check_gradients(ours: Mapping[str, paddle.Tensor], expected: Mapping[str, np.ndarray]) -> None:
    """As `check_tensors`, of the tensors' gradients."""
    check_tensors({name: tensor.grad for name, tensor in ours.items()}, expected)


def check_loss_and_go_back(model: PeftModel, base: str, golden: Mapping[str, np.ndarray], **inputs: Any) -> None:
    """The loss is the golden one; the model has its gradients afterwards."""
    loss = loss_of(model, base, **inputs)
    np.testing.assert_allclose(float(loss), golden["loss"], rtol=1e-6)
    loss.backward()


def check_merged(model: PeftModel, base: str, golden: Mapping[str, np.ndarray], logits: np.ndarray) -> None:
    """Merged, the model still gives `logits` [B, S, V], and its weights are the golden ones. Uses the model up."""
    merged = model.merge_and_unload()
    close(merged(ids_of(base)), logits)
    state, expected = merged.state_dict(), part_of(golden, "merged")
    assert expected, "the golden file holds no merged weight"
    for name, weight in expected.items():
        close(state[name], weight, name)


def check_same_tensors(written: Path, theirs: Path) -> set[str]:
    """Two folders hold the same keys and the same bytes of tensors; returns the keys."""
    with (
        safe_open(theirs / "adapter_model.safetensors", "np") as expected,
        safe_open(written / "adapter_model.safetensors", "np") as file,
    ):
        assert sorted(file.keys()) == sorted(expected.keys()), f"{sorted(file.keys())} is not {sorted(expected.keys())}"
        for key in expected.keys():  # noqa: SIM118 (a safetensors file, not a dict)
            assert np.array_equal(file.get_tensor(key), expected.get_tensor(key)), key
        return set(file.keys())


def check_config_fields(
    written: Path, theirs: Path, but: Collection[str] = ("target_modules",)
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`written` has no field that `theirs` lacks, and the same values but in the fields named; returns both configs."""
    ours, expected = (json.loads((folder / "adapter_config.json").read_text()) for folder in (written, theirs))
    assert ours.keys() <= expected.keys(), f"not a field of PEFT: {sorted(ours.keys() - expected.keys())}"
    for field in ours.keys() - set(but):
        assert ours[field] == expected[field], f"{field}: {ours[field]!r} is not {expected[field]!r}"
    return ours, expected
