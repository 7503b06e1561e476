"""Scores of int4 models from this library and llm-compressor: rounding, GPTQ and AWQ, on the same rows.

    python -m benchmarks.ptq OUT.json --dataset FOLDER [--rows 64 --eval_rows 100 --group_size 64] [--peer PYTHON]

Rows of FOLDER/train.json are used for calibration, and answers of FOLDER/dev.json are scored. PYTHON is the interpreter
of an environment with llm-compressor (benchmarks/peers/ptq.py). Every model is saved and loaded again, and this project
computes all scores: perplexity, and the divergence KL(full | quantized) from the full-precision model in nats per
token.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

import paddle

from benchmarks import ROOT
from benchmarks.measure import environment
from paddlenlp_ext import AutoModelForCausalLM
from paddlenlp_ext.checkpoint.quantized_formats.registry import LAYOUTS
from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.data.dataset import load_dataset
from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.models.post_training_quantization import quantize_after_training, save_packed, with_scale_dtype
from paddlenlp_ext.peft.merge.copy_model import copy_model
from paddlenlp_ext.quantization.ptq.integer_format import IntegerFormat
from paddlenlp_ext.quantization.ptq.quantize_matrix import PostTrainingOptions
from paddlenlp_ext.utils.run_command import run_command

_METHODS = ("rtn", "gptq", "awq")
_BATCH = 8


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--eval_rows", type=int, default=100)
    parser.add_argument("--group_size", type=int, default=64)
    parser.add_argument("--methods", nargs="+", choices=_METHODS, default=_METHODS)
    parser.add_argument("--asymmetric", action="store_true", help="use a zero point for each group")
    parser.add_argument(
        "--desc_act",
        action="store_true",
        help="GPTQ of this library rounds columns in the same order as llm-compressor",
    )
    parser.add_argument("--peer", type=Path, help="Python interpreter of an environment with llm-compressor")
    parser.add_argument("--work", type=Path, default=Path("build/ptq"))
    arguments = parser.parse_args(argv)
    base = copy_model(arguments.model, arguments.work / "base", dtype="float32", overwrite=True)
    calibration = [row.tokens for row in rows_of(arguments, base, "train", arguments.rows)]
    scored = rows_of(arguments, base, "dev", arguments.eval_rows)
    full = AutoModelForCausalLM.from_pretrained(base)
    results = {"full precision": score(full, full, scored)}
    print(results, flush=True)
    for method in arguments.methods:
        folders = {f"{method}, here": quantize_here}
        if arguments.peer is not None:
            folders[f"{method}, llm-compressor"] = quantize_by_peer
        for name, quantize in folders.items():
            start = time.perf_counter()
            folder = quantize(arguments, base, method, calibration)
            seconds = time.perf_counter() - start
            results[name] = {**score(AutoModelForCausalLM.from_pretrained(folder), full, scored), "seconds": seconds}
            print(name, results[name], flush=True)
    sizes = {"rows": len(calibration), "calibration tokens": sum(map(len, calibration))}
    sizes |= {"scored tokens": sum(int(row.loss_mask.sum()) for row in scored), "group size": arguments.group_size}
    described = {"environment": environment(), "zero points": arguments.asymmetric, **sizes, "results": results}
    arguments.out.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def rows_of(arguments: argparse.Namespace, base: Path, split: str, count: int) -> list[EncodedRow]:
    """Return the first rows of a split."""
    config = DataConfig(dataset_name_or_path=arguments.dataset)
    return load_dataset(config, split, load_tokenizer(base)).head(count)


def quantize_here(arguments: argparse.Namespace, base: Path, method: str, rows: list[np.ndarray]) -> Path:
    """Quantize with this project; return the folder."""
    symmetric = not arguments.asymmetric
    layout = LAYOUTS["compressed-tensors"](bits=4, group_size=arguments.group_size, symmetric=symmetric)
    integers = IntegerFormat(bits=4, group_size=arguments.group_size, symmetric=symmetric)
    options = PostTrainingOptions(method=method, integers=integers, act_order=arguments.desc_act)
    options = with_scale_dtype(options, layout, "float32")
    batches = [rows[first : first + _BATCH] for first in range(0, len(rows), _BATCH)] if options.needs_rows else []
    folder = arguments.work / f"{method}_here"
    folder.mkdir(parents=True, exist_ok=True)
    save_packed(quantize_after_training(ModelSource.resolve(base), options, batches, print), folder, layout, "float32")
    return folder


def quantize_by_peer(arguments: argparse.Namespace, base: Path, method: str, rows: list[np.ndarray]) -> Path:
    """Quantize with llm-compressor in its own environment; return the folder."""
    folder, tokens = arguments.work / f"{method}_peer", arguments.work / "rows.json"
    tokens.write_text(json.dumps([row.tolist() for row in rows]), encoding="utf-8")
    words = [arguments.peer, "-m", "benchmarks.peers.ptq", base.resolve(), folder.resolve(), tokens.resolve(), method]
    words += [str(arguments.group_size), *(["--asymmetric"] if arguments.asymmetric else [])]
    subprocess.run([str(word) for word in words], check=True, cwd=ROOT)
    return folder


@paddle.no_grad()
def score(model: CausalLM, full: CausalLM, rows: Sequence[EncodedRow]) -> dict[str, float]:
    """Return perplexity and divergence of a model over the target tokens of the rows.

    Prompts are left out, because a system prompt that is the same in every row has large losses, whose changes are
    noise. The divergence is KL(p | q) = sum_v p_v log(p_v / q_v), where p is the distribution of the full-precision
    model.
    """
    loss, divergence, count = 0.0, 0.0, 0
    for row in rows:
        ids, is_target = paddle.to_tensor(row.tokens[None].astype(np.int64)), row.loss_mask[1:]
        found, expected = (
            _log_softmax(each(ids)[0, :-1].astype("float32").numpy()[is_target]) for each in (model, full)
        )
        loss -= float(np.take_along_axis(found, row.tokens[1:][is_target, None], axis=1).sum())
        divergence += float((np.exp(expected) * (expected - found)).sum())
        count += int(is_target.sum())
    return {"perplexity": float(np.exp(loss / count)), "divergence": divergence / count}


def _log_softmax(logits_NV: np.ndarray) -> np.ndarray:
    """Return log-probabilities; for a large vocabulary, Paddle's own function takes seconds per row on a CPU."""
    shifted_NV = logits_NV - logits_NV.max(axis=1, keepdims=True)
    return shifted_NV - np.log(np.exp(shifted_NV).sum(axis=1, keepdims=True))


if __name__ == "__main__":
    run_command(main)
