"""Predicted against measured peak memory of a training step (train/memory.py against benchmarks/train_step.py).

    python benchmarks/memory.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import paddle

from measure import SMOLLM2_SHAPE, environment
from paddlenlp_ext import LoRAConfig, get_peft_model
from paddlenlp_ext.models.config import DecoderConfig
from paddlenlp_ext.models.decoder import CausalLM
from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.train.memory import estimate_memory

CASES = [
    # documents, length, method, recompute
    (2, 256, "lora", False),
    (8, 128, "lora", False),
    (4, 512, "lora", False),
    (4, 512, "lora", True),
    (1, 2048, "lora", False),
    (2, 256, "full", False),
    (4, 512, "full", False),
    (4, 512, "full", True),
]


def measure(documents: int, length: int, method: str, recompute: bool) -> float:
    """GB at the peak of a process that makes two steps."""
    script = Path(__file__).with_name("train_step.py")
    command = [sys.executable, script, "--documents", documents, "--length", length, "--method", method, "--steps", 1]
    words = [*map(str, command), *(["--recompute"] if recompute else [])]
    output = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return json.loads(output.splitlines()[-1])["peak_memory_gb"]


def predict(documents: int, length: int, method: str, recompute: bool) -> float:
    """GB that the dry run would name."""
    with paddle.LazyGuard():
        model = CausalLM(DecoderConfig.from_dict(SMOLLM2_SHAPE))
        model = get_peft_model(model, LoRAConfig(rank=8)) if method == "lora" else model
    tokens = documents * length
    plan = RecomputePlan() if recompute else None
    estimate = estimate_memory(model, micro_batch_tokens=tokens, learned_tokens=tokens, recompute=plan)
    return estimate.total / 1e9


def main() -> None:
    print("| documents | method | recompute | predicted GB | measured GB | error |\n|---|---|---|---|---|---|")
    for case in CASES:
        documents, length, method, recompute = case
        predicted, measured = predict(*case), measure(*case)
        row = (f"{documents} x {length}", method, recompute, f"{predicted:.2f}", f"{measured:.2f}")
        print(f"| {' | '.join(map(str, row))} | {predicted / measured - 1:+.0%} |", flush=True)
    print(json.dumps(environment("paddlepaddle")))


if __name__ == "__main__":
    main()
