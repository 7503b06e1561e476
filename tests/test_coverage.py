"""docs/coverage.md: states agree with the markers of the named tests, and the counts are those of the rows.

| state | tests that a row names |
|---|---|
| works, partly, differs | tests that CI runs on a CPU: not marked `gpu`, and not skipped |
| built, not run on a GPU | a test marked `gpu`, or a test in Triton's interpreter or Paddle's inference of shapes |
| planned | none |
"""

from __future__ import annotations

import ast
import re
from functools import cache

from tests.common.scripts import ROOT

BUILT = "built, not run on a GPU"
STATES = ("works", BUILT, "partly", "differs", "planned")
PAGE = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in PAGE.splitlines()
    if re.match(r"\| \d+ \|", line)
]
WITHOUT_A_GPU = {"launched", "interpreted", "program"}
"""Fixtures that run kernels in Triton's interpreter, or append operators to a static program."""
NOT_RUN = {"gpu", "skip", "skipif", "xfail"}


def kind_of(state: str) -> str:
    """Return the kind of a state, such as "partly" for "partly: on the CPU"."""
    return BUILT if state.startswith(BUILT) else re.split(r"[,:;]", state)[0]


@cache
def evidence(file: str) -> dict[str, tuple[frozenset[str], frozenset[str]]]:
    """Return the marks and arguments of each function in a test file; marks of the module belong to all functions."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    assigned = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == "pytestmark" for target in node.targets)
    ]
    of_module = {mark for node in assigned for mark in re.findall(r"pytest\.mark\.(\w+)", ast.unparse(node))}
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            marks = re.findall(r"^pytest\.mark\.(\w+)", "\n".join(map(ast.unparse, node.decorator_list)), re.MULTILINE)
            found[node.name] = (frozenset({*marks, *of_module}), frozenset(arg.arg for arg in node.args.args))
    return found


def problem(state: str, tests: str) -> str | None:
    """Return the mistake in a row, or None."""
    kind, named = kind_of(state), re.findall(r"`([^`]+)`", tests)
    if kind not in STATES:
        return f"state {state!r}"
    if kind == "planned":
        return "a planned item has no test yet" if named else None
    if not named:
        return "names no test"
    is_shown = False
    for test in named:
        file, _, name = test.partition("::")
        if name not in evidence(file):
            return f"no such test: {test}"
        marks, arguments = evidence(file)[name]
        is_shown |= "gpu" in marks or bool(arguments & WITHOUT_A_GPU)
        if kind != BUILT and marks & NOT_RUN:
            return f"{kind}, but CI does not run {test} ({', '.join(sorted(marks & NOT_RUN))})"
    if kind == BUILT and not is_shown:
        return f"no test needs a GPU, or runs in the interpreter or the inference of shapes: {tests}"
    return None


def test_coverage_states_agree_with_the_markers_of_the_named_tests():
    found = {number: problem(state, tests) for number, _, state, tests in ROWS}
    assert {number: what for number, what in found.items() if what is not None} == {}


def test_problem_of_a_row_with_a_wrong_state_is_found():
    on_gpu = "`ops/gpu/test_on_gpu.py::test_op_on_gpu_gives_numbers_of_the_cpu`"
    on_cpu = "`data/test_packing.py::test_pack_in_order_is_next_fit`"
    assert problem(BUILT, f"{on_cpu}, {on_gpu}") is None and problem("works", on_cpu) is None
    assert "CI does not run" in (problem("works", f"{on_cpu}, {on_gpu}") or "")
    assert "no test needs a GPU" in (problem(BUILT, on_cpu) or "")
    assert "no such test" in (problem("works", "`data/test_packing.py::test_nothing`") or "")
    assert "names no test" in (problem("works", "") or "")
    assert "state 'perfect'" in (problem("perfect", on_cpu) or "")


def test_coverage_counts_are_those_of_the_rows():
    assert [int(row[0]) for row in ROWS] == list(range(1, len(ROWS) + 1))
    counted = {kind: sum(kind_of(row[2]) == kind for row in ROWS) for kind in STATES}
    stated = re.search(
        r"(\d+) items: (\d+) work, (\d+) are built and not run on a GPU, (\d+) work partly, (\d+) differ, (\d+) are "
        r"planned",
        " ".join(PAGE.split()),
    )
    assert stated is not None
    assert [int(group) for group in stated.groups()] == [len(ROWS), *counted.values()]
