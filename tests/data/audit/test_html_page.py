"""The page and the table of an audit."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

from paddlenlp_ext.data.audit.html_page import render_page
from tests.data.audit.rows import clean_row
from tests.data.tiny_tokenizers import CHATML

VOID = {"meta", "line"}


class Parser(HTMLParser):
    """Parser that checks nesting, and collects texts by the class of their element."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.attributes = [], {}, []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("class")))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for tag, name in self.open:
            self.texts.setdefault(name or tag, []).append(data)


def parse(page):
    parser = Parser()
    parser.feed(page)
    assert not parser.open
    return parser


def test_render_page_shows_counts_findings_and_rows(audit, tokenizer):
    rows = [clean_row(seed) for seed in range(30)]
    rows[4]["src"] += " <br> CafÃ©"
    rows[5] = rows[3]
    report = audit({"train": rows, "dev": [clean_row(40)]}, CHATML)
    page = render_page(report, tokenizer)
    parser = parse(page)
    places = {text.rsplit("/", 1)[1] for text in parser.texts["place"]}
    assert places == {"train.jsonl:6", "train.jsonl:5:1"}
    assert {"duplicate", "HTML", "wrong encoding"} <= set(parser.texts["b"])
    assert set(parser.texts["mark"]) == {"<br>", "Ã©"}
    targets = "".join(text for name in ("target", "target second") for text in parser.texts[name])
    assert targets.count("<|im_end|>") == 4  # three rows of train and one of dev
    assert "31 rows" in page
    assert page.count("<svg") == 4 and "nothing found" in page


def test_render_page_needs_no_network_and_no_script(audit, tokenizer):
    rows = [{**clean_row(1), "src": "<script>alert(1)</script> <img src='http://x'>"}]
    page = render_page(audit({"train": rows}), tokenizer)
    parser = parse(page)
    assert "script" not in parser.texts and not {"src", "href"} & {name for name, _ in parser.attributes}
    assert not re.search(r"url\(|@import", page)
    assert page.count("<svg") == page.count('role="img" aria-label="Histogram of the ') > 0


def test_report_table_names_the_first_places(audit):
    rows = [{**clean_row(seed), "tgt": "a\ufffd"} for seed in range(9)]
    table = audit({"train": rows, "dev": [clean_row(20)]}).table()
    assert "10 rows" in table and "9 errors, 0 warnings" in table
    assert "train: error: replacement character (9); read the source again" in table
    assert table.count("train.jsonl:") == 3 and "train.jsonl:1:1: a⟦" in table


def test_report_to_json_is_json(audit):
    rows = [{**clean_row(seed), "tgt": f"{seed}\ufffd"} for seed in range(3)]
    report = json.loads(json.dumps(audit({"train": rows}).to_json()))
    (split,) = report["splits"]
    assert report["errors"] == 3 and split["account"]["num_read"] == 3 and split["lengths"]["longest"] > 10
    (finding,) = split["findings"]
    assert finding["check"] == "replacement character" and len(finding["places"]) == finding["count"] == 3


def test_report_without_examples_has_a_page(audit, tokenizer):
    report = audit({"train": ["{"]}, bad_rows="drop")
    assert "invalid row" in render_page(report, tokenizer) and "1 error" in report.table()
