"""Fine-tune a real model on this machine: score before, train, score after, merge, ask the merged model.

Every step is a command that a user would type; this script runs them one after the other and reads what they wrote.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "llm/config/smollm2/lora_argument.json"
MODEL = "smollm2-135m-instruct"
FOLDER = Path("checkpoints/quickstart")
BEFORE, ADAPTER, MERGED = FOLDER / "before", FOLDER / "lora", FOLDER / "merged"
QUESTION_FILE, ANSWER_FILE = FOLDER / "question.json", FOLDER / "answer.json"

console = Console(highlight=False)


def run(title: str, *command: object) -> None:
    """Show and run one command of the project from its root; a failure ends the quick start with its exit code."""
    words = [str(word) for word in command]
    console.print(f"\n[bold]{title}[/bold]\n[dim]$ python {' '.join(words)}[/dim]")
    code = subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode
    if code != 0:
        sys.exit(code)


def read_results(folder: Path) -> tuple[dict[str, float], list[dict[str, str]]]:
    """Return the scores of an evaluation, and the generated answers in the order of the eval rows."""
    scores = json.loads((ROOT / folder / "eval_results.json").read_text(encoding="utf-8"))
    lines = (ROOT / folder / "generated_output.json").read_text(encoding="utf-8").splitlines()
    return scores, [json.loads(line) for line in lines]


def show(seconds: float) -> None:
    """Print the scores and three answers before and after, and where everything lies."""
    (before, answers_before), (after, answers_after) = read_results(BEFORE), read_results(ADAPTER)
    scores = Table(title=f"\nDev score on {len(answers_after)} held-out words", title_justify="left")
    for heading in ("", "before", "after"):
        scores.add_column(heading, justify="left" if not heading else "right")
    scores.add_row("exact match", f"{before['eval_exact_match']:.1%}", f"{after['eval_exact_match']:.1%}")
    named = [share_naming_the_word(answers) for answers in (answers_before, answers_after)]
    scores.add_row("the right word is in the answer", f"{named[0]:.1%}", f"{named[1]:.1%}")
    console.print(scores)

    samples = Table(title="The first three questions", title_justify="left")
    for heading in ("question", "right answer", "before", "after"):
        samples.add_column(heading, max_width=44)
    for old, new in zip(answers_before[:3], answers_after[:3], strict=True):
        samples.add_row(new["src"], new["tgt"], shorten(old["output"]), shorten(new["output"]))
    console.print(samples)

    answer = json.loads((ROOT / ANSWER_FILE).read_text(encoding="utf-8").splitlines()[0])
    console.print(f"The merged model, asked: {answer['src']}\n        it answers: [bold]{answer['output']}[/bold]\n")
    for what, where in [("adapter", ADAPTER), ("loss curve", ADAPTER / "loss.png"), ("merged model", MERGED)]:
        console.print(f"{what:>12}: {where}")
    console.print(f"\nDone in {seconds:.0f} s.")


def share_naming_the_word(answers: list[dict[str, str]]) -> float:
    """Return the share of answers that contain the right word, which also counts answers in whole sentences."""
    return sum(row["tgt"].lower() in re.findall(r"[a-z]+", row["output"].lower()) for row in answers) / len(answers)


def shorten(text: str, limit: int = 80) -> str:
    """One line of at most `limit` characters."""
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def main() -> None:
    start = time.monotonic()
    fresh = ("--overwrite_output_dir", "true")
    run("1. How well does the model do as it is?",
        "llm/run_finetune.py", CONFIG, "--do_train", "false", "--output_dir", BEFORE, *fresh)  # fmt: skip
    run("2. Fine-tune it with LoRA", "llm/run_finetune.py", CONFIG, "--output_dir", ADAPTER, *fresh)
    run("3. Merge the adapter into the model",
        "llm/merge_lora_params.py", "--model_name_or_path", MODEL, "--lora_path", ADAPTER, "--output_path", MERGED,
        "--device", "cpu", "--overwrite")  # fmt: skip
    _, answers = read_results(ADAPTER)
    question = {"src": answers[0]["src"], "tgt": answers[0]["tgt"]}
    (ROOT / QUESTION_FILE).write_text(json.dumps(question) + "\n", encoding="utf-8")
    run("4. Ask the merged model",
        "llm/predict/predictor.py", "--model_name_or_path", MERGED, "--data_file", QUESTION_FILE,
        "--output_file", ANSWER_FILE, "--decode_strategy", "greedy_search", "--max_length", "32")  # fmt: skip
    show(time.monotonic() - start)


if __name__ == "__main__":
    main()
