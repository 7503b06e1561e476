"""Docstrings name their object: they open with a verb or a noun phrase, and read without their neighbours."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("paddlenlp_ext", "llm", "benchmarks", "examples")
MIN_WORDS = 3
# A relative clause, a bare preposition, or a word that points at another docstring.
BAD_OPENING = re.compile(
    r"(What(ever)?|Which(ever)?|Whether|Who(ever)?|Whose|Where(ver)?|When|How|Of|As|That|Those|These|This|Its?|They|Theirs)\b"
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def problem_with(docstring: str) -> str | None:
    if len(docstring.split()) < MIN_WORDS:
        return f"fewer than {MIN_WORDS} words"
    opening = BAD_OPENING.match(docstring)
    return f"opens with {opening[0]!r}" if opening else None


def violations(source: str, path: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)) is not None:
            problem = problem_with(docstring)
            if problem:
                yield f"{path}:{getattr(node, 'lineno', 1)}: {problem}: {docstring.splitlines()[0]}"


@pytest.mark.parametrize("package", FOLDERS)
def test_docstrings_of_package_name_their_object(package: str):
    paths = sorted((ROOT / package).rglob("*.py"))
    assert paths, f"{package} has no modules; it may have moved"
    found = [
        line for path in paths for line in violations(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("docstring", "problem"),
    [
        ("What a run keeps of its rows.", "opens with 'What'"),
        ("As `inject`, for one layer.", "opens with 'As'"),
        ("That's how it is.", "opens with 'That'"),
        ("Of neither file.", "opens with 'Of'"),
        ("It is.", "fewer than 3 words"),
        ("These.", "fewer than 3 words"),
    ],
)
def test_problem_with_unclear_docstring_is_named(docstring: str, problem: str):
    assert problem_with(docstring) == problem


@pytest.mark.parametrize(
    "docstring", ["Return the rows.", "Base callback; every hook is a no-op.", "Order rows by length."]
)
def test_problem_with_clear_docstring_is_none(docstring: str):
    assert problem_with(docstring) is None


def test_violations_in_nested_definitions_are_located():
    source = '''"""Rows of a test."""

class Rows:
    """These."""

    async def read(self):
        """Whether it is open."""

    def close(self):
        """Close the file for good."""
'''
    assert list(violations(source, "rows.py")) == [
        "rows.py:3: fewer than 3 words: These.",
        "rows.py:6: opens with 'Whether': Whether it is open.",
    ]
