"""Run shipped configurations on a device with tiny models: shipped_worker.py DEVICE FOLDER NAME...

A name is the path of a configuration below llm/config. A training run makes two steps with a checkpoint after each, is
resumed from the first checkpoint, and its result is merged if the method allows that; a quantization run writes a
model. The result then predicts. The worker prints the losses, logits and tokens of each name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext import merge_adapter
from paddlenlp_ext.cli.run_quantization import run_quantization
from paddlenlp_ext.config import load_run_config
from paddlenlp_ext.config.run_config import PREFERENCE_SECTIONS, REWARD_SECTIONS, SECTIONS
from paddlenlp_ext.devices import device_name
from paddlenlp_ext.generation.generate import generate
from paddlenlp_ext.inference.arguments import LoadArguments
from paddlenlp_ext.inference.load_model import load_unmerged
from paddlenlp_ext.models.auto import AutoModelForCausalLM, AutoModelForSequenceClassification
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.trainer.callbacks import loss_plot
from paddlenlp_ext.trainer.finetune import run_training
from paddlenlp_ext.utils import files
from tests.common.byte_tokenizer import byte_tokenizer
from tests.common.models import write_tiny_data
from tests.common.scripts import LLM
from tests.golden.cases.model_cases import CASES

LETTERS = "abcdefghijklmnopqrstuvwxyz=\u0120"  # the last one stands for a space in tokenizers of bytes
PROMPTS = [[5, 12, 3, 8, 14], [7, 2]]
CASE_OF = {
    "ernie": "ernie4_5",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_keys_as_values",
    "gemma4_moe": "gemma4_experts",
    "glm4": "glm4_share_of_channels",
    "granite4": "granite_4_without_rope",
    "granite4_h": "granite_4_h",
    "hunyuan": "hunyuan_alpha",
    "hunyuan_moe": "hunyuan_v1_moe",
    "qwen": "qwen2",
    "smollm2": "llama_head_dim_biases_tied",
}
"""Folder of configurations -> golden case of its family; other folders have the first case whose name begins so."""
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
"""Sizes for the families with files of every method, whose ranks and quantization groups need wide layers."""
EVERY_METHOD = ("llama", "qwen", "smollm2")
SMALL_RUN = {
    "bf16": False,  # the plug-in reports no bfloat16 arithmetic
    "fp16_opt_level": "O1",
    "num_train_epochs": 2,
    "max_steps": -1,
    "gradient_accumulation_steps": 3,  # a step per epoch
    "evaluation_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 2,
    "disable_tqdm": True,
}


def write_model(family: str, folder: Path) -> Path:
    """Write a tiny model of a family with a tokenizer."""
    case = CASE_OF.get(family) or next(name for name in CASES if name.startswith(family))
    sizes = WIDE if family in EVERY_METHOD else {}
    tokenizer = byte_tokenizer("</s>", "<s>", letters=LETTERS)
    settings = {**CASES[case], "eos_token_id": tokenizer.eos_token_id, "initializer_range": 0.2, **sizes}
    AutoModelForCausalLM.from_config(settings, seed=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(folder: Path) -> None:
    """Write rows to train on, and pairs of answers."""
    write_tiny_data(folder / "data")
    pairs = [{"prompt": f"{word} fig =", "chosen": f"fig {word}", "rejected": "lime"} for word in ("red", "blue")]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in 3 * pairs))


def words_of(name: str, keys: Mapping[str, object]) -> list[str]:
    """Return the command line of a configuration with other values of some keys."""
    return [str(LLM / "config" / name), *(word for key, value in keys.items() for word in (f"--{key}", str(value)))]


def train(words: list[str], sections: Mapping[str, type], output: Path, **keys: object) -> list[float]:
    """Train, and return the losses of steps and evaluations."""
    options = [word for key, value in {"output_dir": output, **keys}.items() for word in (f"--{key}", str(value))]
    trainer = run_training(load_run_config([*words, *options], peft_methods(), sections)).trainer
    return [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]


def run(name: str, folder: Path, model: Path, device: str) -> dict[str, Any]:
    """Run a configuration, and return its numbers."""
    kind, output = name.partition("/")[2].partition("_argument")[0], folder / name.replace("/", "-")
    keys: dict[str, object] = {"model_name_or_path": model, "chat_template": "none", "device": device}
    if kind in ("ptq", "gptq", "awq"):
        run_quantization(words_of(name, {**keys, "dataset_name_or_path": folder / "data", "output_dir": output}))
        return predict(output, None, device)
    keys |= {**SMALL_RUN, "data_cache_dir": folder / "cache"}
    if kind.startswith(("dpo", "reward")):
        keys |= dict.fromkeys(("train_dataset_path", "dev_dataset_path"), folder / "pairs.jsonl")
    else:
        keys["dataset_name_or_path"] = folder / "data"
    if kind == "distillation":
        keys["teacher_model_name_or_path"] = model
    if kind == "trainable_tokens":
        keys["trainable_tokens_indices"] = str(list(range(15)))
    words, is_reward = words_of(name, keys), kind.startswith("reward")
    sections = REWARD_SECTIONS if is_reward else PREFERENCE_SECTIONS if kind.startswith("dpo") else SECTIONS
    found = {"losses": train(words, sections, output)}
    again = output.with_name(f"{output.name}-resumed")
    found["resumed"] = train(words, sections, again, resume_from_checkpoint=output / "checkpoint-1")
    peft = load_run_config([*words, "--output_dir", str(output)], peft_methods(), sections).peft
    if peft is None:
        return found | predict(output, None, device, is_reward)
    if is_reward or not peft.mergeable:
        return found | predict(model, output, device, is_reward)
    merge_adapter(output, output / "merged", model)
    return found | predict(output / "merged", None, device)


def predict(model: Path, adapter: Path | None, device: str, is_reward: bool = False) -> dict[str, Any]:
    """Return the logits of a prompt, their place, and the answers to all prompts; rewards instead of logits."""
    kind = AutoModelForSequenceClassification if is_reward else AutoModelForCausalLM
    arguments = LoadArguments(model_name_or_path=str(model), device=device, dtype="float32")
    loaded = load_unmerged(arguments, str(model), None if adapter is None else str(adapter), model_class=kind)
    loaded.eval()
    with paddle.no_grad():
        logits = loaded(paddle.to_tensor(PROMPTS[:1]))
    tokens = [] if is_reward else generate(loaded, PROMPTS, max_new_tokens=4)
    return {"place": device_name(logits.place), "logits": np.asarray(logits.numpy()).ravel().tolist(), "tokens": tokens}


def main(device: str, folder: str, *names: str) -> None:
    loss_plot.plot_loss = lambda log_history, path: None  # drawing takes as long as the rest of such a run
    files.flush = lambda path: None
    path = Path(folder)
    write_rows(path)
    families = {name: name.partition("/")[0] for name in names}
    models = {family: write_model(family, path / "models" / family) for family in set(families.values())}
    print(json.dumps({name: run(name, path, models[family], device) for name, family in families.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
