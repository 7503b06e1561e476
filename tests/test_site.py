"""The site: its index lists every page, guides are short and exist in two languages, generated tables are current."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urldefrag, urljoin

import pytest

from paddlenlp_ext.ops.cpp import bf16
from tests.common.scripts import ROOT, load_script

DOCS, README = ROOT / "docs", ROOT / "README.md"


def listed_pages(index: Path, caption: str = "") -> set[str]:
    """Return the pages in the toctrees of a page; with `caption`, only the pages under this caption."""
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```$", index.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    chosen = [tree for tree in trees if f":caption: {caption}" in tree]
    return {line for tree in chosen for line in tree.splitlines() if line and not line.startswith(":")}


GUIDES = sorted([DOCS / "faq.md", *(DOCS / "start").glob("*.md"), *(DOCS / "tutorials").glob("*.md")])
GENERATED = re.compile(r"<!-- [\w -]+: made by .*?<!-- end of [\w -]+ -->", re.DOTALL)
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
HOW_TO = [DOCS / f"{name}.md" for name in sorted(listed_pages(DOCS / "index.md", "How-to"))]
TRANSLATED = [*GUIDES, *HOW_TO, DOCS / "install.md", DOCS / "commands.md"]
CHINESE = {page: DOCS / "zh" / page.relative_to(DOCS) for page in TRANSLATED} | {README: DOCS / "zh" / "README.md"}
"""English page -> Chinese page."""
VERSIONS = {old.as_uri(): new.as_uri() for pair in CHINESE.items() for old, new in (pair, pair[::-1])}
"""Address of a page -> address of the same page in the other language."""


def test_site_index_lists_exactly_the_pages_of_docs():
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    assert listed_pages(DOCS / "index.md") == pages - {"index"}


@pytest.mark.parametrize(
    ("page", "most"),
    [
        (README, 700),
        *((page, 800) for page in (*GUIDES, *HOW_TO)),
    ],
    ids=lambda value: Path(str(value)).stem,
)
def test_site_guide_is_short(page, most):
    """Count words of prose and of tables, without generated tables and blocks of code."""
    prose = CODE.sub("", GENERATED.sub("", page.read_text("utf-8")))
    assert len(re.findall(r"[\w`'.-]*\w[\w`'.-]*", prose)) <= most


def test_site_chinese_pages_are_readme_and_guides():
    assert set((DOCS / "zh").rglob("*.md")) == set(CHINESE.values())


def parts_in_both_languages(page: Path, versions: Mapping[str, str]) -> dict[str, object]:
    """Return what the two languages of a page have in common, with the targets of links replaced as in `versions`."""
    text = page.read_text(encoding="utf-8")
    prose = CODE.sub("", text)
    links = [urldefrag(urljoin(page.as_uri(), link)) for link in re.findall(r"\]\(([^)\s]+)\)", prose)]
    # a translated heading has another anchor
    anchors = ["" if url in VERSIONS else anchor for url, anchor in links]
    return {
        "code": CODE.findall(text) + re.findall(r"^ {4}.*", prose, re.MULTILINE),
        "generated": GENERATED.findall(text),
        "levels of headings": re.findall(r"^#+(?= )", prose, re.MULTILINE),
        "rows of tables": len(re.findall(r"^\|", prose, re.MULTILINE)),
        "items of lists": len(re.findall(r"^ *(?:[-*]|\d+\.) ", prose, re.MULTILINE)),
        "links": sorted(zip((versions.get(url, url) for url, _ in links), anchors, strict=True)),
    }


@pytest.mark.parametrize(("english", "chinese"), CHINESE.items(), ids=lambda page: str(page.relative_to(ROOT)))
def test_site_page_has_the_same_parts_in_both_languages(english, chinese):
    assert parts_in_both_languages(english, VERSIONS) == parts_in_both_languages(chinese, {})


def test_site_tables_of_toolkit_keys_are_current():
    maker = load_script(DOCS / "make_coming_from.py")
    for path in maker.PAGES:
        page = path.read_text(encoding="utf-8")
        assert maker.renew(page) == page, "run: python docs/make_coming_from.py"
    assert {len(keys.split()) for keys in maker.KEYS.values()} == {15}


@pytest.mark.skipif(bf16.unavailable_reason() is not None, reason="bfloat16 needs the C++ library")
@pytest.mark.parametrize("method", ["LoRA", "QLoRA, recompute"])
def test_site_table_of_model_memory_is_current(method):
    """Predict one row of the table again; the whole table takes minutes."""
    maker = load_script(DOCS / "make_model_memory.py")
    rows = re.findall(r"^\| (.+) \|$", maker.PAGES[0].read_text(encoding="utf-8"), re.MULTILINE)
    table = [row.split(" | ") for row in rows]
    column = next(row for row in table if row[0] == "peak in GB").index(method)
    shown = next(row for row in table if row[0] == "Qwen3-0.6B")[column]
    predicted = maker.predict_gb(maker.MODELS["Qwen3-0.6B"], maker.METHODS[method], "cpu")
    assert maker.show(predicted) == shown, "run: python docs/make_model_memory.py"
