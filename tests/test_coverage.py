"""docs/coverage.md: every item names an existing test, or the plan that brings it; the counts are those of its rows."""

from __future__ import annotations

import ast
import re
from functools import cache

from tests.common.scripts import ROOT

STATES = ("works", "partly", "differs", "planned")
PAGE = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in PAGE.splitlines()
    if re.match(r"\| \d+ \|", line)
]


def kind_of(state: str) -> str:
    """Return the first word of a state, such as "partly" for "partly: not run on a GPU"."""
    return re.split(r"[,:;]", state)[0]


@cache
def functions(file: str) -> set[str]:
    """Return the names of a test file's functions."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def problem(state: str, test: str) -> str | None:
    """Return what is wrong with a row, or None."""
    kind = kind_of(state)
    if kind not in STATES:
        return f"state {state!r}"
    file, _, name = test.strip("`").partition("::")
    if kind == "planned":
        return "a planned item has no test yet" if test else None
    return None if name in functions(file) else f"no such test: {test}"


def test_coverage_rows_name_a_state_and_an_existing_test():
    found = {number: problem(state, test) for number, _, state, test in ROWS}
    assert {number: what for number, what in found.items() if what is not None} == {}


def test_coverage_counts_are_those_of_the_rows():
    assert [int(row[0]) for row in ROWS] == list(range(1, len(ROWS) + 1))
    counted = {kind: sum(kind_of(row[2]) == kind for row in ROWS) for kind in STATES}
    stated = re.search(r"(\d+) items: (\d+) work, (\d+) work partly, (\d+) differ, (\d+) are planned", PAGE)
    assert stated is not None
    assert [int(group) for group in stated.groups()] == [len(ROWS), *counted.values()]
