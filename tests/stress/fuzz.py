"""Attack the readers of untrusted files with random damage.

    python -m tests.stress.fuzz                              # every target, 1,000 inputs each
    python -m tests.stress.fuzz config templates --count 100000 --seed 7

A target makes one input from a seed and reads it. The target may accept the input, or reject the input with ValueError.
Everything else is a finding: another exception, more than 5 seconds, or memory beyond a limit. A finding is printed
with its seed, and `--seed SEED --count 1` repeats it. Seeds of earlier findings are kept in `KEPT`, and run in `make
test`.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

MAX_SECONDS = 5.0
MAX_GROWTH_GIB = 1.0
"""Limit of the memory that one input may add to the process."""

Target = Callable[[random.Random, Path], object]
"""Function that makes one input with the generator, writes its files into the folder, and reads it."""


@dataclass
class Report:
    """Outcome of the inputs of one target: how many were accepted or refused, and the findings by their first seed.

    Attributes:
        outcomes: number of inputs by outcome.
        findings: first seed by kind of finding.
        longest: processor time of the slowest input in seconds, and its seed.
        largest: memory that the inputs added to the process in KiB, an upper bound for each of them.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: dict[str, int] = field(default_factory=dict)
    longest: tuple[float, int] = (0.0, 0)
    largest: int = 0

    def add(self, kind: str, seed: int) -> None:
        """Count a finding; findings of one kind keep their first seed."""
        self.outcomes["findings"] += 1
        self.findings.setdefault(kind, seed)


def attack(target: Target, seeds: Iterable[int]) -> Report:
    """Run one target with each seed."""
    report, start = Report(), _peak()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in seeds:
            before, started = _peak(), time.process_time()
            try:
                target(random.Random(seed), folder)
                report.outcomes["accepted"] += 1
            except ValueError as error:
                report.outcomes["refused"] += 1
                if isinstance(error, UnicodeError) or not str(error):
                    report.add(f"{type(error).__name__}: {error}", seed)
            except BaseException as error:  # panics of Rust libraries are no Exception
                if isinstance(error, KeyboardInterrupt):
                    raise
                report.add(_kind(error), seed)
            seconds = time.process_time() - started
            report.longest = max(report.longest, (seconds, seed))
            report.largest = _peak() - start
            if seconds > MAX_SECONDS:
                report.add(f"more than {MAX_SECONDS:g} seconds", seed)
            if _peak() - before > MAX_GROWTH_GIB * 2**20:
                report.add(f"more than {MAX_GROWTH_GIB:g} GiB", seed)
    return report


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _kind(error: BaseException) -> str:
    """Describe an exception by its type, its text and the innermost place in the package."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "paddlenlp_ext" in frame.filename]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "outside the package"
    return f"{place}: {type(error).__name__}: {str(error)[:120]}"


def targets() -> dict[str, Target]:
    """Return the targets by name."""
    from tests.stress import (
        fuzz_adapters,
        fuzz_config,
        fuzz_readers,
        fuzz_rows,
        fuzz_templates,
        fuzz_tensors,
        fuzz_tokenizer,
    )

    return {
        "config": fuzz_config.attack,
        "adapters": fuzz_adapters.attack,
        "rows": fuzz_rows.attack,
        "compressed": fuzz_readers.attack_compressed,
        "columns": fuzz_readers.attack_columns,
        "json": fuzz_readers.attack_json,
        "safetensors": fuzz_tensors.attack_safetensors,
        "gguf": fuzz_tensors.attack_gguf,
        "tokenizer": fuzz_tokenizer.attack,
        "templates": fuzz_templates.attack,
        "operations": fuzz_templates.attack_operations,
    }


KEPT: dict[str, tuple[int, ...]] = {
    "config": (3071, 12590, 2011479, 2021283, 77000548),
    "adapters": (
        2002679,
        2040737,
        2130827,
        7002454,
        8004926,
        1006037,
        1053378,
        638,
        2,
        6,
        7,
        25,
        41,
        92,
        130,
        139,
        141,
        446,
    ),
    "safetensors": (2064,),
    "templates": (2056624,),
    "tokenizer": (1086732, 38, 60, 80),
    "columns": (10011737, 10014536, 10018731),
}
"""Seeds of former findings by target."""


def main(arguments: list[str]) -> int:
    """Attack the named targets, and print what was found; return 1 if anything was."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("targets", nargs="*", help=f"names of targets, by default all: {', '.join(targets())}")
    parser.add_argument("--count", type=int, default=1000, help="number of inputs for each target")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first input")
    options = parser.parse_args(arguments)
    failed = False
    warnings.simplefilter("ignore")
    for name in options.targets or targets():
        started = time.perf_counter()
        report = attack(targets()[name], range(options.seed, options.seed + options.count))
        counts = ", ".join(f"{count} {kind}" for kind, count in report.outcomes.items())
        print(f"{name}: {options.count} inputs in {time.perf_counter() - started:.0f} s: {counts}", flush=True)
        seconds, seed = report.longest
        print(f"  longest: {seconds:.2f} s (seed {seed}); memory added: {report.largest >> 10} MiB", flush=True)
        for kind, seed in report.findings.items():
            failed = True
            print(f"  seed {seed}: {kind}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
