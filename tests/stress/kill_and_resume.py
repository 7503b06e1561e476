"""Kill or stop small runs and resume them: each must end bitwise equal to a run that was never stopped.

    python -m tests.stress.kill_and_resume --kills 1000      SIGKILL, one to three times per run
    python -m tests.stress.kill_and_resume --signals 200     two stop signals per run, the second while the run stops

Attempts are forked from a process that has imported everything and computed nothing, so they start in 0.1 seconds.
Half of the kills come after a random time. The others come before a random file operation (open, rename, mkdir, remove)
below the run's folder, which an audit hook counts, or before a random step of sampling. Half of the kills therefore
interrupt saves, caches and sampling.

Stop signals come after random times. A stopped process leaves through the interpreter's exit, as a program does.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paddlenlp_ext._runtime import configure_runtime

configure_runtime()

from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401 (imported once, for all attempts)

from paddlenlp_ext.cli.run_finetune import run_finetune
from paddlenlp_ext.config.run_config import GRPO_SECTIONS, PREFERENCE_SECTIONS, SECTIONS
from paddlenlp_ext.generation.continuous_batching import Engine
from paddlenlp_ext.trainer.callbacks import loss_plot
from paddlenlp_ext.utils.run_command import run_command
from paddlenlp_ext.utils.stop_signals import STOP_SIGNALS
from tests.common.models import write_tiny_data, write_tiny_model
from tests.stress.forked_processes import finish, ranks_of, start, stop_twice

COMMON = {
    "do_train": True,
    "num_train_epochs": 2,
    "per_device_train_batch_size": 3,
    "learning_rate": 1e-2,
    "max_length": 32,
    "src_length": 16,
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 2,
    "disable_tqdm": True,
    "device": "cpu",
    "resume_from_checkpoint": "auto",
}
LORA = {"lora": True, "lora_rank": 4, "lora_dropout": 0.2}
RECIPES: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "full": {"weight_decay": 0.1},
    "full, async": {"weight_decay": 0.1, "use_async_save": True},
    "packed": {**LORA, "zero_padding": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
    "streamed": {**LORA, "lazy": True, "max_steps": 8},
    "preference": {**LORA, "loss_type": "sigmoid"},
    "grpo": {
        **LORA,
        "lora_dropout": 0.0,
        "num_generations": 3,
        "num_iterations": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "max_new_tokens": 6,
        "beta": 0.1,
    },
    "two ranks": {**LORA, "gradient_accumulation_steps": 1},
}
TIMES = ("per_second", "runtime", "seconds", "peak_memory")
SECTIONS_OF = {"preference": PREFERENCE_SECTIONS, "grpo": GRPO_SECTIONS}
REWARDS = """
def even(completion_ids, **columns):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
"""
EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")


def main() -> None:
    """Run the recipes in turn until the wanted number of kills or stops is reached; exit with 1 if a run differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12, help="number of kills in total")
    parser.add_argument("--signals", type=int, default=0, help="number of runs with two stop signals, instead of kills")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="kinds of runs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments")
    arguments = parser.parse_args()
    loss_plot.plot_loss = lambda log_history, path: None  # takes longer than the runs
    draw = random.Random(arguments.seed)
    folder = Path(tempfile.mkdtemp())  # a TemporaryDirectory would be removed by the exit of each process
    try:
        finish(lambda: write_inputs(folder), folder / "inputs.log")
        unbroken = {recipe: Unbroken(folder, recipe) for recipe in arguments.recipes}
        if arguments.signals:
            stop_runs(list(unbroken.values()), arguments.signals, draw)
        else:
            kill_runs(unbroken, arguments.kills, draw)
    finally:
        shutil.rmtree(folder)


def kill_runs(unbroken: dict[str, Unbroken], number: int, draw: random.Random) -> None:
    """Kill and resume runs until `number` kills are reached."""
    kills = Counter[str]()
    while kills.total() < number:
        for recipe, expected in unbroken.items():
            kills[recipe] += expected.kill_and_resume(draw)
            print(f"{kills.total()} kills: {dict(kills)}", flush=True)
    print(f"{kills.total()} kills; every run ended with the bits of the unbroken one")


def stop_runs(unbroken: list[Unbroken], number: int, draw: random.Random) -> None:
    """Stop and resume runs until in `number` runs the second signal arrived while the run was stopping."""
    times: list[float] = []
    num_runs = 0
    while len(times) < number:
        seconds = unbroken[num_runs % len(unbroken)].stop_and_resume(draw)
        num_runs += 1
        times += [] if seconds is None else [seconds]
        slowest = f"; ended at most {max(times):.3f} s after it" if times else ""
        print(f"{num_runs} runs, {len(times)} with a second signal while stopping{slowest}", flush=True)
    print(
        f"{num_runs} runs with two signals; every run ended with the bits of the unbroken one\n"
        f"seconds from the second signal to the end in {len(times)} runs: median {statistics.median(times):.3f}, "
        f"maximum {max(times):.3f}"
    )


