"""Tokens per second and peak memory of a run of llm/run_finetune.py, on the rows of a dataset.

    python -m benchmarks.train_rows [--steps 3] --dataset_name_or_path FOLDER --lora true [--key value ...]

Speed counts tokens without padding. The first optimizer step is not timed. For the same rows in another program, run
export_rows.py with the same keys, then peers/train_rows.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

from benchmarks.measure import report, tokens_per_second
from benchmarks.ours import run_config
from paddlenlp_ext.trainer.build_trainer import build_trainer
from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.load_data import load_data
from paddlenlp_ext.trainer.trainer_state import StepReport
from paddlenlp_ext.utils.run_command import run_command


class StepTimes(Callback):
    """Callback that collects the report of every step."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def on_step_end(self, state: object, report: StepReport) -> None:
        self.reports.append(report)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="number of timed steps, after an untimed step")
    args, keys = parser.parse_known_args(argv)
    config = run_config([*keys, "--max_steps", str(args.steps + 1), "--overwrite_output_dir", "true"])
    times = StepTimes()
    build_trainer(config, load_data(config), [times]).train()
    timed = times.reports[1:]
    figures = tokens_per_second([step.num_tokens for step in timed], [step.seconds for step in timed])
    report("train_rows", {"keys": keys, **figures, "losses": [step.loss for step in times.reports]}, "paddlepaddle")


if __name__ == "__main__":
    run_command(main)
