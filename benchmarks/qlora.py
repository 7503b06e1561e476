"""QLoRA on SmolLM2 compared with LoRA: memory, time and loss of quantized bases.

    python -m benchmarks.qlora cost OUT.json [--model smollm2-135m-instruct --documents 4 --length 512 --steps 3]
    python -m benchmarks.qlora loss OUT.png --dataset GSM8K_FOLDER [--steps 200 --work FOLDER]

`cost` prints the bytes of the base's weights, the peak memory of a separate process for each format, and the time of
the fastest step, with steps of all formats in turn in one process. `loss` runs `llm/run_finetune.py` with the same rows
and seed for each format, draws all loss curves in one plot, and prints a table of the last losses; further keys, such
as `--bf16 true`, go to every run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

from benchmarks import ROOT
from benchmarks.compare_losses import read_losses
from benchmarks.measure import environment, random_documents
from benchmarks.ours import packed_batch, run_config, training_step
from paddlenlp_ext import AutoModelForCausalLM
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantized_layers
from paddlenlp_ext.trainer.build_model import build_model
from paddlenlp_ext.utils.run_command import run_command

KINDS: dict[str, QuantizationConfig | None] = {
    "LoRA": None,
    "int8": QuantizationConfig(algo="weight_only_int8"),
    "int4": QuantizationConfig(algo="weight_only_int4"),
    "fp4": QuantizationConfig(algo="fp4", double_quant=True),
    "nf4": QuantizationConfig(algo="nf4", double_quant=True),
}
STARTS = {"nf4, LoftQ": "loftq", "nf4, QERA": "qera"}
"""Methods on an nf4 base. Only losses are compared: LoftQ costs as much as nf4, and QERA as nf4 with twice the rank."""
_LAST = 20
"""Number of last steps whose mean loss is compared."""


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "loss"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, help="number of steps; default: 3 for cost, 200 for loss")
    parser.add_argument("--dataset", help="folder with train.json; same as --dataset_name_or_path of a run")
    parser.add_argument("--work", type=Path, default=Path("build/qlora"), help="folder for the runs of `loss`")
    args, keys = parser.parse_known_args(argv)
    if args.what == "cost":
        if keys:
            parser.error(f"cost takes no keys of a run: {' '.join(keys)}")
        rows = cost(args.model, args.documents, args.length, args.steps or 3)
        args.out.write_text(json.dumps({"rows": rows, **environment("paddlepaddle")}, indent=2) + "\n")
    else:
        if args.dataset is None:
            parser.error("loss needs --dataset")
        compare_losses(args.out, args.model, args.dataset, args.steps or 200, args.work, keys)


def cost(model: str, documents: int, length: int, steps: int) -> list[dict[str, object]]:
    """Measure each kind; print a Markdown table and write one row per kind."""
    peaks = {kind: peak_gb(model, documents, length, options) for kind, options in KINDS.items()}
    seconds = time_in_turn(model, documents, length, steps)
    rows: list[dict[str, object]] = []
    print("| base | bytes of the quantized layers | bits per weight | peak memory | step time |\n|---|---|---|---|---|")
    for kind, options in KINDS.items():
        num_weights, num_bytes = weight_bytes(model, options)
        peak = peaks[kind]
        row = {"kind": kind, "weight_bytes": num_bytes, "bits": 8 * num_bytes / num_weights, "peak_gb": peak}
        rows.append({**row, "seconds": seconds[kind]})
        slower = seconds[kind] / seconds["LoRA"]
        cells = (kind, f"{num_bytes / 1e6:.1f} MB", f"{row['bits']:.2f}", f"{peak:.2f} GB")
        print(f"| {' | '.join(cells)} | {seconds[kind]:.2f} s (x {slower:.2f}) |", flush=True)
    return rows


def weight_bytes(model: str, options: QuantizationConfig | None) -> tuple[int, int]:
    """Return the number of weights in the layers that can be quantized, and their bytes."""
    quantized = AutoModelForCausalLM.from_pretrained(model, quantization_config=options or KINDS["nf4"])
    layers = quantized_layers(quantized).values()
    num_weights = sum(layer.in_features * layer.out_features for layer in layers)
    return num_weights, 4 * num_weights if options is None else sum(layer.num_bytes for layer in layers)


def peak_gb(model: str, documents: int, length: int, options: QuantizationConfig | None) -> float:
    """Return the peak memory in GB of a process that loads the model, adds the adapter and runs two steps."""
    command = [sys.executable, "-m", "benchmarks.train_step", "--steps", 1, "--documents", documents]
    command += ["--length", length, *lora_keys(model, options)]
    output = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout
    return json.loads(output.splitlines()[-1])["peak_memory_gb"]


def time_in_turn(model: str, documents: int, length: int, steps: int) -> dict[str, float]:
    """Return seconds of the fastest step of each kind; steps of all kinds alternate, under the same load."""
    every = {kind: stepper(model, documents, length, options) for kind, options in KINDS.items()}
    fastest = dict.fromkeys(every, float("inf"))
    for round_number in range(steps + 1):
        for kind, step in every.items():
            start = time.perf_counter()
            step()
            if round_number:  # the first round is a warm-up
                fastest[kind] = min(fastest[kind], time.perf_counter() - start)
    return fastest


def stepper(model: str, documents: int, length: int, options: QuantizationConfig | None) -> Callable[[], object]:
    """Return a function that runs one training step of LoRA on a base model with this quantization."""
    config = run_config(lora_keys(model, options))
    return training_step(
        build_model(ModelSource.from_config(config.model), config),
        config,
        packed_batch(random_documents(documents, length), 1.0),
    )


def lora_keys(model: str, options: QuantizationConfig | None) -> list[str]:
    """Return the arguments that train LoRA of rank 8 on a base model with this quantization."""
    keys = ["--model_name_or_path", model, "--lora", "true", "--lora_rank", "8"]
    if options is not None:
        keys += ["--weight_quantize_algo", options.algo, "--weight_double_quant", str(options.double_quant).lower()]
    return keys


def compare_losses(out: Path, model: str, dataset: str, steps: int, work: Path, keys: Sequence[str]) -> None:
    """Train every kind, plot the curves, print the last losses and write them next to the plot."""
    runs = {kind: train(kind, options, model, dataset, steps, work, keys) for kind, options in KINDS.items()}
    for kind, switch in STARTS.items():
        runs[kind] = train(kind, KINDS["nf4"], model, dataset, steps, work, [*keys, f"--{switch}", "true"])
    named = [f"{kind}={run / 'metrics.jsonl'}" for kind, run in runs.items()]
    subprocess.run([sys.executable, "-m", "benchmarks.compare_losses", str(out), *named], check=True)
    last = {
        kind: float(np.mean(list(read_losses(str(run / "metrics.jsonl")).values())[-_LAST:]))
        for kind, run in runs.items()
    }
    print(f"| base | mean loss of the last {_LAST} of {steps} steps | relative to LoRA |\n|---|---|---|")
    for kind, loss in last.items():
        print(f"| {kind} | {loss:.4f} | {loss / last['LoRA'] - 1:+.2%} |")
    record = {"last_losses": last, "steps": steps, "keys": keys, **environment("paddlepaddle")}
    out.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")


def train(
    kind: str, options: QuantizationConfig | None, model: str, dataset: str, steps: int, work: Path, keys: Sequence[str]
) -> Path:
    """Run llm/run_finetune.py, unless a finished run of this kind exists; return the folder of the run."""
    folder = work / kind
    if (folder / "train_results.json").is_file():
        return folder
    settings: dict[str, object] = {
        "model_name_or_path": model,
        "dataset_name_or_path": dataset,
        "output_dir": folder,
        "max_steps": steps,
        "max_length": 256,
        "src_length": 128,
        "gradient_accumulation_steps": 1,
        "learning_rate": 5e-4,
        "warmup_steps": steps // 20,
        "logging_steps": 1,
        "do_eval": False,
        "eval_with_do_generation": False,
        "save_generation_output": False,
        "max_new_tokens": None,
        "max_evaluate_steps": None,
        "overwrite_output_dir": True,
    }
    if options is not None:
        settings |= {"weight_quantize_algo": options.algo, "weight_double_quant": options.double_quant}
    words = [
        f"--{key}={'null' if value is None else str(value).lower() if isinstance(value, bool) else value}"
        for key, value in settings.items()
    ]
    script, base = ROOT / "llm" / "run_finetune.py", ROOT / "llm/config/smollm2/lora_argument.json"
    subprocess.run([sys.executable, str(script), str(base), *words, *keys], check=True)
    return folder


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
