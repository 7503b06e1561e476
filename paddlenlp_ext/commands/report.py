"""Commands `pnx report` and `pnx compare`: write pages about training runs. Paddle is not imported."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paddlenlp_ext.report.run_folder import PAGE_FILE, read_run
from paddlenlp_ext.utils.files import write_text

if TYPE_CHECKING:
    from rich.table import Table

    from paddlenlp_ext.report.comparison import Row

_RUN_HELP = "output_dir of a training run"


def run(argv: Sequence[str]) -> None:
    """Write report.html from the files of a run, and print the verdict and the findings.

    Raises:
        ValueError: the folder has no run, or one of its files is damaged.
    """
    parser = argparse.ArgumentParser("pnx report", description="Write report.html from the files of a run.")
    parser.add_argument("run", type=Path, help=_RUN_HELP)
    parser.add_argument("-o", "--out", type=Path, help=f"page to write; unset: {PAGE_FILE} in the folder of the run")
    parser.add_argument(
        "--before", type=Path, metavar="FOLDER", help="output_dir of a run that evaluated the model before training"
    )
    arguments = parser.parse_args(argv)
    from rich.console import Console  # imported after parsing, so that --help is fast

    from paddlenlp_ext.report.findings import find_all, verdict
    from paddlenlp_ext.report.run_page import render_run

    found = read_run(arguments.run, arguments.before)
    page = arguments.out or arguments.run / PAGE_FILE
    write_text(page, render_run(found))
    console, stated = Console(highlight=False, markup=False), verdict(found)
    console.print(stated.headline)
    console.print(stated.details)
    for finding in find_all(found):
        console.print(f"{finding.severity}: {finding.text}")
    print(f"written to {page}")


def compare(argv: Sequence[str]) -> None:
    """Write a page that compares runs, and print their results and differences as tables.

    Raises:
        ValueError: a folder has no run, one of its files is damaged, or the number of runs is not 2 to 6.
    """
    parser = argparse.ArgumentParser("pnx compare", description="Compare runs: results, curves and differences.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help=_RUN_HELP)
    parser.add_argument("-o", "--out", type=Path, default=Path("compare.html"), help="page to write (compare.html)")
    arguments = parser.parse_args(argv)
    from rich.console import Console

    from paddlenlp_ext.report.comparison import differences, render_comparison, result_rows, run_names

    runs = [read_run(folder) for folder in arguments.runs]
    write_text(arguments.out, render_comparison(runs))
    console = Console(highlight=False, markup=False)
    for heading, rows in {"Results": result_rows(runs), **differences(runs)}.items():
        if rows:
            console.print(_table(heading, run_names(runs), rows))
        else:
            console.print(f"{heading}: no difference")
    print(f"written to {arguments.out}")


def _table(heading: str, names: Sequence[str], rows: Sequence[Row]) -> Table:
    from rich.table import Table

    table = Table(title=heading, title_justify="left")
    for name in ("", *names):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(row.name, *row.values)
    return table
