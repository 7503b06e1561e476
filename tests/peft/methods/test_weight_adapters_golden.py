"""Compare adapters that change weights with Hugging Face PEFT.

The golden files are written by tests/golden/generators/make_weight_adapter_golden.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest

from paddlenlp_ext.peft.peft_model import PeftModel
from tests.golden import DATA
from tests.golden.cases.weight_adapter_cases import CASES, EPSILON, LEARNING_RATE, STEPS, WEIGHT_DECAY
from tests.peft.methods import golden_checks as shared

pytestmark = pytest.mark.parametrize("case", CASES)


def load(case: str) -> PeftModel:
    return PeftModel.from_pretrained(shared.base_model(CASES[case]["base"]), DATA / "adapters" / case)


def trained(model: PeftModel) -> dict[str, paddle.Tensor]:
    """Return the adapter's tensors without the positions of SHiRA."""
    return {name: tensor for name, tensor in model.adapter_state().items() if not tensor.stop_gradient}


def test_weight_adapter_peft_adapter_gives_peft_logits_and_gradients(case: str):
    golden, model, base = shared.golden_of(DATA / "adapters" / case), load(case), CASES[case]["base"]
    shared.close(model(shared.ids_of(base)), golden["logits"])
    shared.check_loss_and_backward(model, base, golden)
    shared.check_gradients(trained(model), shared.part_of(golden, "gradient"))


def test_weight_adapter_merged_weights_and_biases_equal_peft(case: str):
    golden, model, base = shared.golden_of(DATA / "adapters" / case), load(case), CASES[case]["base"]
    before = {name: parameter.numpy() for name, parameter in shared.base_model(base).named_parameters()}
    merged = dict(model.merge_and_unload().named_parameters())
    changed = {
        name for name in before if ".layers.0." not in name and not np.array_equal(merged[name].numpy(), before[name])
    }
    assert changed
    shared.check_tensors({name: merged[name] for name in changed}, shared.part_of(golden, "merged"))
    shared.close(merged_logits := model.base_model(shared.ids_of(base)), golden["logits"])
    assert merged_logits.shape[-1] == 96


def test_weight_adapter_adamw_steps_give_peft_weights(case: str):
    golden, model = shared.golden_of(DATA / "adapters" / case), load(case).train()
    model.peft_config.decays = lambda name: True  # the golden steps decay every parameter
    optimizer = shared.adamw(model, LEARNING_RATE, CASES[case].get("weight_decay", WEIGHT_DECAY), EPSILON)
    shared.take_steps(optimizer, STEPS, lambda: shared.loss_of(model, CASES[case]["base"]))
    shared.check_tensors(trained(model), shared.part_of(golden, "trained"))


def test_weight_adapter_peft_adapter_round_trips(case: str, tmp_path: Path):
    """Compare keys, bytes of tensors and fields of the config with PEFT's files."""
    theirs = DATA / "adapters" / case
    load(case).save_pretrained(tmp_path)
    shared.check_same_tensors(tmp_path, theirs, but=CASES[case].get("second_copies", ()))
    lists = "feedforward_modules"  # of IA3; in any order
    written, expected = shared.check_config_fields(tmp_path, theirs, but=("target_modules", "peft_version", lists))
    if lists in written:
        assert sorted(written[lists]) == sorted(expected[lists])
