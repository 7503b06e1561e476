"""Time to import the package, and time from the command to the first optimizer step of the quick start's model.

    python -m benchmarks.startup [--repeats 5]

Times are medians over new processes, after an uncounted process that fills the disk cache and the caches of compiled
Python and tokenized rows. startup_phases.py measures `phases`, in seconds and, for a busy machine, in processor
seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks import ROOT
from benchmarks.measure import report
from paddlenlp_ext.utils.run_command import run_command

_CONFIGURE = "from paddlenlp_ext import configure_runtime; configure_runtime()"
IMPORTS = {
    "import_paddle": "import paddle",
    "import_both": f"{_CONFIGURE}; import paddle",
    "import_launcher": f"{_CONFIGURE}; import paddle, paddlenlp_ext.trainer.build_trainer",
}
ONE_STEP = (
    "--max_steps 1 --warmup_steps 0 --logging_steps 1 --do_eval false --eval_with_do_generation false "
    "--overwrite_output_dir true"
)
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def seconds_of_import(statement: str) -> float:
    """Return the seconds from the command to the end of a process that only imports the package."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True)
    return time.perf_counter() - start


def seconds_to_first_step(config: str) -> float:
    """Return the seconds from the command to the line that llm/run_finetune.py logs after its first optimizer step.

    Raises:
        RuntimeError: the command ended without a step.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "llm/run_finetune.py", *arguments(config, folder)]
        log = Path(folder) / "metrics.jsonl"
        start = time.perf_counter()
        output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, **output) as process:
            while not (log.exists() and log.stat().st_size):
                if process.poll() is not None:
                    raise RuntimeError(f"{' '.join(command)} ran no step:\n{process.stderr.read().decode()[-3000:]}")
                time.sleep(0.01)
            seconds = time.perf_counter() - start
            process.communicate()
    return seconds


def phases_to_first_step(config: str) -> dict[str, dict[str, float]]:
    """Return the phases of one run, as startup_phases.py measures them."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.startup_phases", str(time.monotonic())]
        command += arguments(config, folder)
        result = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True, text=True)
    return json.loads(result.stdout.splitlines()[-1])


def arguments(config: str, folder: str) -> list[str]:
    """Return the command line of one step, with output to the folder."""
    return [config, *ONE_STEP.split(), "--output_dir", folder]


def median_of(measure: Callable[[], float], repeats: int) -> float:
    """Return the median of `repeats` measurements, after a first measurement that is not counted."""
    measure()
    return round(statistics.median(measure() for _ in range(repeats)), 3)


def median_phases(config: str, repeats: int) -> dict[str, dict[str, float]]:
    """Return the medians of every phase and clock over `repeats` runs with a warm disk."""
    runs = [phases_to_first_step(config) for _ in range(repeats)]
    return {
        phase: {clock: round(statistics.median(run[phase][clock] for run in runs), 3) for clock in runs[0][phase]}
        for phase in runs[0]
    }


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--config", default="llm/config/smollm2/lora_argument.json")
    args = parser.parse_args(argv)
    figures = {
        name: median_of(lambda code=code: seconds_of_import(code), args.repeats) for name, code in IMPORTS.items()
    }
    figures["import_overhead"] = round(figures["import_both"] - figures["import_paddle"], 3)
    figures["first_optimizer_step"] = median_of(partial(seconds_to_first_step, args.config), args.repeats)
    phases = median_phases(args.config, args.repeats)
    report("startup", {**vars(args), **figures, "phases": phases}, "paddlepaddle")


if __name__ == "__main__":
    run_command(main)