class Unbroken:
    """Outcome and duration of a recipe's run that is not killed.

    Args:
        folder: folder with the model and the data.
        recipe: name of the recipe.
    """

    def __init__(self, folder: Path, recipe: str) -> None:
        self.folder, self.recipe = folder, recipe
        started = time.monotonic()
        counter = folder / "operations"
        run = folder / f"{recipe} unbroken"
        self.attempt(run, count_in=counter)
        self.seconds, self.num_operations = time.monotonic() - started, max(map(int, counter.read_text().split()))
        self.outcome = outcome(run)

    def kill_and_resume(self, draw: random.Random) -> int:
        """Kill a run one to three times, finish it and compare it; return the number of kills."""
        run, num_kills = self.folder / f"{self.recipe} killed", 0
        moments = []
        for _ in range(draw.choice((1, 1, 2, 3))):
            if draw.random() < 0.5:
                moments.append({"after": draw.uniform(0.0, self.seconds)})
            else:
                moments.append({"operation": draw.randint(1, self.num_operations)})
            num_kills += self.attempt(run, **moments[-1])
        self.resume_and_compare(run, f"killed at {moments}")
        return num_kills

    def stop_and_resume(self, draw: random.Random) -> float | None:
        """Send two stop signals to a run, resume it and compare it.

        Returns:
            The time from the second signal to the run's end in seconds; None if the run had ended before.
        """
        run, log = self.folder / f"{self.recipe} stopped", self.folder / f"{self.recipe} stopped.log"
        log.unlink(missing_ok=True)
        delays = (draw.uniform(0.0, self.seconds), draw.uniform(0.0, draw.choice((0.03, 0.1, 0.3))))
        signals = [(delay, draw.choice(STOP_SIGNALS)) for delay in delays]
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the program has its handlers
        running = start(self.program(run), log, self.ranks(), leave=ctypes.pythonapi.Py_Exit)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        codes, seconds = stop_twice(running, signals)
        story = ", ".join(f"{number.name} after {delay:.3f} s" for delay, number in signals)
        # Negative: the signal arrived after the interpreter's exit had reset its handler. 1: another rank has ended.
        allowed = {0, *(code for _, number in signals for code in (128 + number, -number))}
        allowed |= {1} if len(codes) > 1 else set()
        text = log.read_text()
        if not set(codes) <= allowed or "Traceback" in text or (max(codes) > 0 and "stopped by" not in text):
            sys.exit(f"{self.recipe}, {story}: exit codes {codes}:\n{text[-4000:]}")
        self.resume_and_compare(run, f"stopped by {story}")
        return seconds

    def resume_and_compare(self, run: Path, story: str) -> None:
        """Finish a run, compare its outcome and remove it; exit with an error that tells the story of the run."""
        self.attempt(run)
        if (got := outcome(run)) != self.outcome:
            different = sorted(name for name in {*got, *self.outcome} if got.get(name) != self.outcome.get(name))
            kept = Path(tempfile.mkdtemp(prefix="killed-")) / "run"
            shutil.copytree(run, kept)
            sys.exit(f"{self.recipe}, {story}: {', '.join(different)} differ; the run is in {kept}")
        for path in (run, run.with_name(f"{run.name} cache")):
            shutil.rmtree(path, ignore_errors=True)

    def attempt(
        self, run: Path, after: float | None = None, operation: int | None = None, count_in: Path | None = None
    ) -> bool:
        """Run the recipe until it ends or is killed; return whether it was killed."""
        program = self.program(run)

        def work() -> None:
            operations = watch(run, operation)
            program()
            if count_in is not None:
                with open(count_in, "a") as file:
                    file.write(f"{operations[0]}\n")

        return finish(work, self.folder / f"{run.name}.log", after, self.ranks())

    def ranks(self) -> list[dict[str, str]]:
        """Return the environment of each process."""
        return ranks_of(2) if self.recipe == "two ranks" else [{}]

    def program(self, run: Path) -> Callable[[], None]:
        """Return a function that runs the recipe as a command does."""
        keys = {
            **COMMON,
            **RECIPES[self.recipe],
            "output_dir": str(run),
            "model_name_or_path": str(self.folder / "model"),
            "dataset_name_or_path": str(self.folder / ("pairs" if self.recipe == "preference" else "data")),
            "data_cache_dir": str(run.with_name(f"{run.name} cache")),
        }
        if self.recipe == "grpo":
            keys["reward_funcs"] = [f"{self.folder / 'rewards.py'}:even"]
        run_file = self.folder / "run.json"
        run_file.write_text(json.dumps(keys))
        sections = SECTIONS_OF.get(self.recipe, SECTIONS)

        def main(argv: Sequence[str]) -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            run_finetune(argv, sections)

        def run() -> None:
            for number in STOP_SIGNALS:  # a job in the background inherits ignored signals
                signal.signal(number, signal.SIG_DFL)
            run_command(main, [str(run_file)])

        return run


def watch(run: Path, last: int | None) -> list[int]:
    """Count a run's operations, and kill this process before the last one.

    Operations are those on files below the run's folder or its cache, and the steps of sampling.
    """
    operations, prefixes, sample = [0], (str(run), str(run.with_name(f".{run.name}"))), Engine.step

    def count() -> None:
        operations[0] += 1
        if operations[0] == last:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and str(arguments[0]).startswith(prefixes):
            count()

    def step(engine: Engine) -> bool:
        count()
        return sample(engine)

    sys.addaudithook(hook)
    Engine.step = step  # in this process, which was forked for the attempt
    return operations


def outcome(run: Path) -> dict[str, Any]:
    """Return sums of the final weights, the newest checkpoint's tensors and the rollouts, and the log without times."""
    newest = max(run.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    files = [*run.glob("*.safetensors"), *newest.glob("*.safetensors"), *run.glob("rollouts/*")]
    history = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "steps": newest.name,
        "log": [{k: v for k, v in entry.items() if not any(word in k for word in TIMES)} for entry in history],
        **{str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
    }


def write_inputs(folder: Path) -> None:
    """Write the tiny model, rows and pairs."""
    write_tiny_model(folder / "model")
    write_tiny_data(folder / "data")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "pairs").mkdir()
    rows = [json.loads(line) for line in (folder / "data" / "train.json").read_text().splitlines()]
    pairs = [{"src": [row["src"]], "tgt": [], "response": [row["tgt"], " lime"], "sort": [1, 0]} for row in rows]
    (folder / "pairs" / "train.json").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


if __name__ == "__main__":
    main()
