"""What importing the package costs over Paddle, and how long the quick start's model takes to its first optimizer step.

    python benchmarks/startup.py [--repeats 5]

Every figure is of a fresh process; the first of each kind warms the disk and is not counted. Medians.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from measure import report
from paddlenlp_ext.utils.cli import run_command

ROOT = Path(__file__).resolve().parents[1]
IMPORTS = {
    "import_paddle": "import paddle",
    "import_both": "import paddlenlp_ext, paddle",
    "import_launcher": "import paddlenlp_ext, paddle, paddlenlp_ext.train.build",
}
ONE_STEP = (
    "--max_steps 1 --warmup_steps 0 --logging_steps 1 --do_eval false --eval_with_do_generation false "
    "--overwrite_output_dir true"
)


def seconds_of_import(statement: str) -> float:
    """From the command to the end of a process that does nothing else."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - start


def seconds_to_first_step(config: str) -> float:
    """From the command to the line that llm/run_finetune.py logs after its first optimizer step.

    Raises:
        RuntimeError: the command ended without one.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "llm/run_finetune.py", config, *ONE_STEP.split(), "--output_dir", folder]
        log = Path(folder) / "metrics.jsonl"
        start = time.perf_counter()
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            while not (log.exists() and log.stat().st_size):
                if process.poll() is not None:
                    raise RuntimeError(f"{' '.join(command)} made no step:\n{process.stderr.read().decode()[-3000:]}")
                time.sleep(0.01)
            seconds = time.perf_counter() - start
            process.communicate()
    return seconds


def median_of(measure: Callable[[], float], repeats: int) -> float:
    """Of `repeats` measurements after one that does not count."""
    measure()
    return round(statistics.median(measure() for _ in range(repeats)), 3)


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
    report("startup", {**vars(args), **figures}, "paddlepaddle")


if __name__ == "__main__":
    run_command(main)
