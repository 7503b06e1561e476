"""Each type of adapter that Hugging Face PEFT has: read, trained, merged and written as docs/adapters.md says.

The table of docs/adapters.md and the sentence of docs/features.md follow from the registry and PEFT's golden adapters.
Write the table again with `python -m tests.peft.test_peft_types`.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.trainer.optimizers.parameter_groups import trainable_parameters
from tests.common.adapters import tiny_model
from tests.golden import DATA
from tests.peft.methods import golden_checks as shared

ROOT = Path(__file__).parents[2]
PAGE, FEATURES = ROOT / "docs" / "adapters.md", ROOT / "docs" / "features.md"
PEFT = json.loads((DATA / "peft_types.json").read_text())
BEGIN, END = "<!-- types of PEFT: python -m tests.peft.test_peft_types -->\n", "<!-- end of types -->\n"
REMARKS = {
    "BOFT": "in PEFT, several butterfly factors need the CUDA extension",
    "LORA": "also DoRA, rsLoRA, PiSSA, OLoRA and trained token rows; plain LoRA also on `lm_head`, the embedding, "
    "experts and routers",
    "MULTITASK_PROMPT_TUNING": "for encoder-decoder models",
    "P_TUNING": "cannot be merged: the method adds inputs",
    "PREFIX_TUNING": "cannot be merged: the method adds keys and values",
    "PROMPT_TUNING": "cannot be merged: the method adds inputs",
}


def bases() -> dict[str, str]:
    """Return the base model of each golden adapter, by the name of its case.

    Adapters of fused layers are left out: they are written in another form, with the same update.
    """
    modules = [path.stem for path in (DATA.parent / "cases").glob("*_cases.py") if path.stem != "fused_cases"]
    cases = {}
    for module in modules:
        content = getattr(importlib.import_module(f"tests.golden.cases.{module}"), "CASES", {})
        if isinstance(content, dict):
            cases |= {name: case["base"] for name, case in content.items() if "base" in case}
    return cases


def examples() -> dict[str, tuple[Path, str]]:
    """Return a folder that PEFT wrote, and its base model, for each type with golden files."""
    known, found = bases(), {}
    for file in sorted(DATA.glob("*/**/adapter_config.json")):
        kind = json.loads(file.read_text())["peft_type"]
        case = next((name for name in (file.parent.name, file.parents[1].name) if name in known), None)
        if case is not None and kind in PEFT["types"]:
            found.setdefault(kind, (file.parent, known[case]))
    return found


EXAMPLES = examples()
METHODS = {method.peft_type: method for _, method in PEFT_METHODS.items() if not method.refines}
AVAILABLE = [kind for kind in PEFT["types"] if kind in METHODS]


def table() -> str:
    """Return the table of all types."""
    lines = [
        f"| type of PEFT {PEFT['version']} | read, trained, written | merged | remark |",
        "| --- | --- | --- | --- |",
    ]
    for kind in PEFT["types"]:
        method = METHODS.get(kind)
        available, merged = "no" if method is None else "yes", "yes" if method and method.mergeable else "no"
        lines.append(f"| `{kind}` | {available} | {merged} | {REMARKS.get(kind, '')} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def renew(page: str) -> str:
    """Return the page with the current table."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


def test_adapters_page_has_the_current_table():
    page = PAGE.read_text(encoding="utf-8")
    assert renew(page) == page, "run: python -m tests.peft.test_peft_types"


def test_features_page_counts_the_available_types():
    (said,) = re.findall(
        r"(\d+) of PEFT's (\d+) adapter types can be loaded, trained and saved", FEATURES.read_text(encoding="utf-8")
    )
    assert said == (str(len(AVAILABLE)), str(len(PEFT["types"])))


def test_every_available_type_has_an_adapter_of_peft():
    assert EXAMPLES.keys() == set(AVAILABLE)


@pytest.mark.parametrize("kind", AVAILABLE)
def test_available_type_is_read_written_trained_and_merged(kind: str, tmp_path: Path):
    theirs, base = EXAMPLES[kind]
    model = PeftModel.from_pretrained(shared.base_model(base), theirs)
    model.save_pretrained(tmp_path / "again")
    shared.check_same_tensors(tmp_path / "again", theirs)
    parameters = trainable_parameters(model)
    before = {name: parameter.numpy().copy() for name, parameter in parameters.items()}
    every_token = np.arange(model.config.vocab_size // 4 * 4).reshape(4, -1)  # some types train some tokens only
    optimizer = shared.adamw(model.train(), 1e-3, 0.0, 1e-6)
    shared.take_steps(optimizer, 1, lambda: shared.mean_loss(model, every_token, np.roll(every_token, 1)))
    assert before and any(not np.array_equal(before[name], tensor.numpy()) for name, tensor in parameters.items())
    model.eval()
    input_ids = shared.ids_of(base)
    logits = model(input_ids).numpy()
    if METHODS[kind].mergeable:
        np.testing.assert_allclose(model.merge_and_unload()(input_ids).numpy(), logits, atol=1e-4)
    else:
        with pytest.raises(ValueError, match="cannot be merged"):
            model.merge_and_unload()


@pytest.mark.parametrize("kind", [kind for kind in PEFT["types"] if kind not in METHODS])
def test_other_type_is_refused_by_name(kind: str, tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": kind}))
    with pytest.raises(ValueError, match=f"peft_type '{kind}' is not available; known: "):
        PeftModel.from_pretrained(tiny_model(), tmp_path)


if __name__ == "__main__":
    PAGE.write_text(renew(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
