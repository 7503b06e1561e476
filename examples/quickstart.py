"""Fine-tune SmolLM2: evaluate, train, evaluate again, merge, and query the merged model.

Each step runs a command, which is printed. At the end, the script prints the results of these commands.
"""

from __future__ import annotations

import json
import os
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
    """Print and run a Python command in the root of the project; exit with its code if it fails."""
    words = [str(word) for word in command]
    console.print(f"\n[bold]{title}[/bold]\n[dim]$ python {' '.join(words)}[/dim]")
    code = subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode
    if code != 0:
        sys.exit(code)


def read_results(folder: Path) -> tuple[dict[str, float], list[dict[str, str]]]:
    """Return the scores of an evaluation, and the answers with their rows."""
    scores = json.loads((ROOT / folder / "eval_results.json").read_text(encoding="utf-8"))
    lines = (ROOT / folder / "generated_output.json").read_text(encoding="utf-8").splitlines()
    return scores, [json.loads(line) for line in lines]


def show(seconds: float) -> None:
    """Print scores and three answers before and after training, and the paths of all results."""
    (before, answers_before), (after, answers_after) = read_results(BEFORE), read_results(ADAPTER)
    scores = Table(title=f"\nScore on {len(answers_after)} held-out words", title_justify="left")
    for heading in ("", "before", "after"):
        scores.add_column(heading, justify="left" if not heading else "right")
    scores.add_row("exact match", f"{before['eval_exact_match']:.1%}", f"{after['eval_exact_match']:.1%}")
    containing = [fraction_with_right_word(answers) for answers in (answers_before, answers_after)]
    scores.add_row("answer contains the right word", f"{containing[0]:.1%}", f"{containing[1]:.1%}")
    console.print(scores)

    samples = Table(title="The first three questions", title_justify="left")
    for heading in ("question", "right answer", "before", "after"):
        samples.add_column(heading, max_width=44)
    for old, new in zip(answers_before[:3], answers_after[:3], strict=True):
        samples.add_row(new["src"], new["tgt"], shorten(old["output"]), shorten(new["output"]))
    console.print(samples)

    answer = json.loads((ROOT / ANSWER_FILE).read_text(encoding="utf-8").splitlines()[0])
    console.print(
        f"The merged model is asked: {answer['src']}\n               it answers: [bold]{answer['output']}[/bold]\n"
    )
    for what, where in [("adapter", ADAPTER), ("report", ADAPTER / "report.html"), ("merged model", MERGED)]:
        console.print(f"{what:>12}: {where}")
    console.print(f"\nDone in {seconds:.0f} s.")
    if Path(sys.prefix) == ROOT / ".venv" and "VIRTUAL_ENV" not in os.environ:
        console.print("To type such commands yourself, first run: [bold]source .venv/bin/activate[/bold]")


def fraction_with_right_word(answers: list[dict[str, str]]) -> float:
    """Return the fraction of answers that contain the right word."""
    return sum(row["tgt"].lower() in re.findall(r"[a-z]+", row["output"].lower()) for row in answers) / len(answers)


def shorten(text: str, limit: int = 80) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def main() -> None:
    start = time.monotonic()
    fresh = ("--overwrite_output_dir", "true")
    run("1. Evaluate the model before training",
        "llm/run_finetune.py", CONFIG, "--do_train", "false", "--output_dir", BEFORE, *fresh)  # fmt: skip
    run("2. Fine-tune it with LoRA", "llm/run_finetune.py", CONFIG, "--output_dir", ADAPTER, *fresh)
    run("3. Merge the adapter into the model",
        "llm/merge_lora_params.py", "--model_name_or_path", MODEL, "--lora_path", ADAPTER, "--output_path", MERGED,
        "--device", "cpu", "--overwrite")  # fmt: skip
    _, answers = read_results(ADAPTER)
    question = {"src": answers[0]["src"], "tgt": answers[0]["tgt"]}
    (ROOT / QUESTION_FILE).write_text(json.dumps(question) + "\n", encoding="utf-8")
    run("4. Query the merged model",
        "llm/predict/predictor.py", "--model_name_or_path", MERGED, "--data_file", QUESTION_FILE,
        "--output_file", ANSWER_FILE, "--decode_strategy", "greedy_search", "--max_length", "32")  # fmt: skip
    run("5. Write the report of the run, with the answers before and after training",
        "-m", "paddlenlp_ext", "report", ADAPTER, "--before", BEFORE)  # fmt: skip
    show(time.monotonic() - start)


if __name__ == "__main__":
    main()
