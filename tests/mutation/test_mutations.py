"""Mutations of a small source."""

from __future__ import annotations

import ast

from tests.mutation.mutations import mutations_of

SOURCE = '''"""Documentation."""
import os
from typing import TYPE_CHECKING

LIMIT: int = 3


def check(x: int, é: str = "é", flag: bool = True) -> int:
    """Documentation."""
    assert x < LIMIT
    logger.info("checked %s", x)
    if not flag and 0 < x <= LIMIT:
        raise ValueError(f"{x} is above {LIMIT + 1}; lower it")
    é += x * 2
    os.remove(é)
    return -x if flag else x // 2
'''


def test_mutations_of_a_source_change_one_node_each():
    changed = {(mutation.line, mutation.before, mutation.after) for mutation in mutations_of("a.py", SOURCE)}
    assert changed == {
        (5, "3", "4"),
        (8, '"é"', "'éx'"),
        (8, "True", "False"),
        (12, "not flag and 0 < x <= LIMIT", "(not flag or 0 < x <= LIMIT)"),
        (12, "not flag", "(flag)"),
        (12, "0 < x <= LIMIT", "0 < x < LIMIT"),
        (12, "0", "1"),
        (13, 'raise ValueError(f"{x} is above {LIMIT + 1}; lower it")', "pass"),
        (14, "é += x * 2", "pass"),
        (14, "é += x * 2", "é -= x * 2"),
        (14, "x * 2", "(x / 2)"),
        (14, "2", "3"),
        (15, "os.remove(é)", "pass"),
        (16, "flag", "(not flag)"),
        (16, "-x", "(x)"),
        (16, "x // 2", "(x * 2)"),
        (16, "2", "3"),
    }


def test_mutation_apply_keeps_the_other_lines():
    for mutation in mutations_of("a.py", SOURCE):
        before, after = SOURCE.splitlines(), mutation.apply(SOURCE).splitlines()
        assert [n for n, pair in enumerate(zip(before, after, strict=True), 1) if pair[0] != pair[1]] == [mutation.line]
        ast.parse(mutation.apply(SOURCE))


def test_mutation_key_survives_changes_elsewhere():
    keys = [{mutation.key for mutation in mutations_of("a.py", text)} for text in (SOURCE, "x = os\n" + SOURCE)]
    assert keys[0] == keys[1] and len(keys[0]) == len(mutations_of("a.py", SOURCE))
