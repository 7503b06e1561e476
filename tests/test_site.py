"""The site: its index lists every page, README, Start and Tutorials are short, and generated tables are current."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paddlenlp_ext.ops.cpp import bf16
from tests.common.scripts import ROOT, load_script

DOCS = ROOT / "docs"
GUIDES = sorted([DOCS / "faq.md", *(DOCS / "start").glob("*.md"), *(DOCS / "tutorials").glob("*.md")])
GENERATED = re.compile(r"<!-- [\w -]+: made by .*?<!-- end of [\w -]+ -->", re.DOTALL)


def listed_pages(index: Path) -> set[str]:
    """Return the pages in the toctrees of a page."""
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```$", index.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return {line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")}


def test_site_index_lists_exactly_the_pages_of_docs():
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    assert listed_pages(DOCS / "index.md") == pages - {"index"}


@pytest.mark.parametrize(
    ("page", "most"),
    [(ROOT / "README.md", 700), *((page, 800) for page in GUIDES)],
    ids=lambda value: Path(str(value)).stem,
)
def test_site_guide_is_short(page, most):
    """Count words of prose and of tables, without generated tables and blocks of code."""
    prose = re.sub(r"^```.*?^```$", "", GENERATED.sub("", page.read_text("utf-8")), flags=re.MULTILINE | re.DOTALL)
    assert len(re.findall(r"[\w`'.-]*\w[\w`'.-]*", prose)) <= most


def test_site_tables_of_toolkit_keys_are_current():
    maker = load_script(DOCS / "make_coming_from.py")
    page = maker.PAGE.read_text(encoding="utf-8")
    assert maker.renew(page) == page, "run: python docs/make_coming_from.py"
    assert {len(keys.split()) for keys in maker.KEYS.values()} == {15}


@pytest.mark.skipif(bf16.unavailable_reason() is not None, reason="bfloat16 needs the C++ library")
@pytest.mark.parametrize("method", ["LoRA", "QLoRA, recompute"])
def test_site_table_of_model_memory_is_current(method):
    """Predict one row of the table again; the whole table takes minutes."""
    maker = load_script(DOCS / "make_model_memory.py")
    rows = re.findall(r"^\| (.+) \|$", maker.PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    table = [row.split(" | ") for row in rows]
    column = next(row for row in table if row[0] == "peak in GB").index(method)
    shown = next(row for row in table if row[0] == "Qwen3-0.6B")[column]
    predicted = maker.predict_gb(maker.MODELS["Qwen3-0.6B"], maker.METHODS[method], "cpu")
    assert maker.show(predicted) == shown, "run: python docs/make_model_memory.py"
