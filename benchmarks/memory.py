"""Comparison of predicted and measured peak memory of a training step, for 49 configurations.

    python -m benchmarks.memory [OUT.md] [--model smollm2-135m-instruct] [--measured checkpoints/benchmarks/memory.json]
                                [--only adamw_mini]

25 configurations train one model: all weights, LoRA, other adapters, quantized weights. 15 configurations train random
models of other families, which are first written to the folder of the measurements. 9 configurations train in several
processes. The last line counts errors above 8 %. The prediction equals the prediction of `--dry_run`
(trainer/memory/estimate.py). Each measurement runs train_step.py in separate processes for 20 to 60 seconds and is
added to the file of measurements. Measurements in the file are not repeated; remove the file after a change of the
code. OUT.md, such as docs/benchmarks/memory.md, receives the page with the measurements made so far: predicted and
measured peak, and the prediction by component.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

from benchmarks.measure import SMOLLM2_SHAPE, environment
from benchmarks.ours import MODEL, run_config
from paddlenlp_ext.config.parallel_degrees import complete_degrees
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.trainer.memory.estimate import MemoryEstimate
from paddlenlp_ext.trainer.memory.run_estimate import estimate_run, outline_model
from paddlenlp_ext.utils.run_command import run_command

_BF16_WEIGHTS = "--lora false --bf16 true --fp16_opt_level O2"
_NF4 = "--lora true --weight_quantize_algo nf4 --weight_double_quant true"
CASES = [
    # documents, length, name, keys
    (2, 256, "LoRA", "--lora true"),
    (8, 128, "LoRA", "--lora true"),
    (4, 512, "LoRA", "--lora true"),
    (1, 2048, "LoRA", "--lora true"),
    (1, 4096, "LoRA", "--lora true"),
    (4, 512, "LoRA, recompute", "--lora true --recompute true"),
    (2, 256, "LoRA, bf16", "--lora true --bf16 true"),
    (4, 512, "LoRA, bf16", "--lora true --bf16 true"),
    (2, 256, "DoRA", "--lora true --use_dora true"),
    (2, 256, "all weights", "--lora false"),
    (4, 512, "all weights", "--lora false"),
    (4, 512, "all weights, recompute", "--lora false --recompute true"),
    (2, 256, "all weights, bf16", "--lora false --bf16 true"),
    (2, 256, "all weights, adamw_8bit", "--lora false --optim adamw_8bit"),
    (2, 256, "all weights, adamw_mini", "--lora false --optim adamw_mini"),
    (2, 256, "all weights in bf16, fp32 copies", f"{_BF16_WEIGHTS} --master_weight true"),
    (2, 256, "all weights in bf16, stochastic rounding", f"{_BF16_WEIGHTS} --master_weight false"),
    (
        2,
        256,
        "all weights in bf16, stochastic rounding, adamw_8bit",
        f"{_BF16_WEIGHTS} --master_weight false --optim adamw_8bit",
    ),
    (2, 256, "LoRA on int8", "--lora true --weight_quantize_algo weight_only_int8"),
    (2, 256, "LoRA on int4", "--lora true --weight_quantize_algo weight_only_int4"),
    (2, 256, "LoRA on fp4", "--lora true --weight_quantize_algo fp4"),
    (2, 256, "LoRA on nf4", "--lora true --weight_quantize_algo nf4"),
    (2, 256, "LoRA on nf4, double", _NF4),
    (4, 512, "LoRA on nf4, double", _NF4),
    (4, 512, "LoRA on nf4, double, recompute", f"{_NF4} --recompute true"),
]
_SHAPE = {
    **SMOLLM2_SHAPE,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 64, "sliding_window": 4096}
_LATENT = {"q_lora_rank": 192, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 768},
    "minicpm3": {**_LATENT, "num_key_value_heads": 8, "scale_emb": 1, "dim_model_base": 512, "scale_depth": 1.4},
}
"""Family -> differences of its random model from `_SHAPE`; models of families that are not listed have `_SHAPE`."""
FAMILY_CASES = [
    # documents, length, name, keys, family
    (4, 512, "LoRA", "--lora true", "qwen2"),
    (2, 256, "all weights, adamw_mini", "--lora false --optim adamw_mini", "qwen2"),
    (2, 256, "all weights", "--lora false", "qwen3"),
    (4, 512, "LoRA, bf16", "--lora true --bf16 true", "qwen3"),
    (4, 512, "LoRA on nf4, double", _NF4, "mistral"),
    (4, 512, "LoRA", "--lora true", "gemma2"),
    (2, 256, "all weights, adamw_mini", "--lora false --optim adamw_mini", "gemma3_text"),
    (4, 512, "all weights, recompute", "--lora false --recompute true", "olmo2"),
    (4, 512, "LoRA, recompute", "--lora true --recompute true", "granite"),
    (4, 512, "LoRA", "--lora true", "cohere2"),
    (2, 256, "all weights, adamw_8bit", "--lora false --optim adamw_8bit", "ernie4_5"),
    (2, 256, "DoRA", "--lora true --use_dora true", "smollm3"),
    (4, 512, "LoRA", "--lora true", "mixtral"),
    (2, 256, "all weights, adamw_mini", "--lora false --optim adamw_mini", "mixtral"),
    (4, 512, "LoRA", "--lora true", "minicpm3"),
]
LAYOUT_CASES = [
    # documents, length, name, keys, family, processes
    (4, 512, "LoRA, tensor 2", "--lora true --tensor_parallel_degree 2", "qwen2", 2),
    (4, 512, "LoRA on nf4, double, tensor 2", f"{_NF4} --tensor_parallel_degree 2", "mistral", 2),
    (
        4,
        512,
        "all weights, tensor 2 with sequence parallelism",
        "--lora false --tensor_parallel_degree 2 --sequence_parallel true",
        "qwen2",
        2,
    ),
    (2, 256, "all weights, ZeRO-1 over 2", "--lora false --sharding stage1", "qwen2", 2),
    (2, 256, "all weights, ZeRO-2 over 2", "--lora false --sharding stage2", "qwen2", 2),
    (2, 256, "all weights, ZeRO-3 over 2", "--lora false --sharding stage3", "qwen2", 2),
    (
        4,
        512,
        "all weights, pipeline 2, 4 micro-batches",
        "--lora false --pipeline_parallel_degree 2 --gradient_accumulation_steps 4",
        "qwen2",
        2,
    ),
    (
        4,
        512,
        "LoRA, tensor 2 x pipeline 2, 4 micro-batches",
        "--lora true --tensor_parallel_degree 2 --pipeline_parallel_degree 2 --gradient_accumulation_steps 4",
        "qwen3",
        4,
    ),
    (4, 512, "LoRA, experts over 2", "--lora true --expert_parallel_degree 2", "mixtral", 2),
]
TOLERANCE = 0.08
# ruff: noqa: E501 - rows of Markdown tables have no line breaks
PAGE = """\
# Peak memory: prediction and measurement

