"""DPO of SmolLM2: rewards of unseen pairs by step, in one picture.

    python -m benchmarks.preference_learning [--rows 512 --dev_rows 128 --out FOLDER] [--key value ...]

The pairs are made from the questions of the built-in dataset `inflection` that have an irregular answer. The chosen
answer is the irregular word ("feet"), and the rejected answer is the word that the regular rule would give ("foots").
Words of the dev rows do not occur in training. Further keys are keys of llm/run_dpo.py, such as `--loss_type ipo`.
Writes preference.png and preference.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import ROOT, STARTED_WITH
from benchmarks.measure import environment
from benchmarks.ours import MODEL
from paddlenlp_ext.data.readers.inflection import FORMS, read_inflection
from paddlenlp_ext.utils.run_command import run_command

ENDINGS = {form.question: form.ending for forms in FORMS.values() for form in forms}
KEYS = {
    "model_name_or_path": MODEL,
    **dict.fromkeys(("do_train", "do_eval", "lora", "zero_padding", "overwrite_output_dir"), "true"),
    "lora_rank": "8",
    "loss_type": "sigmoid",
    "learning_rate": "2e-5",
    "num_train_epochs": "1",
    "per_device_train_batch_size": "1",
    "per_device_eval_batch_size": "16",
    "max_seq_len": "512",
    "logging_steps": "1",
    "evaluation_strategy": "steps",
    "eval_steps": "4",
    "device": "cpu",
}


def write_pairs(split: str, count: int, file: Path) -> None:
    """Write the first `count` irregular forms of a split of `inflection` as pairs."""
    pairs = filter(None, (to_pair(row.value) for row in read_inflection(split)))
    file.write_text("".join(json.dumps(pair) + "\n" for pair in itertools.islice(pairs, count)), encoding="utf-8")


def to_pair(row: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the pair of a question: its answer, and lemma + regular ending; None if the two are equal."""
    form, lemma, _ = row["src"].removeprefix("What is the ").split('"')
    regular = lemma + ENDINGS[form.strip()]
    return None if row["tgt"] == regular else {"prompt": row["src"], "chosen": row["tgt"], "rejected": regular}


def draw(evaluations: Sequence[Mapping[str, float]], target: Path) -> None:
    """Plot accuracy, and below it the mean rewards and their margin, over the steps."""
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    accuracy, rewards = figure.subplots(2, 1, sharex=True)
    steps = [entry["step"] for entry in evaluations]
    accuracy.plot(steps, [100 * entry["eval_rewards/accuracies"] for entry in evaluations], marker="o", markersize=3)
    accuracy.set_ylabel("correctly ranked pairs, %")
    accuracy.set_ylim(50, 101)
    for name, style in (("margins", "-"), ("chosen", "--"), ("rejected", ":")):
        values = [entry[f"eval_rewards/{name}"] for entry in evaluations]
        rewards.plot(steps, values, style, label="margin" if name == "margins" else name)
    rewards.set_ylabel("reward")
    rewards.set_xlabel("optimizer step")
    rewards.legend()
    for axes in (accuracy, rewards):
        axes.grid(alpha=0.3)
    figure.savefig(target, dpi=130)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--dev_rows", type=int, default=128)
    parser.add_argument("--out", type=Path, default=ROOT / "checkpoints" / "benchmarks" / "preference")
    args, keys = parser.parse_known_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    files = {"train_dataset_path": args.out / "train.jsonl", "dev_dataset_path": args.out / "dev.jsonl"}
    write_pairs("train", args.rows, files["train_dataset_path"])
    write_pairs("dev", args.dev_rows, files["dev_dataset_path"])
    own = {**KEYS, **{key: str(path) for key, path in files.items()}, "output_dir": str(args.out / "run")}
    command = [sys.executable, "llm/run_dpo.py", *(word for key, value in own.items() for word in (f"--{key}", value))]
    subprocess.run([*command, *keys], cwd=ROOT, env=STARTED_WITH, check=True)
    lines = (args.out / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    evaluations = [entry for entry in map(json.loads, lines) if "eval_rewards/margins" in entry]
    draw(evaluations, args.out / "preference.png")
    facts = {"keys": keys, "evaluations": evaluations, **environment("paddlepaddle")}
    (args.out / "preference.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    print(args.out / "preference.png")


if __name__ == "__main__":
    run_command(main)
