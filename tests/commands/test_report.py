"""Commands `pnx report` and `pnx compare`."""

from __future__ import annotations

from paddlenlp_ext.commands.report import compare, run
from tests.report.conftest import write_run


def test_report_writes_the_page_and_prints_verdict_and_findings(tmp_path, capsys):
    folder = write_run(tmp_path / "lora")
    run([str(folder)])
    printed = capsys.readouterr().out
    assert printed.startswith("Completed: 60 steps\nBest dev loss 1.25 at step 20.")
    assert "6 dev rows are also in train" in printed and f"written to {folder / 'report.html'}" in printed
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_compare_writes_the_page_and_prints_tables(tmp_path, capsys):
    folders = [write_run(tmp_path / name) for name in ("first", "second")]
    compare([*map(str, folders), "-o", str(tmp_path / "both.html")])
    printed = capsys.readouterr().out
    assert "best dev loss" in printed and "Keys: no difference" in printed
    assert "Comparison of 2 runs" in (tmp_path / "both.html").read_text()
