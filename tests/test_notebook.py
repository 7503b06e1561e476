"""The notebook of examples/ is valid, has no stored outputs, and runs with a tiny model in place of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from paddlenlp_ext.data.readers.inflection import read_inflection
from tests.common.models import write_stand_ins
from tests.common.scripts import ROOT

NOTEBOOK = ROOT / "examples" / "first_lora.ipynb"
FIELDS = {
    "markdown": {"cell_type", "id", "metadata", "source"},
    "code": {"cell_type", "id", "metadata", "source", "execution_count", "outputs"},
}
"""Required fields of a cell in version 4.5 of the format, by its type."""


@pytest.fixture(scope="module")
def notebook() -> dict[str, Any]:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def code_cells(notebook: dict[str, Any]) -> dict[str, str]:
    """Return the text of each code cell by its id."""
    return {cell["id"]: "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"}


def test_notebook_cells_have_the_fields_of_the_format(notebook):
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert all(cell.keys() == FIELDS[cell["cell_type"]] for cell in notebook["cells"])
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[\w-]{1,64}", name) for name in ids)


def test_notebook_has_one_source_line_per_line_of_the_file(notebook):
    for cell in notebook["cells"]:
        assert cell["source"] == "".join(cell["source"]).splitlines(keepends=True), cell["id"]


def test_notebook_stores_no_outputs(notebook):
    """Outputs of a run name folders of the machine."""
    stored = [cell["id"] for cell in notebook["cells"] if cell.get("outputs") or cell.get("execution_count")]
    assert not stored, "clear all outputs before saving"


def test_notebook_ends_with_the_table(notebook):
    assert list(code_cells(notebook))[-1] == "table"


def test_notebook_links_to_files_that_exist(notebook):
    text = "".join(line for cell in notebook["cells"] if cell["cell_type"] == "markdown" for line in cell["source"])
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    assert links and not [link for link in links if not (NOTEBOOK.parent / link).is_file()]


def test_notebook_asks_questions_that_it_does_not_train_on(notebook):
    asked = dict(re.findall(r"'(What is .*)': \"(\w+)\"", code_cells(notebook)["answers-before"]))
    held_out = {row.value["src"]: row.value["tgt"] for row in read_inflection("dev")}
    assert len(asked) == 3 and asked.items() <= held_out.items()


@pytest.mark.layouts
def test_notebook_runs_from_the_first_cell_to_the_table(notebook, tmp_path, monkeypatch, capsys):
    from matplotlib import pyplot

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    pyplot.switch_backend("agg")
    replacements = write_stand_ins(tmp_path / "stand_ins") | {'(?<="max_steps": )45': "3"}
    names: dict[str, Any] = {"__name__": "__main__"}
    for name, text in code_cells(notebook).items():
        for pattern, new in replacements.items():
            text = re.sub(pattern, new, text)
        exec(compile(text, name, "exec"), names)

    assert [x for x, _ in names["run"].series("loss")] == [1, 2, 3]
    assert list(names["axes"].lines[0].get_xdata()) == [1, 2, 3]
    pyplot.close("all")
    assert Path("checkpoints/notebook-merged/model.safetensors").is_file()
    printed = capsys.readouterr().out
    assert "Completed: 3 steps" in printed
    table = printed[printed.index("Answers before and after training") :]
    assert all(question in table for question in names["questions"])
    assert all(answer in table for answer in names["questions"].values())
