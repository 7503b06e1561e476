"""Adapters made by Hugging Face PEFT give the same numbers here (tests/golden/make_peft_golden.py)."""

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
from paddlenlp_ext.peft.base import PeftModel
from paddlenlp_ext.train.optim import build_optimizer, trainable_parameters

GOLDEN = Path(__file__).parents[1] / "golden"
sys.path.insert(0, str(GOLDEN))
from model_cases import CASES as MODELS  # noqa: E402
from model_cases import make_inputs, make_weight  # noqa: E402
from peft_cases import CASES, EPSILON, LEARNING_RATE, STEPS, WEIGHT_DECAY  # noqa: E402

TOLERANCE = 1e-5


def load(case: str) -> PeftModel:
    base = CASES[case]["base"]
    model = CausalLM(DecoderConfig.from_dict(MODELS[base]))
    for name, parameter in model.named_parameters():
        parameter.set_value(make_weight(base, name, tuple(parameter.shape)))
    return PeftModel.from_pretrained(model, GOLDEN / "adapters" / case)


def loss_of(model: PeftModel, case: str) -> paddle.Tensor:
    input_ids, labels = (paddle.to_tensor(array) for array in make_inputs(CASES[case]["base"]))
    loss_sum, _ = linear_cross_entropy(
        model.hidden_states(input_ids).flatten(0, 1), model.head_weight(), labels.flatten()
    )
    return loss_sum / int((labels != -100).sum())


def close(ours: paddle.Tensor, golden: np.ndarray, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(ours.numpy(), golden, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_logits_gradients_and_merged_weights(case: str):
    golden = np.load(GOLDEN / "adapters" / case / "golden.npz")
    model = load(case)
    input_ids = paddle.to_tensor(make_inputs(CASES[case]["base"])[0])
    logits = model(input_ids)
    close(logits, golden["logits"])
    loss = loss_of(model, case)
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
def test_weights_after_some_steps_of_adamw_and_lora_plus(case: str):
    golden = np.load(GOLDEN / "adapters" / case / "golden.npz")
    model = load(case).train()
    model.peft_config.plus_scale = CASES[case]["plus_ratio"]
    options = SimpleNamespace(
        optim="adamw",
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=EPSILON,
    )
    optimizer = build_optimizer(model, options)
    assert len(trainable_parameters(model)) == len(model.adapter_state())
    for _ in range(STEPS):
        loss_of(model, case).backward()
        optimizer.step()
        optimizer.clear_grad()
    for name, tensor in model.adapter_state().items():
        close(tensor, golden[f"trained:{name}"])


@pytest.mark.parametrize("case", CASES)
def test_saved_again_it_reads_as_pefts_own(case: str, tmp_path: Path):
    """Same keys, same bytes of tensors, and no field that PEFT does not write."""
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
