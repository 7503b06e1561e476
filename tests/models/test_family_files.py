"""A family is one short file: nothing else of the package names it, except families that are built on it."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import paddlenlp_ext
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.registry import FAMILIES

PACKAGE = Path(paddlenlp_ext.__file__).parent
FAMILY_FILES = {f"models/families/{model_type}.py": model_type for model_type in FAMILIES.names()}
NAMES_OF_TOKENIZERS = [
    "checkpoint/tiktoken_file.py",
    *(
        f"checkpoint/gguf/{name}.py"
        for name in ("tokenizer_fields", "read_tokenizer", "write_tokenizer", "pre_tokenizers")
    ),
]
"""Modules with the names of tokenizers, some of which are also those of families."""
MAX_LINES = 120


def names_of(model_type: str) -> set[str]:
    """Return the words that name a family: model type, class without its ending, GGUF architecture."""
    words = {model_type, FAMILIES.get(model_type).architecture.removesuffix("ForCausalLM").lower()}
    return words | ({ARCHITECTURES.get(model_type).name} if model_type in ARCHITECTURES.names() else set())


def words_of(text: str) -> str:
    """Return the names and strings of a module, comments and docstrings left out, which may cite papers and models."""
    docstrings = {
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return " ".join(
        token.string
        for token in tokens
        if token.type == tokenize.NAME or (token.type == tokenize.STRING and token.start[0] not in docstrings)
    )


def named_families(text: str) -> set[str]:
    words = {name for model_type in FAMILIES.names() for name in names_of(model_type)}
    # A longer name comes first, so that qwen2_moe is not also qwen2.
    pattern = "|".join(sorted(map(re.escape, words), key=len, reverse=True))
    return set(
        re.findall(
            rf"(?<![a-z0-9])({pattern})(?:forcausallm)?(?![a-z0-9])",
            re.sub(r"llama\.cpp|llama_4_scaling_beta", "", text.lower()),
        )
    )


def test_families_have_one_short_file_each():
    lines = {file: len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) for file in FAMILY_FILES}
    assert {file: number for file, number in lines.items() if number > MAX_LINES} == {}


def test_families_are_named_only_in_their_files():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        file, text = str(path.relative_to(PACKAGE)), path.read_text(encoding="utf-8")
        if file in NAMES_OF_TOKENIZERS or not named_families(text):
            continue
        text = words_of(text)
        allowed: set[str] = set()
        if file in FAMILY_FILES:
            built_on = re.findall(r"paddlenlp_ext models families (\w+)", text)
            for model_type in {FAMILY_FILES[file], *built_on} & set(FAMILIES.names()):
                allowed |= names_of(model_type)
        if named_families(text) - allowed:
            found[file] = named_families(text) - allowed
    assert found == {}