The measured value is the peak resident memory of a process that loads a model and runs two optimizer steps:

- the model is SmolLM2-135M if no family is named; models of other families have random weights, 12 layers and a
  hidden size of 512;
- with several processes, the value is for the process with the largest peak; each replica processes the listed
  documents;
- "double" means double quantization of the scales, and "tensor 2" and "pipeline 2" are parallel degrees;
- the documents consist of random tokens and are packed into one batch row; every token is a target token;
- LoRA has rank 8 and adapts all linear layers;
- 1 GB is 10^9 bytes.

`python -m benchmarks.memory docs/benchmarks/memory.md` writes this page.
[How memory is estimated](../internals/memory.md) defines the components.

## Training step

{measured}

{where}

Predicted components, GB:

{parts}

## Without the C++ library

The table shows peaks of two steps in plain Paddle (2026-11-22, 2 cores of a Xeon, rank 8, a vocabulary of 8,000):

| hidden size x layers | tokens | trained weights | measured | estimated |
|---|---|---|---|---|
| 256 x 16 | 2,048 | all weights | 1,524 MB | 1,515 MB |
| 256 x 16 | 2,048 | LoRA | 2,093 MB | 2,002 MB |
| 384 x 12 | 1,536 | all weights | 1,471 MB | 1,435 MB |
| 384 x 12 | 1,536 | LoRA | 1,706 MB | 1,719 MB |

## Offloading the inputs of recomputed layers

The table shows the peak of one step of LoRA (rank 8) with `bf16` on 8,192 tokens, with 5 % target tokens:

| keys | peak GB, 8 documents of 1,024 tokens | peak GB, one document of 8,192 tokens |
|---|---|---|
| `recompute` | 1.76 | 1.76 |
| `recompute`, `offload_recompute_inputs` | 1.36 | 1.40 |

    python -m benchmarks.train_step --documents 8 --length 1024 --learned 0.05 --steps 0 --lora true --bf16 true \\
        --recompute true [--offload_recompute_inputs true]
    2026-11-22, two cores of an Intel Xeon with avx512_bf16, Python 3.11.7, paddlepaddle 3.3.1, commits c7466bc and
    b4b3582 (one document)
