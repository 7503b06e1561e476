"""LoKr, LoHa, IA3 and OFT adapters of Hugging Face PEFT give the same numbers here.

The files are made by tests/golden/make_weight_adapter_golden.py.
"""

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
from paddlenlp_ext.train.optim import build_optimizer

GOLDEN = Path(__file__).parents[1] / "golden"
sys.path.insert(0, str(GOLDEN))
from model_cases import CASES as MODELS  # noqa: E402
from model_cases import make_inputs, make_weight  # noqa: E402
from weight_adapter_cases import CASES, EPSILON, LEARNING_RATE, STEPS, WEIGHT_DECAY  # noqa: E402

TOLERANCE = 1e-5
pytestmark = pytest.mark.parametrize("case", CASES)


def base_model(case: str) -> CausalLM:
    base = CASES[case]["base"]
    model = CausalLM(DecoderConfig.from_dict(MODELS[base]))
    for name, parameter in model.named_parameters():
        parameter.set_value(make_weight(base, name, tuple(parameter.shape)))
    return model


def load(case: str) -> PeftModel:
    return PeftModel.from_pretrained(base_model(case), GOLDEN / "adapters" / case)


def golden_of(case: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / "adapters" / case / "golden.npz"))


def loss_of(model: PeftModel, case: str) -> paddle.Tensor:
    input_ids, labels = (paddle.to_tensor(array) for array in make_inputs(CASES[case]["base"]))
    hidden_TD = model.hidden_states(input_ids).flatten(0, 1)
    loss_sum, _ = linear_cross_entropy(hidden_TD, model.head_weight(), labels.flatten())
    return loss_sum / int((labels != -100).sum())


def close(ours: paddle.Tensor, golden: np.ndarray, what: str = "") -> None:
    np.testing.assert_allclose(ours.numpy(), golden, rtol=0, atol=TOLERANCE, err_msg=what)


def test_logits_and_gradients(case: str):
    golden, model = golden_of(case), load(case)
    close(model(paddle.to_tensor(make_inputs(CASES[case]["base"])[0])), golden["logits"])
    loss = loss_of(model, case)
    np.testing.assert_allclose(float(loss), golden["loss"], rtol=1e-6)
    loss.backward()
    assert model.adapter_state().keys() == {name[9:] for name in golden if name.startswith("gradient:")}
    for name, tensor in model.adapter_state().items():
        close(tensor.grad, golden[f"gradient:{name}"], name)


def test_merged_weights_and_biases(case: str):
    golden, model = golden_of(case), load(case)
    before = {name: parameter.numpy() for name, parameter in base_model(case).named_parameters()}
    merged = dict(model.merge_and_unload().named_parameters())
    changed = {
        name for name in before if ".layers.1." in name and not np.array_equal(merged[name].numpy(), before[name])
    }
    assert changed == {name[7:] for name in golden if name.startswith("merged:")}
    assert changed
    for name in changed:
        close(merged[name], golden[f"merged:{name}"], name)
    close(merged_logits := model.base_model(paddle.to_tensor(make_inputs(CASES[case]["base"])[0])), golden["logits"])
    assert merged_logits.shape[-1] == 96


def test_weights_after_some_steps_of_adamw(case: str):
    golden, model = golden_of(case), load(case).train()
    options = SimpleNamespace(
        optim="adamw",
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=EPSILON,
    )
    model.peft_config.decays = lambda name: True  # PyTorch's AdamW decayed IA3's scales too
    optimizer = build_optimizer(model, options)
    for _ in range(STEPS):
        loss_of(model, case).backward()
        optimizer.step()
        optimizer.clear_grad()
    for name, tensor in model.adapter_state().items():
        close(tensor, golden[f"trained:{name}"], name)


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
    for field in ours.keys() - {"target_modules", "peft_version"}:
        written, wanted = ours[field], golden[field]
        assert sorted(written) == sorted(wanted) if isinstance(written, list) else written == wanted, field
