"""Compare LoRA over a resized vocabulary with Hugging Face PEFT (tests/golden/generators/make_peft_golden.py).

PEFT does not record the number of rows, but stores both tables.
"""

from __future__ import annotations

from pathlib import Path

import paddle
import pytest

from paddlenlp_ext.checkpoint.config_json import read_model_config
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.formats.read_adapter import read_adapter
from paddlenlp_ext.peft.merge.merge_adapter import merge_adapter
from paddlenlp_ext.peft.peft_model import PeftModel
from tests.golden import DATA
from tests.golden.cases.model_cases import make_inputs
from tests.golden.cases.peft_cases import RESIZED_CASES, resized_inputs
from tests.peft.methods import golden_checks as shared

pytestmark = pytest.mark.parametrize("case", RESIZED_CASES)


def load(case: str, folder: Path) -> PeftModel:
    """Load PEFT's adapter over its base, which is saved to `folder` with 96 rows."""
    base, stored = shared.base_model(RESIZED_CASES[case]["base"]), read_adapter(DATA / "adapters" / case)
    base.save_pretrained(folder)
    overrides = stored.base_overrides(read_model_config(folder))
    assert overrides == {"vocab_size": RESIZED_CASES[case]["num_rows"]}
    return PeftModel.from_files(AutoModelForCausalLM.from_pretrained(folder, config_overrides=overrides), stored)


def test_lora_of_peft_over_resized_vocabulary_gives_its_logits_and_gradients(case: str, tmp_path: Path):
    golden, model = shared.golden_of(DATA / "adapters" / case), load(case, tmp_path / "base")
    inputs, num_rows = make_inputs(RESIZED_CASES[case]["base"]), RESIZED_CASES[case]["num_rows"]
    input_ids, labels = (resized_inputs(array, num_rows) for array in inputs)
    shared.close(model(paddle.to_tensor(input_ids)), golden["logits"])
    shared.mean_loss(model, input_ids, labels).backward()
    trained = {name: tensor for name, tensor in model.adapter_state().items() if not tensor.stop_gradient}
    shared.check_gradients(trained, shared.part_of(golden, "gradient"))


def test_lora_of_peft_over_resized_vocabulary_round_trips_and_merges(case: str, tmp_path: Path):
    theirs, model = DATA / "adapters" / case, load(case, tmp_path / "base")
    model.save_pretrained(tmp_path / "again")
    shared.check_same_tensors(tmp_path / "again", theirs)
    merge_adapter(theirs, tmp_path / "merged", AutoModelForCausalLM.from_pretrained, base=tmp_path / "base")
    inputs = resized_inputs(make_inputs(RESIZED_CASES[case]["base"])[0], RESIZED_CASES[case]["num_rows"])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    shared.close(merged(paddle.to_tensor(inputs)), shared.golden_of(theirs)["logits"])