"""


def measure(model: str, documents: int, length: int, keys: str, processes: int) -> float:
    """Return the peak memory in GB of the largest process; each process loads the model and runs two steps."""
    shape = ["--documents", str(documents), "--length", str(length), "--steps", "1"]
    program = [str(Path(__file__).with_name("train_step.py")), *shape, "--model_name_or_path", model, *keys.split()]
    if processes == 1:
        output = subprocess.run([sys.executable, *program], capture_output=True, text=True, check=True).stdout
        return json.loads(output.splitlines()[-1])["peak_memory_gb"]
    launcher = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", str(processes)]
    with tempfile.TemporaryDirectory() as logs:
        command = [*launcher, "--backend", "gloo", "--log_dir", logs, *program]
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # this process may have more threads
        subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **threads})
        lines = (Path(logs) / "workerlog.0").read_text().splitlines()
    return json.loads(next(line for line in lines if line.startswith('{"benchmark"')))["peak_memory_gb"]


def predict(model: str, tokens: int, keys: str, processes: int) -> MemoryEstimate:
    """Return the peak that `--dry_run` predicts for one of the processes."""
    os.environ["PADDLE_TRAINERS_NUM"] = str(processes)  # as the launcher sets it
    config = run_config(["--model_name_or_path", model, *keys.split()])
    degrees = complete_degrees(config.parallel, processes)
    return estimate_run(config, outline_model(ModelSource.from_config(config.model), config, degrees), tokens, tokens)


def write_random_model(family: str, folder: Path) -> str:
    """Write the random model of a family, unless it exists; return its folder."""
    path = folder / family
    if not path.is_dir():
        shape = {**_SHAPE, "model_type": family, **FAMILIES.get(family, {})}
        del shape["architectures"]
        AutoModelForCausalLM.from_config(shape).save_pretrained(str(path))
    return str(path)


def page(rows: Sequence[str], parts: Sequence[str], sessions: Sequence[dict[str, str]]) -> str:
    """Return the page: `rows` and `parts` fill its two tables, and `sessions` lists the environments of the measurements."""
    where = "\n".join(f"    {number}: {json.dumps(session)}" for number, session in enumerate(sessions, 1))
    return PAGE.format(measured="\n".join(rows), parts="\n".join(parts), where=where)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--model", default=MODEL, help="name or folder of a model")
    parser.add_argument("--measured", type=Path, default=Path("checkpoints/benchmarks/memory.json"))
    parser.add_argument("--only", default="", help="run the configurations with this text in their name or keys")
    args = parser.parse_args(argv)
    found = json.loads(args.measured.read_text()) if args.measured.exists() else {}
    names = [part.name for part in fields(MemoryEstimate)]
    rows = [
        "| documents x tokens | training | predicted GB | measured GB | error | session (below) |",
        "|---" * 6 + "|",
    ]
    sessions: list[dict[str, str]] = []
    parts = [f"| documents x tokens | training | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    print(*rows, sep="\n")
    errors: list[float] = []
    singles = [(*case, *[None] * (5 - len(case)), 1) for case in (*CASES, *FAMILY_CASES)]
    for documents, length, name, keys, family, processes in (*singles, *LAYOUT_CASES):
        what = name if family is None else f"{family}, {name}"
        if args.only not in f"{what} {keys}":
            continue
        model = write_random_model(family, args.measured.parent / "memory_models") if family else args.model
        key = f"{model} {documents} x {length} {keys}"
        if key not in found:
            peak = measure(model, documents, length, keys, processes)
            found[key] = {"peak": peak, "environment": environment("paddlepaddle")}
            args.measured.parent.mkdir(parents=True, exist_ok=True)
            args.measured.write_text(json.dumps(found, indent=1))
        estimate = predict(model, documents * length, keys, processes)
        predicted, measured, session = estimate.total / 1e9, found[key]["peak"], found[key]["environment"]
        errors.append(abs(predicted / measured - 1))
        if session not in sessions:
            sessions.append(session)
        case = f"| {documents} x {length} | {what} |"
        rows.append(
            f"{case} {predicted:.2f} | {measured:.2f} | {predicted / measured - 1:+.0%} | {sessions.index(session) + 1} |"
        )
        parts.append(f"{case} {' | '.join(f'{getattr(estimate, name) / 1e9:.2f}' for name in names)} |")
        print(rows[-1], flush=True)
        if args.out is not None:
            args.out.write_text(page(rows, parts, sessions), encoding="utf-8")
    print(*parts, sep="\n")
    too_large = sum(error > TOLERANCE for error in errors)
    print(f"{len(errors)} configurations, {too_large} with an error above {TOLERANCE:.0%}")


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
