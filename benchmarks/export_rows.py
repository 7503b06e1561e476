"""Write the documents of every optimizer step of a run, so that another program can train on the very same ones.

    python benchmarks/export_rows.py ROWS.jsonl CONFIG.json [--key value ...]

One line an optimizer step: a list of documents, each {"tokens": [...], "learned": [0 or 1, ...]}.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from paddlenlp_ext.config import load_run_config
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.train.build import load_data
from paddlenlp_ext.train.data_order import build_data_order
from paddlenlp_ext.utils.cli import run_command


def main(argv: Sequence[str]) -> None:
    target, *rest = argv
    config = load_run_config(rest, peft_methods())
    rows = load_data(config).train_rows
    order = build_data_order(config, rows)
    with Path(target).open("w", encoding="utf-8") as out:
        for window in itertools.islice(order.windows(), order.total_steps):
            documents = [rows[index] for index in window.row_indices]
            line = [{"tokens": r.tokens.tolist(), "learned": r.learned.astype(int).tolist()} for r in documents]
            out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    run_command(main)
