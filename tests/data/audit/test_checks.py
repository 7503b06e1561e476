"""Checks of texts: what looks like a fault and is none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paddlenlp_ext.data.audit import audit_splits
from paddlenlp_ext.data.audit.audited_row import CHECKS, AuditedRow, TextPart, TokenizerInfo
from paddlenlp_ext.data.audit.findings import Kind
from paddlenlp_ext.data.templates.load import load_template
from tests.data.tiny_tokenizers import make_tokenizer

FACTS = TokenizerInfo.of(load_template("none", make_tokenizer(bos="<s>")))


def findings(question, answer="It is so."):
    row = AuditedRow(None, (TextPart("user", question), TextPart("assistant", answer)))
    return {name for name, check in CHECKS.items() if list(check.find(row, FACTS))}


@pytest.mark.parametrize(
    "text",
    [
        "Le « CAFÉ » et l'É»té, NÃO à São João, 25 °C, £5, “quoted” – naïve façade",
        "Жизнь ÐÐ, Ωμέγα ΑΣ, 你好，世界！ å ä ö Ñ ñ Â â",
        "if a < b and b > c: x = y << 2 & z",
        "<div> is a tag of HTML &nbsp;",
        "```\n<p>text</p>\n```",
        "tab\tand\r\nline",
        "👩‍👩‍👧 family, क्षि, שָׁלוֹם",
        "As an AI engineer I write models.",
        "Use [x] and [1] and [INSTALL].",
    ],
)
def test_checks_of_ordinary_text_find_nothing(text):
    assert findings(text, text + " And more.") == set()


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ("dÃ©jÃ\xa0 vu", "wrong encoding"),
        ("30Â°C", "wrong encoding"),
        ("donâ€™t", "wrong encoding"),
        ("ðŸ˜€", "wrong encoding"),
        ("ÐŸÑ€Ð¸Ð²ÐµÑ‚", "wrong encoding"),
        ("ä½\xa0å¥½", "wrong encoding"),
        ("a <a href='x'>b</a>", "HTML"),
        ("Tom &amp; Anna", "HTML"),
        ("abc\ufeff", "control character"),
        ("abc\u202e", "control character"),
        ("hello<|im_start|>", "special token in the text"),
        ("<start_of_turn>user", "marker of another template"),
        ("### Response:", None),
    ],
)
def test_checks_of_faulty_text_find_it(text, check):
    assert findings(text) == ({check} if check else set())


def test_checks_are_those_of_the_page():
    kinds = [check.kind for _, check in CHECKS.items()]
    kinds += [value for value in vars(audit_splits).values() if isinstance(value, Kind)]
    page = (Path(__file__).parents[3] / "docs" / "reference" / "audit.md").read_text()
    listed = {
        (name, severity)
        for names, severity in re.findall(r"^\| ([^|]+?) \| (error|warning|note) \|", page, re.MULTILINE)
        for name in names.split(", ")
    }
    assert listed == {(kind.name, kind.severity) for kind in kinds} and len(listed) == len(kinds)
