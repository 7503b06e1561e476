"""Perplexity by position beyond a model's trained context: plain rotary embedding, YaRN, and YaRN with PoSE.

    python -m benchmarks.long_context OUT.png [--model smollm2-135m-instruct --factor 2 --steps 100 --rows 2048]

Each variant is fine-tuned by LoRA on rows of `--rows` tokens and evaluated on held-out documents as long as the
extended context. The texts are the long files of Python's standard library, or the files of `--texts FOLDER`; every
fourth file is held out. Writes the picture and, next to it, the values as JSON. Further keys, such as `--bf16 true`, go
to every run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

import paddle
from matplotlib.figure import Figure

from benchmarks import ROOT
from benchmarks.measure import environment
from paddlenlp_ext import AutoModelForCausalLM, AutoPeftModelForCausalLM, AutoTokenizer
from paddlenlp_ext.config import load_run_config
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.trainer.finetune import run_training
from paddlenlp_ext.utils.run_command import run_command

VARIANTS = {
    "plain rotary": "--strategy_name RotaryEmbedding",
    "YaRN": "--strategy_name YaRNScalingRotaryEmbedding",
    "YaRN, trained with PoSE": "--strategy_name YaRNScalingRotaryEmbedding --use_pose_convert true",
}
KEYS = (
    "--model_name_or_path {model} --dataset_name_or_path {work}/data --output_dir {out} --overwrite_output_dir true "
    "--do_train true --autoregressive true --max_length {rows} --src_length {rows} --per_device_train_batch_size 1 "
    "--max_steps {steps} --logging_steps 10 --device cpu --lora true --lora_rank 8 --learning_rate 5e-4 "
    "--lr_scheduler_type constant_with_warmup --warmup_ratio 0.05 "
    "--use_long_sequence_strategies true --rope_scaling_factor {factor}"
)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument(
        "--factor", type=float, default=2.0, help="extended context length divided by the trained context length"
    )
    parser.add_argument(
        "--trained", type=int, help="trained context length; unset: the context length in the model's config.json"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=2048, help="number of tokens of a training row")
    parser.add_argument("--documents", type=int, default=4, help="number of held-out documents")
    parser.add_argument("--bins", type=int, default=16, help="number of ranges of positions")
    parser.add_argument("--texts", type=Path, default=Path(sysconfig.get_path("stdlib")), help="folder of texts")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "long_context", help="folder of the runs")
    args, keys = parser.parse_known_args(argv)
    trained = args.trained or ModelSource.resolve(args.model).config["max_position_embeddings"]
    length = int(trained * args.factor)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    documents = write_rows(args, tokenizer, length)
    if args.trained:
        keys += ["--strategy_parameters", json.dumps({"original_max_position_embeddings": trained})]

    untrained = AutoModelForCausalLM.from_pretrained(args.model)
    curves = {"not fine-tuned": perplexities(untrained, documents, args.bins)}
    for name, switches in VARIANTS.items():
        folder = args.work / name.replace(",", "").replace(" ", "_")
        words = {**vars(args), "out": folder}
        run_training(load_run_config([*shlex.split(f"{KEYS} {switches}".format(**words)), *keys], peft_methods()))
        curves[name] = perplexities(AutoPeftModelForCausalLM.from_pretrained(folder), documents, args.bins)
        print(name, [round(value, 2) for value in curves[name]], flush=True)
    draw(curves, length, trained, args.out)
    content = {"trained": trained, "length": length, "steps": args.steps, "rows": args.rows, "perplexity": curves}
    args.out.with_suffix(".json").write_text(json.dumps({**content, **environment("paddlepaddle")}, indent=2) + "\n")


def write_rows(args: argparse.Namespace, tokenizer: Any, length: int) -> np.ndarray:
    """Write train.json with rows of the training texts; return the held-out documents, int64 [documents, length + 1].

    Raises:
        ValueError: too few texts are longer than `length` tokens.
    """
    held_out, rows = [], []
    for number, text in enumerate(texts(args.texts)):
        tokens = tokenizer(text)["input_ids"]
        if number % 4 == 0 and len(held_out) < args.documents and len(tokens) > length:
            held_out.append(tokens[: length + 1])
        elif number % 4:
            parts = (tokens[start : start + args.rows - 1] for start in range(0, len(tokens), args.rows - 1))
            rows += [json.dumps({"src": tokenizer.decode(part)}) for part in parts if len(part) > args.rows // 2]
    if len(held_out) < args.documents:
        raise ValueError(f"--texts {args.texts}: {len(held_out)} held-out files of more than {length} tokens")
    (args.work / "data").mkdir(parents=True, exist_ok=True)
    (args.work / "data" / "train.json").write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"{len(rows)} training rows, {len(held_out)} held-out documents of {length} tokens")
    return np.array(held_out, np.int64)


def texts(folder: Path, most: int = 120) -> Iterator[str]:
    """Yield the largest .py and .txt files of a folder, largest first."""
    files = [path for path in folder.iterdir() if path.suffix in (".py", ".txt")]
    for path in sorted(files, key=lambda path: (-path.stat().st_size, path.name))[:most]:
        yield path.read_text(encoding="utf-8", errors="ignore")


@paddle.no_grad()
def perplexities(model: Any, documents: np.ndarray, bins: int) -> list[float]:
    """Return the perplexity in each of several ranges of positions of equal size."""
    model.eval()
    losses = []
    for ids in documents:
        hidden = model.hidden_states(paddle.to_tensor(ids[None, :-1]))
        logprobs = model.token_logprobs(hidden.flatten(0, 1), paddle.to_tensor(ids[1:]))
        losses.append(-logprobs.numpy())
    by_bin = np.array_split(np.mean(losses, axis=0), bins)
    return [float(np.exp(part.mean())) for part in by_bin]


def draw(curves: Mapping[str, Sequence[float]], length: int, trained: int, target: Path) -> None:
    """Plot perplexity over position, with the trained context marked."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, values in curves.items():
        edges = np.linspace(0, length, len(values) + 1)
        axes.plot((edges[:-1] + edges[1:]) / 2, values, label=name, marker=".")
    axes.axvline(trained, color="gray", linestyle=":", label="trained context")
    axes.set_yscale("log")
    axes.set_xlabel("position")
    axes.set_ylabel("perplexity")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(target, dpi=130)


if __name__ == "__main__":
    run_command(main)
