"""Run this project and its peers in turn on the cases of cases.py, in several rounds, and write the results.

    make bench ARGS="--rounds 3 --gsm8k FOLDER"            all cases, into docs/benchmarks
    make bench ARGS="--only lora_fp32 lora_bf16"           some cases, into checkpoints/benchmarks

Every measurement is a separate process that prints one JSON line. Writes bench.json (every line), bench.md (medians
and ratios) and bench.png to the folder after every round, so a stopped run keeps its finished rounds.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

from benchmarks import ROOT, STARTED_WITH
from benchmarks.bench_report import write_report
from benchmarks.cases import CASES, GSM8K_KEYS, MODEL_KEYS, PYTHONS, Case, Program
from benchmarks.measure import environment
from benchmarks.ours import MODEL, not_offered
from paddlenlp_ext.checkpoint.hub import resolve_model
from paddlenlp_ext.utils.run_command import run_command
from paddlenlp_ext.utils.suggest import did_you_mean

WORK = ROOT / "checkpoints" / "benchmarks"


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ValueError: a case or an environment does not exist.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="number of timed steps of each process")
    parser.add_argument(
        "--gsm8k", type=Path, help="folder with train.json and dev.json of GSM8K, one {src, tgt} object per line"
    )
    parser.add_argument(
        "--out", type=Path, help="output folder; default: docs/benchmarks, or checkpoints/benchmarks with --only"
    )
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="another Python interpreter for an environment",
    )
    args = parser.parse_args(argv)
    for name in args.only:
        if name not in CASES:
            raise ValueError(f"--only {name}: no such case{did_you_mean(name, CASES)} Known: {', '.join(CASES)}.")
    args.out = args.out or (WORK if args.only else ROOT / "docs" / "benchmarks")
    given = dict(word.split("=", 1) for word in args.python if "=" in word)
    if len(given) != len(args.python) or not given.keys() <= PYTHONS.keys():
        raise ValueError(f"--python {' '.join(args.python)}: expected NAME=PATH with a name among {', '.join(PYTHONS)}")
    args.pythons = {"ours": sys.executable, **{name: str(ROOT / path) for name, path in PYTHONS.items()}, **given}
    return args


def reason_to_skip(case: Case, args: argparse.Namespace) -> str | None:
    """Return why a case cannot be measured here; None if it can be measured."""
    if "{gsm8k}" in case.programs[0].command and args.gsm8k is None:
        return "no --gsm8k FOLDER was given"
    missing = [program.environment for program in case.programs if not Path(args.pythons[program.environment]).exists()]
    if missing:
        return f"no environment {', '.join(missing)}: `make bench` builds it, or pass --python NAME=PATH"
    return not_offered(case.needs)


def module_command(python: str, command: str) -> list[str]:
    """Return the command line that runs a module of this package, given as `NAME [argument ...]`."""
    name, *arguments = shlex.split(command)
    return [python, "-m", f"benchmarks.{name}", *arguments]


def run_module(python: str, command: str) -> dict[str, Any]:
    """Run a module of this package and return the JSON line it prints last.

    Raises:
        RuntimeError: the module failed; the message has the end of its output.
    """
    words = module_command(python, command)
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=STARTED_WITH, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(words)}\nended with code {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def prepare(cases: dict[str, Case], args: argparse.Namespace) -> dict[str, str]:
    """Return the values of the names in braces; export GSM8K's rows if a case reads them."""
    words = {"model": str(resolve_model(MODEL)), "gsm8k": str(args.gsm8k), "rows": str(WORK / "gsm8k_rows.jsonl")}
    if any("{rows}" in program.command for case in cases.values() for program in case.programs):
        WORK.mkdir(parents=True, exist_ok=True)
        keys = f"{MODEL_KEYS} {GSM8K_KEYS}".format(**words)
        run = f"--do_train true --output_dir {WORK / 'run'} --max_steps {args.steps + 1}"
        command = f"export_rows {words['rows']} {keys} {run}"
        subprocess.run(module_command(args.pythons["ours"], command), cwd=ROOT, check=True)
    return words


def measure_all(
    cases: dict[str, Case], args: argparse.Namespace, words: dict[str, str], results: dict[str, Any]
) -> None:
    """Run every program of every case once per round, and write the lines of each round."""
    for number in range(args.rounds):
        for name, case in cases.items():
            for program in case.programs:
                figures = measure(program, args, words)
                results["cases"][name]["runs"].setdefault(program.label, []).append(figures)
                rate, memory = figures["tokens_per_second"], figures["peak_memory_gb"]
                clock = time.strftime("%H:%M:%S")
                print(f"{clock} round {number + 1} {name}: {program.label} {rate} tokens/s, {memory} GB", flush=True)
        results["rounds"] = number + 1
        write_report(args.out, results)


def measure(program: Program, args: argparse.Namespace, words: dict[str, str]) -> dict[str, Any]:
    """Measure one program in a separate process; the reported command is taken from cases.py, without local folders."""
    steps = args.steps if program.steps is None else min(args.steps, program.steps)
    command = f"{program.command} --steps {steps}"
    figures = run_module(args.pythons[program.environment], command.format(**words))
    return {"command": command, **{key: value for key, value in figures.items() if key not in ("keys", "model")}}


def main(argv: Sequence[str]) -> None:
    args = parse_arguments(argv)
    chosen = {name: case for name, case in CASES.items() if not args.only or name in args.only}
    skipped = {name: reason for name, case in chosen.items() if (reason := reason_to_skip(case, args)) is not None}
    for name, reason in skipped.items():
        print(f"not measured: {name}: {reason}", flush=True)
    cases = {name: case for name, case in chosen.items() if name not in skipped}
    if not cases:
        raise ValueError("no case can be measured here, for the reasons above")
    results: dict[str, Any] = {
        "environment": environment("paddlepaddle"),
        "model": MODEL,
        "rounds": 0,
        "cases": {name: {"title": case.title, "runs": {}} for name, case in cases.items()},
        "not_measured": {CASES[name].title: reason for name, reason in skipped.items()},
    }
    measure_all(cases, args, prepare(cases, args), results)
    print(f"written: {args.out}")


if __name__ == "__main__":
    run_command(main)
