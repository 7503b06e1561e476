"""Fill small file systems during runs and merges: each must end with a one-line error and intact checkpoints.

    python -m tests.stress.full_disk --every 4

Mounts a tmpfs of each size, which needs root.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paddlenlp_ext.cli.merge_peft_params import merge_arguments, run_merge
from paddlenlp_ext.trainer.callbacks import loss_plot
from paddlenlp_ext.trainer.checkpoints.output_dir import list_checkpoints
from paddlenlp_ext.trainer.checkpoints.resume import checkpoint_damage
from paddlenlp_ext.utils.run_command import run_command
from tests.stress.forked_processes import exit_code, finish
from tests.stress.kill_and_resume import COMMON, LORA, run_finetune, write_inputs


def main() -> None:
    """Run every program on file systems of all sizes up to one that is large enough."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--every", type=int, default=4, help="step between the sizes of the file systems, in KiB (a page has 4 KiB)"
    )
    every = parser.parse_args().every
    loss_plot.plot_loss = lambda log_history, path: None  # takes longer than the runs
    with tempfile.TemporaryDirectory() as name:
        folder, small = Path(name), Path(name) / "small"
        small.mkdir()
        finish(lambda: write_inputs(folder), folder / "inputs.log")
        keys = COMMON | {"model_name_or_path": str(folder / "model"), "dataset_name_or_path": str(folder / "data")}
        keys |= {"data_cache_dir": str(folder / "cache"), "output_dir": str(small / "run")}
        elsewhere = {"output_dir": str(folder / "run"), "overwrite_output_dir": True, "save_strategy": "no"}
        fill("LoRA", training(folder, keys | LORA), small, range(4, 400, every))
        fill("full", training(folder, keys), small, range(8, 2000, 6 * every))
        finish(training(folder, keys | LORA | elsewhere), folder / "adapter.log")
        arguments = ["--lora_path", str(folder / "run"), "--output_path", str(small / "merged")]
        fill("merge", lambda: run_merge(merge_arguments(arguments, None, "--lora_path")), small, range(4, 400, every))


def training(folder: Path, keys: dict[str, object]) -> Callable[[], None]:
    """Return a function that trains with the keys."""
    file = folder / f"keys {len(list(folder.glob('keys*')))}.json"
    file.write_text(json.dumps(keys))
    return lambda: run_finetune([str(file)])


def fill(name: str, work: Callable[[], object], small: Path, sizes: range) -> None:
    """Run `work` on a file system of each size, and print each outcome with its count; exit with 1 after a defect."""
    ends, log = Counter[str](), small.parent / "fill.log"
    for size in sizes:
        log.unlink(missing_ok=True)
        with mounted(small, size):
            code = exit_code(lambda: run_command(lambda argv: work(), []), log)
            output = log.read_text()
            damaged = [str(path) for path in list_checkpoints(small / "run").values() if checkpoint_damage(path)]
            drafts = [str(path) for path in small.rglob(".*.incomplete")]
        errors = [line for line in output.splitlines() if line.startswith("error: ")]
        if code not in (0, 2) or len(errors) != code // 2 or "Traceback" in output or damaged or drafts:
            sys.exit(f"{name} with {size} KiB ended with {code}, {damaged + drafts}:\n{output[-4000:]}")
        ends[errors[0].replace(str(small), "") if errors else "success"] += 1
    for end, number in ends.most_common():
        print(f"{name}: {number} x {end}", flush=True)
    if ends["success"] in (0, ends.total()):
        sys.exit(f"{name}: the sizes are too small or too large")


@contextmanager
def mounted(folder: Path, size: int) -> Iterator[None]:
    """Mount a file system of `size` KiB at a folder."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


if __name__ == "__main__":
    main()
