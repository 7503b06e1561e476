"""Compare the model for lm-eval with the harness's own model for Hugging Face (`hf`), over the same tiny model.

Run where paddlenlp_ext, lm-eval, PyTorch and transformers are installed (`make check-lm-eval`):

    python -m tests.golden.peer_checks.check_lm_eval FOLDER

FOLDER receives the model and a task. Log-likelihoods may differ by 1e-4; generated texts, and scores of the task in the
harness's report, must be equal.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from paddlenlp_ext.evaluation.lm_eval_harness import NAME, register_lm_eval_model
from tests.evaluation.tiny_model import MAX_LENGTH, write_model

TOLERANCE = 1e-4
PAIRS = [
    ("xa", "bok"),  # "a" and "b" merge across the border
    ("x ", "yok"),
    ("", "ok"),
    ("", "<s>ok"),
    ("<s>ok", "ab"),
    ("ok", "a"),
    ("ok", "ab"),
    ("ok", "ab, ab"),
    ("long " * 30, "end"),
    ("odd length", " " + "ok" * 11),
]
# Not periodic: lm-eval 0.4.13 mixes up windows of one text whose input tokens are equal.
TEXTS = [" ".join(f"ok{number}" for number in range(30)), "a", "ok"]
CONTEXTS = [
    ("ok a", {"until": ["b"], "max_gen_toks": 7}),
    ("xyz", {"until": [], "max_gen_toks": 5}),
    ("long " * 30, {"until": ["\n\n"], "max_gen_toks": 9}),
]
TASK = """task: tiny
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{q}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


def write_task(folder: Path) -> None:
    """Write the rows and the YAML file of a task of the harness."""
    letters = "abcdefghij"
    rows = [
        {"q": f"word {a}{b}", "choices": [a, b + a, "ok " + b], "answer": (ord(a) + ord(b)) % 3}
        for a in letters
        for b in letters[:3]
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tiny.yaml").write_text(TASK % (folder / "rows.jsonl"))


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    """Return requests of one kind."""
    return [Instance(kind, {}, own, number) for number, own in enumerate(arguments)]


def main(folder: Path) -> None:
    """Compare both models and exit with an error if they differ."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder)
    write_task(folder)
    own = register_lm_eval_model()(pretrained=str(folder), batch_size=3, device="cpu", dtype="float32")
    peer = HFLM(pretrained=str(folder), batch_size=3, device="cpu", dtype="float32")
    assert own.max_length == peer.max_length == MAX_LENGTH
    differences = []
    found = [model.loglikelihood(requests("loglikelihood", PAIRS)) for model in (own, peer)]
    differences += [abs(a[0] - b[0]) for a, b in zip(*found, strict=True)]
    assert [each[1] for each in found[0]] == [each[1] for each in found[1]], found
    texts = [(text,) for text in TEXTS]
    rolling = [model.loglikelihood_rolling(requests("loglikelihood_rolling", texts)) for model in (own, peer)]
    differences += [abs(a - b) for a, b in zip(*rolling, strict=True)]
    answers = [model.generate_until(requests("generate_until", CONTEXTS)) for model in (own, peer)]
    assert answers[0] == answers[1], answers
    tasks = TaskManager(include_path=str(folder))
    options = {"tasks": ["tiny"], "task_manager": tasks, "bootstrap_iters": 0}
    arguments = f"pretrained={folder},dtype=float32"
    reports = [
        lm_eval.simple_evaluate(model=name, model_args=arguments, batch_size=4, device="cpu", **options)["results"]
        for name in (NAME, "hf")
    ]
    assert reports[0] == reports[1], reports
    print(f"log-likelihoods differ by at most {max(differences):.2g}; report {reports[0]}")
    if max(differences) > TOLERANCE:
        sys.exit(f"{max(differences):.2g} is more than {TOLERANCE}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
