"""Tokens per second and peak memory of a LoRA step on SmolLM2's shape (4 documents of 512 tokens), random weights.

    python benchmarks/train_step.py [--documents 4 --length 512 --learned 1.0 --steps 5 --method lora|full]
                                    [--model FOLDER --quantize nf4 --double_quant]

The same step in PyTorch: benchmarks/peers/train_step.py, in an environment of its own. Run them one after the other on
a quiet machine and quote the ratio.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import paddle

from measure import SMOLLM2_SHAPE, peak_memory_gb, report
from paddlenlp_ext import AutoModelForCausalLM, LoRAConfig, get_peft_model
from paddlenlp_ext.ops.linear_cross_entropy import linear_cross_entropy
from paddlenlp_ext.quant.options import ALGOS, QuantOptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--learned", type=float, default=1.0, help="share of the tokens that are learned")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--method", choices=["lora", "full"], default="lora")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--model", help="folder or name of a model with SmolLM2's vocabulary; unset: random weights")
    parser.add_argument("--quantize", choices=ALGOS, help="how its weights are quantized as they are read")
    parser.add_argument("--double_quant", action="store_true")
    args = parser.parse_args()

    if args.model is None:
        if args.quantize:
            parser.error("random weights are not read, so that none are quantized: give --model")
        model = AutoModelForCausalLM.from_config(SMOLLM2_SHAPE, seed=0)
    else:
        options = QuantOptions(algo=args.quantize, double_quant=args.double_quant) if args.quantize else None
        model = AutoModelForCausalLM.from_pretrained(args.model, quantization=options)
    loaded_gb = peak_memory_gb()
    if args.recompute:
        model.enable_recompute()
    if args.method == "lora":
        model = get_peft_model(model, LoRAConfig(rank=8))
    model.train()
    parameters = [p for p in model.parameters() if not p.stop_gradient]
    optimizer = paddle.optimizer.AdamW(1e-4, parameters=parameters)

    tokens = args.documents * args.length
    rng = np.random.default_rng(0)
    input_ids = paddle.to_tensor(rng.integers(0, SMOLLM2_SHAPE["vocab_size"], (1, tokens)))
    labels = rng.integers(0, SMOLLM2_SHAPE["vocab_size"], tokens)
    labels[rng.random(tokens) >= args.learned] = -100
    position_ids = paddle.to_tensor(np.tile(np.arange(args.length), args.documents)[None])
    document_lengths = ((args.length,) * args.documents,)

    def step() -> float:
        hidden = model.hidden_states(input_ids, position_ids=position_ids, document_lengths=document_lengths)
        loss_sum, _ = linear_cross_entropy(hidden[0], model.head_weight(), paddle.to_tensor(labels))
        (loss_sum / int((labels != -100).sum())).backward()
        optimizer.step()
        optimizer.clear_grad()
        return float(loss_sum)

    step()
    start = time.perf_counter()
    for _ in range(args.steps):
        step()
    seconds = (time.perf_counter() - start) / args.steps
    figures = {**vars(args), "loaded_gb": round(loaded_gb, 3), "tokens_per_second": round(tokens / seconds, 1)}
    report("train_step", figures, "paddlepaddle")


if __name__ == "__main__":
    main()
