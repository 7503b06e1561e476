"""Phrases that make a reader look back: they point at a noun instead of naming it, or are not the field's.

Checked in the pages, and in docstrings, comments, messages and help texts of the code.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("paddlenlp_ext", "llm", "examples")
MIN_WORDS = 4
"""Words from which a string constant is a sentence, and not a key or a format."""
PHRASES = {
    r"(?<!there )\b(?:is|are|was|were) no (?!longer|more|less|one|better|worse|faster)[a-z]+": 'write "is not a"',
    r"\b(?:those|that|the ones?) of\b": "name the thing again",
    r"(?<!none )(?<!each )(?<!all )(?<!both )\bof wh(?:ich|ose|om)\b": "begin a new sentence, or write whose",
    r"(?<!random )\bnumbers of\b(?! more)": "write counts of, or name the values",
    r"\bcalls? of (?:a )?tools?\b": "write tool call",
    r"\bthoughts?\b": "write reasoning",
    r"\btroubles?\b": "name the problem",
    r"\blearned (?:token|answer|row|text)s?\b": "write target token, or trained",
}
LINE_COMMENT = re.compile(r"\s*(?://|\*)\s*(.*)")
ALLOWED = {
    # names in files and in regular expressions, which the code must keep
    ("paddlenlp_ext/data/tokenization/cache_key.py", r"\bthoughts?\b"),
    ("paddlenlp_ext/data/templates/jinja_probe.py", r"\bthoughts?\b"),
}


def code_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of comments, and of string constants that are sentences."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) >= MIN_WORDS:
            yield from ((node.lineno + index, line) for index, line in enumerate(node.value.splitlines()))


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line number and text of the prose of a file."""
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from code_texts(content)
    elif path.suffix == ".md":
        is_code = False
        for number, line in enumerate(content.splitlines(), 1):
            is_code ^= line.lstrip().startswith("```")
            if not is_code:
                yield number, line
    else:
        for number, line in enumerate(content.splitlines(), 1):
            if comment := re.search(r"//(.*)", line):
                yield number, comment[1]


def violations(path: Path) -> list[str]:
    """Return place, phrase and remedy of each phrase in a file."""
    name = str(path.relative_to(ROOT))
    return [
        f"{name}:{number}: {match[0]!r}: {remedy}"
        for number, text in texts(path)
        for phrase, remedy in PHRASES.items()
        if (name, phrase) not in ALLOWED
        for match in re.finditer(phrase, text, re.IGNORECASE)
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_wording_of_code_names_things(folder: str):
    paths = [path for suffix in ("py", "cpp", "h") for path in sorted((ROOT / folder).rglob(f"*.{suffix}"))]
    assert paths, f"{folder} has no sources; it may have moved"
    found = [line for path in paths for line in violations(path)]
    assert not found, "\n".join(found)


def test_wording_of_pages_names_things():
    found = [line for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]) for line in violations(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "phrase"),
    [
        ('"""Return the values, those of the last step first."""\n', "those of"),
        ("x = 1  # it is no number\n", "is no number"),
        ('raise ValueError("layers of which none is trained")\n', "of which"),
        ('log("count the numbers of rows")\n', "numbers of"),
    ],
)
def test_code_texts_of_docstring_comment_and_message_are_checked(source: str, phrase: str):
    found = [match[0] for _, text in code_texts(source) for each in PHRASES if (match := re.search(each, text))]
    assert found == [phrase]
