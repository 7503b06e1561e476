"""Comparison of all adapter methods and full fine-tuning on one model, rows and tokens, with a learning-rate sweep.

    python -m benchmarks.peft_methods.run --out checkpoints/peft_methods --gsm8k FOLDER [--jobs 2 --methods lora_r8]

Each run is llm/run_finetune.py in a separate process; with `--jobs N`, up to N runs share the cores. At
the end, speed and memory are measured in short runs, one at a time. Finished runs are not repeated, so an interrupted
command can be started again. Writes to OUT: runs.csv (every run), costs.csv, table.md and table.png (each method at the
learning rate with the lowest eval loss). `--quick` does all this with a tiny random model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.measure import environment
from benchmarks.peft_methods.entries import Entry, all_entries
from benchmarks.peft_methods.outcome import read_cost, read_outcome
from benchmarks.peft_methods.table import write_outcomes
from benchmarks.peft_methods.tasks import COST, INFLECTION, Task, gsm8k, tiny
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.utils.run_command import run_command
from paddlenlp_ext.utils.suggest import did_you_mean

LAUNCHER = ROOT / "llm" / "run_finetune.py"


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("checkpoints/peft_methods"))
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument(
        "--gsm8k", type=Path, help="folder with train.json and dev.json; unset: only the task inflection is run"
    )
    parser.add_argument("--methods", nargs="+", help="rows of the table to run")
    parser.add_argument(
        "--sweep",
        type=float,
        nargs="+",
        default=[0.3, 1.0, 3.0],
        help="factors by which the learning rate of a method is multiplied",
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at a time")
    parser.add_argument("--no_costs", action="store_true", help="do not measure speed and memory")
    parser.add_argument(
        "--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="key and value for every run"
    )
    parser.add_argument("--quick", action="store_true", help="two steps of a tiny random model, one learning rate")
    return parser.parse_args(argv)


def choose(entries: list[Entry], names: Sequence[str] | None) -> list[Entry]:
    """Return the entries with these names.

    Raises:
        ValueError: a name is unknown.
    """
    known = {entry.name: entry for entry in entries}
    for name in names or ():
        if name not in known:
            raise ValueError(f"--methods {name}: unknown{did_you_mean(name, list(known))} Known: {', '.join(known)}.")
    return [known[name] for name in names] if names else entries


@dataclass(frozen=True)
class Run:
    """One method at one learning rate on one task."""

    task: Task
    entry: Entry
    learning_rate: float
    out: Path

    @property
    def folder(self) -> Path:
        """Return the folder of the run's files."""
        return self.out / self.task.name / self.entry.name / f"{self.learning_rate:.3g}"

    @property
    def config(self) -> dict[str, Any]:
        """Return the run's configuration without output_dir."""
        return {**self.task.keys, "learning_rate": self.learning_rate, **self.entry.keys}

    def make(self, threads: int | None = None) -> bool:
        """Execute the run unless it was finished with the same configuration; return False if the run fails."""
        folder, config = self.folder, self.config
        done = folder / "finished.json"
        if done.is_file() and json.loads(done.read_text(encoding="utf-8")) == config:
            return True
        folder.mkdir(parents=True, exist_ok=True)
        done.unlink(missing_ok=True)
        file = folder / "config.json"
        file.write_text(json.dumps({**config, "output_dir": str(folder / "out")}, indent=2), encoding="utf-8")
        shared_cores = {} if threads is None else {"MKL_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
        started = time.perf_counter()
        with (folder / "run.log").open("w", encoding="utf-8") as log:
            command = [sys.executable, str(LAUNCHER), str(file), "--overwrite_output_dir", "true"]
            environ = {**os.environ, **shared_cores}
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False, env=environ).returncode
        failure = f", exit code {code}: {folder / 'run.log'}" if code else ""
        print(f"{self}: {time.perf_counter() - started:.0f} s{failure}", flush=True)
        if code == 0:
            done.write_text(json.dumps(config), encoding="utf-8")
        return code == 0

    def __str__(self) -> str:
        return f"{self.task.name}, {self.entry.name} at {self.learning_rate:.3g}"


def make_all(runs: Sequence[Run], jobs: int) -> list[Run]:
    """Execute the runs, `jobs` at a time; return the failed runs."""
    threads = None if jobs == 1 else max(1, len(os.sched_getaffinity(0)) // jobs)
    with ThreadPoolExecutor(jobs) as pool:
        successes = pool.map(lambda run: run.make(threads), runs)
    return [run for run, success in zip(runs, successes, strict=True) if not success]


def plan(args: argparse.Namespace) -> tuple[list[Task], Task, list[float]]:
    """Return the tasks, the task that measures costs, and the multiples of each method's learning rate."""
    if args.quick:
        *tasks, cost = tiny(args.out)
        return tasks, cost, [1.0]
    tasks = [INFLECTION] if args.gsm8k is None else [INFLECTION, gsm8k(args.gsm8k)]
    tasks = [task.on(args.model, args.set) for task in tasks]
    return tasks, COST.on(args.model, args.set), args.sweep


def main(argv: Sequence[str]) -> None:
    """Execute the missing runs, then write the table.

    Raises:
        ValueError: a method is unknown, runs cannot be compared, or runs failed.
    """
    args = parse_arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    entries = choose(all_entries(peft_methods()), args.methods)
    tasks, cost_task, sweep = plan(args)
    swept = [
        Run(task, entry, entry.learning_rate * factor, args.out)
        for task in tasks
        for entry in entries
        for factor in sweep
    ]
    measured = [] if args.no_costs else [Run(cost_task, entry, entry.learning_rate, args.out) for entry in entries]
    failed = make_all(swept, args.jobs) + make_all(measured, 1)
    outcomes = [
        read_outcome(run.folder / "out", run.task.name, run.entry.name, run.learning_rate)
        for run in swept
        if run not in failed
    ]
    costs = [read_cost(run.folder / "out", run.entry.name) for run in measured if run not in failed]
    if outcomes:
        facts = {"model": args.model, "sweep of learning rates": ", ".join(f"{factor:g} x" for factor in sweep)}
        facts |= {"settings": ", ".join(" ".join(pair) for pair in args.set)} if args.set else {}
        tokens = {outcome.task: f"{outcome.num_tokens:,} tokens" for outcome in outcomes}
        print(write_outcomes(args.out, outcomes, costs, facts | tokens | environment("paddlepaddle")))
    if failed:
        names = ", ".join(str(run) for run in failed)
        raise ValueError(f"{len(failed)} of {len(swept) + len(measured)} runs failed: {names}; see the run.log of each")


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
