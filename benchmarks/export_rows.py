"""Write the documents of every optimizer step of a run, so that another program can train on the same documents.

    python -m benchmarks.export_rows ROWS.jsonl CONFIG.json [--adapter FOLDER] [--key value ...]

One line per optimizer step: a list of documents, each {"tokens": [...], "learned": [0 or 1, ...]}; 1 marks a target
token. With --adapter, the initial adapter of the run is saved for PEFT, which then starts from the same random values
of A.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

from paddlenlp_ext.config import load_run_config
from paddlenlp_ext.data.sampler import build_data_order
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.trainer.build_model import build_model
from paddlenlp_ext.trainer.load_data import load_data
from paddlenlp_ext.utils.run_command import run_command


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--adapter", type=Path)
    args, rest = parser.parse_known_args(argv)
    config = load_run_config(rest, peft_methods())
    rows = load_data(config).train_rows
    order = build_data_order(config, rows)
    with args.rows.open("w", encoding="utf-8") as out:
        for step_batch in itertools.islice(order.step_batches(), order.total_steps):
            documents = [rows[index] for index in step_batch.row_indices]
            line = [{"tokens": r.tokens.tolist(), "learned": r.loss_mask.astype(int).tolist()} for r in documents]
            out.write(json.dumps(line) + "\n")
    if args.adapter:
        build_model(ModelSource.from_config(config.model), config).model.save_pretrained(args.adapter)


if __name__ == "__main__":
    run_command(main)
