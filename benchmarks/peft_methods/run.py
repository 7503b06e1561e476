"""Every adapter method and full fine-tuning on the same model, rows and tokens, with a small sweep of learning rates.

    python benchmarks/peft_methods/run.py --out checkpoints/peft_methods [--steps 100 --sweep 0.3 1 3 --methods lora_r8]

Each run is llm/run_finetune.py in a process of its own. Finished runs are not made again, so that a stopped command
goes on where it was. Leaves in OUT: runs.csv (every run), table.csv, table.md and table.png (each method at the
learning rate with the lowest dev loss). `--quick` does it all in little on a tiny random model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from entries import Entry, all_entries
from outcome import Outcome, read_outcome, write_outcomes

from measure import environment
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.utils.cli import run_command
from paddlenlp_ext.utils.suggest import did_you_mean

LAUNCHER = Path(__file__).resolve().parents[2] / "llm" / "run_finetune.py"


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("checkpoints/peft_methods"))
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dataset", default="inflection", help="built-in name, or a folder of train.json and dev.json")
    parser.add_argument("--methods", nargs="+", help="only these lines of the table")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--sweep", type=float, nargs="+", default=[0.3, 1.0, 3.0], help="multiples of a method's rate")
    parser.add_argument("--max_length", type=int, default=512, help="tokens of a pack")
    parser.add_argument("--packs", type=int, default=2, help="packs of an optimizer step")
    parser.add_argument("--eval_batches", type=int, default=8, help="batches of 25 dev rows")
    parser.add_argument("--max_new_tokens", type=int, default=16, help="0: no answers are generated, so no score")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="of every run")
    parser.add_argument("--quick", action="store_true", help="two steps of a tiny random model, one learning rate")
    return parser.parse_args(argv)


def shared_keys(args: argparse.Namespace) -> dict[str, Any]:
    """What all runs have in common."""
    keys: dict[str, Any] = {
        "model_name_or_path": args.model,
        "dataset_name_or_path": args.dataset,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": args.packs,
        "per_device_eval_batch_size": 25,
        "max_steps": args.steps,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "logging_steps": max(1, args.steps // 20),
        "max_length": args.max_length,
        "src_length": args.max_length // 2,
        "zero_padding": True,
        "greedy_zero_padding": True,
        "do_train": True,
        "do_eval": True,
        "max_evaluate_steps": args.eval_batches,
        "eval_with_do_generation": args.max_new_tokens > 0,
        "max_new_tokens": args.max_new_tokens or 1,
        "disable_tqdm": True,
        "seed": 42,
    }
    if args.quick:
        from tiny_inputs import make_tiny_inputs

        model, data = make_tiny_inputs(args.out)
        keys |= {"model_name_or_path": str(model), "dataset_name_or_path": str(data), "chat_template": "none"}
        keys |= {"max_steps": 2, "max_length": 32, "src_length": 16, "max_new_tokens": 4, "device": "cpu"}
        keys |= {"data_cache_dir": str(args.out / "cache"), "max_evaluate_steps": 1, "logging_steps": 1}
    return keys | {key: json.loads(value) for key, value in args.set}


def choose(entries: list[Entry], names: Sequence[str] | None) -> list[Entry]:
    """The entries of these names.

    Raises:
        ValueError: there is no such entry.
    """
    known = {entry.name: entry for entry in entries}
    for name in names or ():
        if name not in known:
            raise ValueError(f"--methods {name}: unknown{did_you_mean(name, list(known))} Known: {', '.join(known)}.")
    return [known[name] for name in names] if names else entries


def run_once(folder: Path, config: dict[str, Any]) -> bool:
    """Make the run unless it is there already with the same configuration; says whether it is there now."""
    done = folder / "finished.json"
    if done.is_file() and json.loads(done.read_text(encoding="utf-8")) == config:
        return True
    folder.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps({**config, "output_dir": str(folder / "out")}, indent=2), encoding="utf-8")
    started = time.perf_counter()
    with (folder / "run.log").open("w", encoding="utf-8") as log:
        command = [sys.executable, str(LAUNCHER), str(file), "--overwrite_output_dir", "true"]
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    print(f"  {time.perf_counter() - started:.0f} s" + (f", exit code {code}: {folder / 'run.log'}" if code else ""))
    if code == 0:
        done.write_text(json.dumps(config), encoding="utf-8")
    return code == 0


def main(argv: Sequence[str]) -> None:
    """Run what is missing, then write the table.

    Raises:
        ValueError: an unknown method, runs that can't be compared, or runs that failed.
    """
    args = parse_arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    shared, outcomes, failed = shared_keys(args), list[Outcome](), []
    entries = choose(all_entries(peft_methods()), args.methods)
    sweep = [1.0] if args.quick else args.sweep
    runs = [(entry, entry.learning_rate * factor) for entry in entries for factor in sweep]
    for number, (entry, rate) in enumerate(runs, start=1):
        print(f"[{number}/{len(runs)}] {entry.name}, learning rate {rate:.3g}", flush=True)
        folder = args.out / entry.name / f"{rate:.3g}"
        if run_once(folder, {**shared, "learning_rate": rate, **entry.keys}):
            outcomes.append(read_outcome(folder / "out", entry.name, rate))
        else:
            failed.append(f"{entry.name} at {rate:.3g}")
    if outcomes:
        facts = {"model": shared["model_name_or_path"], "rows": shared["dataset_name_or_path"]}
        facts |= {"steps": shared["max_steps"], "tokens": f"{outcomes[0].num_tokens:,}", "sweep": sweep}
        write_outcomes(args.out, outcomes, facts | environment("paddlepaddle"))
        print((args.out / "table.md").read_text(encoding="utf-8"))
    if failed:
        raise ValueError(f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}; their run.log says why.")


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
