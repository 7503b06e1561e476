"""Training step of benchmarks/train_step.py in PaddleNLP 3.0.0b4, with its defaults and no environment variables.

    .venv-paddlenlp/bin/python -m benchmarks.peers.paddlenlp_train_step MODEL_FOLDER

LoRA has the rank and the target layers that PaddleNLP's run_finetune.py uses for Llama. Documents are not packed, which
makes no difference for documents of equal length.
"""

from __future__ import annotations

import argparse

import paddle
from paddlenlp.peft import LoRAConfig, LoRAModel
from paddlenlp.transformers import AutoModelForCausalLM

from benchmarks.measure import random_documents, report, time_steps

LLAMA_TARGETS = [".*[qkvo]_proj.*", ".*gate_proj.*", ".*up_proj.*", ".*down_proj.*"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face folder")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rank", type=int, default=8)
    args = parser.parse_args()

    paddle.seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32", convert_from_torch=True)
    lora = LoRAConfig(target_modules=LLAMA_TARGETS, r=args.rank, lora_alpha=2 * args.rank, dtype="float32")
    model = LoRAModel(model, lora)
    model.mark_only_lora_as_trainable()
    model.train()
    trainable = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
    clip = paddle.nn.ClipGradByGlobalNorm(1.0)
    optimizer = paddle.optimizer.AdamW(1e-4, parameters=trainable, weight_decay=0.0, grad_clip=clip)
    ids = random_documents(args.documents, args.length + 1)
    input_ids, labels = paddle.to_tensor(ids[:, :-1]), paddle.to_tensor(ids[:, 1:])
    losses = []

    def step() -> None:
        loss = model(input_ids=input_ids, labels=labels)[0]
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))

    figures = time_steps(step, args.steps, args.documents * args.length)
    report("peer_paddlenlp_train_step", {**vars(args), **figures, "losses": losses}, "paddlepaddle", "paddlenlp")


if __name__ == "__main__":
    main()
