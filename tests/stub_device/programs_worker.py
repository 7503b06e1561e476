"""Run the programs of llm/ on a device with a tiny model; print their results: programs_worker.py DEVICE FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paddlenlp_ext.evaluation.lm_eval_harness import LMEvalModel
from paddlenlp_ext.trainer.callbacks import loss_plot
from tests.common.scripts import LLM, load_script
from tests.evaluation.tiny_model import MAX_LENGTH, write_model
from tests.stub_device.shipped_worker import write_rows

QUIZ = [
    {"q": "red fig", "choices": ["fig red", "lime"], "answer": 0},
    {"q": "lime", "choices": ["a", "b"], "answer": 1},
]
TASKS = {
    "quiz": {"task": "multiple_choice", "data_file": "quiz.jsonl", "prompt": "{q}", "chat": False},
    "answers": {"task": "generation", "data_file": "data/dev.json", "max_new_tokens": 3, "metrics": ["f1"], "limit": 3},
    "loss": {"task": "perplexity", "data_file": "data/dev.json", "limit": 5},
}


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main(device: str, folder: str) -> None:
    loss_plot.plot_loss = lambda log_history, path: None
    path = Path(folder)
    write_rows(path)
    write_model(model := path / "model")

    def run(script: str, *words: object, **keys: object) -> None:
        """Run a script with the device and keys."""
        options = {"device": device, **keys}
        arguments = [*words, *(word for key, value in options.items() for word in (f"--{key}", value))]
        load_script(LLM / f"{script}.py").main([str(word) for word in arguments])

    def answers(name: str, **keys: object) -> list[str]:
        """Return the predictor's answers."""
        lengths = {"src_length": 40, "max_length": 5, "dtype": "float32", "batch_size": 3}
        run("predict/predictor", data_file=path / "data" / "dev.json", output_file=path / name, **lengths | keys)
        return [line["output"] for line in lines_of(path / name)]

    training = {"do_train": True, "max_steps": 2, "learning_rate": 1e-2, "data_cache_dir": path / "cache"}
    training |= {"max_length": MAX_LENGTH, "src_length": 30}
    training |= {"model_name_or_path": model, "disable_tqdm": True, "report_to": "none"}
    run("run_finetune", lora=True, dataset_name_or_path=path / "data", output_dir=path / "lora", **training)
    run("run_reward", train_dataset_path=path / "pairs.jsonl", output_dir=path / "reward", **training)
    found: dict[str, Any] = {"adapter": answers("adapter.json", model_name_or_path=path / "lora")}
    found["beams"] = answers("beams.json", model_name_or_path=model, decode_strategy="beam_search", num_beams=2)
    found["int8"] = answers("int8.json", model_name_or_path=model, quant_type="weight_only_int8")
    run("predict/export_model", model_name_or_path=model, output_path=path / "graph", dtype="float32")
    found["graph"] = answers("graph.json", model_name_or_path=path / "graph", mode="static")
    gguf = path / "model.gguf"
    run("export_gguf", model_name_or_path=model, lora_path=path / "lora", output_file=gguf, outtype="f32")
    found["gguf"] = answers("gguf.json", model_name_or_path=gguf)
    rewards = {"model_name_or_path": path / "reward", "data_file": path / "pairs.jsonl"}
    run("predict/reward_predictor", output_file=path / "rewards.jsonl", **rewards)
    found["rewards"] = [line["rewards"] for line in lines_of(path / "rewards.jsonl")]
    (path / "quiz.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUIZ))
    for name, task in TASKS.items():
        (path / f"{name}.json").write_text(json.dumps(task))
    tasks = ",".join(str(path / f"{name}.json") for name in TASKS)
    run("run_evaluation", model_name_or_path=model, tasks=tasks, output_dir=path / "scores", dtype="float32")
    results = json.loads((path / "scores" / "results.json").read_text())["results"]
    found["scores"] = [each["value"] for line in results for each in line["models"].values()]
    harness = LMEvalModel(str(model), device=device, dtype="float32")
    found["harness"] = [value for value, _ in harness.loglikelihood([SimpleNamespace(args=("red", " fig"))])]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
