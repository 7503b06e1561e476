"""Train, resume, merge and predict on a device; print the losses and answers: worker.py DEVICE MODEL DATA OUTPUT."""

from __future__ import annotations

import json
import sys

import numpy as np
import paddle

from paddlenlp_ext import finetune
from paddlenlp_ext.api import merge_adapter
from paddlenlp_ext.devices import device_name
from paddlenlp_ext.generation.generate import generate
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from tests.generation.engine_answers import Answer, engine_of, run

PROMPTS = [[5, 17, 3, 8, 44], [7, 2, 60], list(range(1, 20))]


def losses(output: str, **keys: object) -> list[float]:
    """Train, and return the logged losses."""
    result = finetune({"output_dir": output, **keys})
    return [entry["loss"] for entry in result.trainer.state.log_history if "loss" in entry]


def main(device: str, model: str, data: str, output: str) -> None:
    keys = {
        "model_name_or_path": model,
        "dataset_name_or_path": data,
        "data_cache_dir": f"{output}/cache",
        "chat_template": "none",
        "device": device,
        "do_train": True,
        "max_steps": 4,
        "max_length": 64,
        "src_length": 32,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "zero_padding": True,
        "lora": True,
        "lora_rank": 4,
    }
    found = {"lora": losses(f"{output}/lora", save_strategy="steps", save_steps=2, **keys)}
    found["resumed"] = losses(f"{output}/resumed", resume_from_checkpoint=f"{output}/lora/checkpoint-2", **keys)
    merge_adapter(f"{output}/lora", f"{output}/merged", model)
    paddle.set_device(device)
    merged = AutoModelForCausalLM.from_pretrained(f"{output}/merged", dtype="float32")
    merged.eval()
    logits = merged(paddle.to_tensor([PROMPTS[0]]))
    found["place"], found["logits"] = device_name(logits.place), np.asarray(logits.numpy()).ravel().tolist()
    found["answers"] = generate(merged, PROMPTS, max_new_tokens=6)
    answers = [Answer(prompt, 6) for prompt in PROMPTS]
    run(engine_of(merged, max_rows=2), answers, steps_between=1)
    found["served"] = [answer.tokens for answer in answers]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
