"""Kill small runs with SIGKILL and resume them: each must end with the bits of the run that was never killed.

    python -m tests.stress.kill_and_resume --kills 1000

Attempts are forked from a process that has imported everything and computed nothing, so they start in 0.1 seconds.
Half of the kills come after a random time. The others come before a random file operation (open, rename, mkdir, remove)
below the run's folder, which an audit hook counts: so half of the kills are in saves and caches.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paddlenlp_ext._runtime import configure_runtime

configure_runtime()

from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401 (imported once, for all attempts)

from paddlenlp_ext.cli.run_finetune import run_finetune
from paddlenlp_ext.config.run_config import PREFERENCE_SECTIONS, SECTIONS
from paddlenlp_ext.trainer.callbacks import loss_plot
from tests.common.models import write_tiny_data, write_tiny_model

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
    "two ranks": {**LORA, "gradient_accumulation_steps": 1},
}
TIMES = ("per_second", "runtime", "seconds", "peak_memory")
EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")
MAX_SECONDS = 120.0


def main() -> None:
    """Run the recipes in turn until the wanted number of kills is reached; exit with 1 if a run ends differently."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12, help="number of kills in total")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="kinds of runs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    arguments = parser.parse_args()
    loss_plot.plot_loss = lambda log_history, path: None  # takes longer than the runs
    draw, kills = random.Random(arguments.seed), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        finish(lambda: write_inputs(folder), folder / "inputs.log")
        unbroken = {recipe: Unbroken(folder, recipe) for recipe in arguments.recipes}
        while kills.total() < arguments.kills:
            for recipe, expected in unbroken.items():
                kills[recipe] += expected.kill_and_resume(draw)
                print(f"{kills.total()} kills: {dict(kills)}", flush=True)
    print(f"{kills.total()} kills; every run ended with the bits of the unbroken one")


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
        self.attempt(run)
        if (got := outcome(run)) != self.outcome:
            different = sorted(name for name in {*got, *self.outcome} if got.get(name) != self.outcome.get(name))
            kept = Path(tempfile.mkdtemp(prefix="killed-")) / "run"
            shutil.copytree(run, kept)
            sys.exit(f"{self.recipe}, killed at {moments}: {', '.join(different)} differ; the run is in {kept}")
        for path in (run, run.with_name(f"{run.name} cache")):
            shutil.rmtree(path, ignore_errors=True)
        return num_kills

    def attempt(
        self, run: Path, after: float | None = None, operation: int | None = None, count_in: Path | None = None
    ) -> bool:
        """Run the recipe until it ends or is killed; return whether it was killed."""
        keys = {
            **COMMON,
            **RECIPES[self.recipe],
            "output_dir": str(run),
            "model_name_or_path": str(self.folder / "model"),
            "dataset_name_or_path": str(self.folder / ("pairs" if self.recipe == "preference" else "data")),
            "data_cache_dir": str(run.with_name(f"{run.name} cache")),
        }
        run_file = self.folder / "run.json"
        run_file.write_text(json.dumps(keys))
        sections = PREFERENCE_SECTIONS if self.recipe == "preference" else SECTIONS
        log = self.folder / f"{run.name}.log"

        def work() -> None:
            operations = watch(run, operation)
            run_finetune([str(run_file)], sections)
            if count_in is not None:
                with open(count_in, "a") as file:
                    file.write(f"{operations[0]}\n")

        ranks = ranks_of(2) if self.recipe == "two ranks" else [{}]
        return finish(work, log, after, ranks)


def watch(run: Path, last: int | None) -> list[int]:
    """Count the operations on files below a run's folder or its cache, and kill this process before the last one."""
    operations, prefixes = [0], (str(run), str(run.with_name(f".{run.name}")))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and str(arguments[0]).startswith(prefixes):
            operations[0] += 1
            if operations[0] == last:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return operations


def finish(
    work: Callable[[], None], log: Path, after: float | None = None, ranks: list[dict[str, str]] | None = None
) -> bool:
    """Do `work` in forked processes; return whether they were killed.

    Args:
        work: function to call.
        log: file for the output.
        after: seconds until all processes are killed; None: they are not.
        ranks: environment of each process; None for one process.
    """
    read_end, write_end = os.pipe()
    running = {fork(work, log, variables, (read_end, write_end)) for variables in ranks or [{}]}
    os.close(read_end)
    os.close(write_end)
    ends = time.monotonic() + (MAX_SECONDS if after is None else after)
    was_killed = False
    while running:
        for process in list(running):
            done, status = os.waitpid(process, os.WNOHANG)
            if done and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                was_killed, ends = True, 0.0
            elif done and status and not was_killed:
                sys.exit(f"a run failed with status {status}:\n{log.read_text()[-4000:]}")
            running -= {process} if done else set()
        if time.monotonic() > ends and running:
            if after is None and not was_killed:
                sys.exit(f"a run hangs:\n{log.read_text()[-4000:]}")
            for process in running:
                os.kill(process, signal.SIGKILL)
            was_killed = True
        time.sleep(0.002)
    return was_killed


def fork(work: Callable[[], None], log: Path, variables: dict[str, str], others: tuple[int, int]) -> int:
    """Start a process that does `work` with more environment variables, and return its id.

    Rank 0 serves the key-value store of all ranks, so it ends after the others have closed their end of the pipe.
    """
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        with open(log, "a") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        os.environ.update(variables)
        is_first = variables.get("PADDLE_TRAINER_ID", "0") == "0"
        os.close(others[1] if is_first else others[0])
        work()
        if is_first:
            os.read(others[0], 1)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def exit_code(work: Callable[[], None], log: Path) -> int:
    """Do `work` in a forked process and return its exit code."""
    read_end, write_end = os.pipe()
    process = fork(work, log, {}, (read_end, write_end))
    os.close(read_end)
    os.close(write_end)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def ranks_of(size: int) -> list[dict[str, str]]:
    """Return the environment that Paddle's launcher gives to each of `size` processes over gloo."""
    ports = []
    for _ in range(size + 1):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    points = [f"127.0.0.1:{port}" for port in ports]
    return [
        {
            "PADDLE_MASTER": points[-1],
            "PADDLE_TRAINERS_NUM": str(size),
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(points[:-1]),
            "PADDLE_CURRENT_ENDPOINT": points[rank],
            "PADDLE_DISTRI_BACKEND": "gloo",
        }
        for rank in range(size)
    ]


def outcome(run: Path) -> dict[str, Any]:
    """Return sums of the final weights and of the newest checkpoint's tensors, and the log without times."""
    newest = max(run.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    tensors = [*run.glob("*.safetensors"), *newest.glob("*.safetensors")]
    history = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "steps": newest.name,
        "log": [{k: v for k, v in entry.items() if not any(word in k for word in TIMES)} for entry in history],
        **{str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in tensors},
    }


def write_inputs(folder: Path) -> None:
    """Write the tiny model, rows and pairs."""
    write_tiny_model(folder / "model")
    write_tiny_data(folder / "data")
    (folder / "pairs").mkdir()
    rows = [json.loads(line) for line in (folder / "data" / "train.json").read_text().splitlines()]
    pairs = [{"src": [row["src"]], "tgt": [], "response": [row["tgt"], " lime"], "sort": [1, 0]} for row in rows]
    (folder / "pairs" / "train.json").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


if __name__ == "__main__":
    main()
