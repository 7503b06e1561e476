"""Predicted against measured peak memory of a training step: full training, LoRA, other adapters, quantized weights.

    python -m benchmarks.memory [OUT.md] [--model smollm2-135m-instruct] [--measured checkpoints/benchmarks/memory.json]

The prediction is the dry run's (trainer/memory/estimate.py), the measurement that of a process of its own
(train_step.py), which
takes 20 to 40 seconds. The file of measurements is added to after each one, and what stands in it is not measured
again: remove it after a change to what runs. OUT.md gets the page, with what is measured so far: predicted and measured
peak, and the prediction by part.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

from benchmarks.measure import environment
from benchmarks.ours import MODEL, run_config
from paddlenlp_ext.cli.dry_run import estimate_run, outline_model
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.trainer.memory.estimate import MemoryEstimate
from paddlenlp_ext.utils.process import run_command

_NF4 = "--lora true --weight_quantize_algo nf4 --weight_double_quant true"
CASES = [
    # documents, length, what it is called, keys
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
    (2, 256, "LoRA over int8", "--lora true --weight_quantize_algo weight_only_int8"),
    (2, 256, "LoRA over int4", "--lora true --weight_quantize_algo weight_only_int4"),
    (2, 256, "LoRA over fp4", "--lora true --weight_quantize_algo fp4"),
    (2, 256, "LoRA over nf4", "--lora true --weight_quantize_algo nf4"),
    (2, 256, "LoRA over nf4, double", _NF4),
    (4, 512, "LoRA over nf4, double", _NF4),
    (4, 512, "LoRA over nf4, double, recompute", f"{_NF4} --recompute true"),
]
PAGE = """\
# Peak memory of a training step

What `--dry_run` predicts, from shapes alone, beside what a process took: the largest resident size while it loads
SmolLM2-135M and makes two optimizer steps, on random documents side by side in one row, every token learned, LoRA of
rank 8 on all linear layers. GB are 10^9 bytes. Memory does not depend on how busy the machine is. The page is written
by `python -m benchmarks.memory docs/memory.md`.

{measured}

The prediction by part, GB:

{parts}

- **process**: Python, Paddle and the libraries around them, before any tensor.
- **weights**: the model and the adapter, quantized weights as they are stored.
- **optimizer**: its moments of what trains; 8 bytes a weight with AdamW.
- **activations**: what the forward pass keeps of each token for the way back. Longer or more documents in a micro-batch
  make this part; `"recompute": true` makes it small.
- **working**: what stands beside these for a while. Either the logits of 256 learned positions and the hidden states
  that they are made of, or what one layer needs on its way back, with what was computed again, whichever is more.
- **gradients**: of the weights that train, as far as they find no room where activations were: these are gone when the
  last gradients are made. With gradient accumulation they stand beside the activations, all of them.
- **kept_free**: memory that was freed and is kept for the next request. The native library's blocks are at most a
  sixteenth more than was in use at once. What Paddle's own ops allocate lies in the C heap, where few freed pieces fit
  a later request: as much again is counted, which is rather too much than too little. Without the native library
  ([cpu.md](cpu.md)) everything lies there.

A method whose adapter is not one step with its linear, as DoRA and PiSSA, keeps more of each token than LoRA
(`paddlenlp_ext/trainer/memory/estimate.py`). On GPUs the prediction is on paper: it has not been held against a run,
and what the allocator keeps free is left out.

{where}
"""


def measure(model: str, documents: int, length: int, keys: str) -> float:
    """Return the peak memory in GB of a process that loads the model and makes two steps."""
    shape = ["--documents", str(documents), "--length", str(length), "--steps", "1"]
    command = [sys.executable, "-m", "benchmarks.train_step", *shape, "--model_name_or_path", model, *keys.split()]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(output.splitlines()[-1])["peak_memory_gb"]


def predict(model: str, tokens: int, keys: str) -> MemoryEstimate:
    """Return the peak that `--dry_run` predicts."""
    config = run_config(["--model_name_or_path", model, *keys.split()])
    return estimate_run(config, outline_model(ModelSource.from_config(config.model), config), tokens, tokens)


def page(rows: Sequence[str], parts: Sequence[str]) -> str:
    """Return the page with these lines in its two tables."""
    where = json.dumps(environment("paddlepaddle"))
    return PAGE.format(measured="\n".join(rows), parts="\n".join(parts), where=f"    {where}")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--model", default=MODEL, help="a model's name or folder")
    parser.add_argument("--measured", type=Path, default=Path("checkpoints/benchmarks/memory.json"))
    args = parser.parse_args(argv)
    found = json.loads(args.measured.read_text()) if args.measured.exists() else {}
    names = [part.name for part in fields(MemoryEstimate)]
    rows = ["| documents | what | predicted GB | measured GB | error |", "|---|---|---|---|---|"]
    parts = [f"| documents | what | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    print(*rows, sep="\n")
    for documents, length, what, keys in CASES:
        key = f"{args.model} {documents} x {length} {keys}"
        if key not in found:
            found[key] = measure(args.model, documents, length, keys)
            args.measured.parent.mkdir(parents=True, exist_ok=True)
            args.measured.write_text(json.dumps(found, indent=1))
        estimate = predict(args.model, documents * length, keys)
        predicted, measured = estimate.total / 1e9, found[key]
        case = f"| {documents} x {length} | {what} |"
        rows.append(f"{case} {predicted:.2f} | {measured:.2f} | {predicted / measured - 1:+.0%} |")
        parts.append(f"{case} {' | '.join(f'{getattr(estimate, name) / 1e9:.2f}' for name in names)} |")
        print(rows[-1], flush=True)
        if args.out is not None:
            args.out.write_text(page(rows, parts), encoding="utf-8")
    print(*parts, sep="\n")


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
