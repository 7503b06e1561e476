"""Compare the greedy answers of a model with an adapter: unmerged, merged in a folder, and exported as static graphs.

    python -m benchmarks.exported_answers [--adapter FOLDER] [--prompts 50] [--tokens 32] [--batch_sizes 1,8]

Every variant answers the same prompts. The table has the share of answers equal to those of base and adapter, and for
exported programs the largest difference of a logit from the model that was exported. Without `--adapter`, a LoRA
adapter with random weights is used.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paddlenlp_ext._runtime import configure_runtime

configure_runtime()  # before Paddle is imported

import numpy as np

from benchmarks.measure import environment
from paddlenlp_ext.checkpoint.tokenizer import AutoTokenizer
from paddlenlp_ext.cli.export_arguments import parse_arguments
from paddlenlp_ext.cli.export_model import export_model
from paddlenlp_ext.cli.merge import MergeArguments, run_merge
from paddlenlp_ext.data.conversation import Conversation
from paddlenlp_ext.data.templates import load_template
from paddlenlp_ext.generation.generate import generate
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.static_graph.runtime import StaticModel

BASE = "smollm2-135m-instruct"
FORMATS = {
    "static, float32": (),
    "static, bfloat16": ("--dtype", "bfloat16"),
    "static, int8": ("--quant_type", "weight_only_int8"),
    "static, int4": ("--quant_type", "weight_only_int4"),
}
THINGS = ("a river", "seven", "the moon", "bread", "a violin", "winter", "the verb to carry", "a map", "salt", "ice")
QUESTIONS = ("What is {}?", "Write one sentence about {}.", "Name two things like {}.", "Spell {}.", "Is {} old?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--batch_sizes", default="1,8")
    options = parser.parse_args()
    sizes = [int(size) for size in options.batch_sizes.split(",")]
    template = load_template(None, AutoTokenizer.from_pretrained(BASE))
    texts = [question.format(thing) for question in QUESTIONS for thing in THINGS][: options.prompts]
    prompts = [template.encode_prompt(Conversation.asking(text)) for text in texts]
    print(environment())
    print(f"{len(prompts)} prompts, {options.tokens} tokens; batches of {options.batch_sizes}")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        adapter = options.adapter or random_adapter(work / "adapter")
        unmerged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), adapter)
        expected = answers(unmerged, prompts, options.tokens, max(sizes))
        run_merge(MergeArguments(adapter_path=str(adapter), output_path=str(work / "merged"), model_name_or_path=BASE))
        merged = AutoModelForCausalLM.from_pretrained(work / "merged")
        report("base and adapter", unmerged, expected, prompts, options.tokens, sizes)
        report("merged", merged, expected, prompts, options.tokens, sizes)
        for label, words in FORMATS.items():
            names = ["--model_name_or_path", BASE, "--lora_path", str(adapter), "--output_path", str(work / "exported")]
            line = export_model(parse_arguments([*names, "--device", "cpu", "--overwrite", "true", *words]))
            found = re.search(r"by up to (\S+)", line)
            assert found is not None, line
            static = StaticModel(work / "exported")
            report(f"{label}; logits {found[1]}", static, expected, prompts, options.tokens, sizes)


def random_adapter(folder: Path) -> str:
    """Write a LoRA adapter with random weights, large enough to change the answers."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(BASE), LoRAConfig(rank=8))
    rng = np.random.default_rng(0)
    for parameter in model.parameters():
        if not parameter.stop_gradient:
            parameter.set_value(rng.normal(0, 0.02, parameter.shape).astype(np.float32))
    model.save_pretrained(folder)
    return str(folder)


def answers(model: Any, prompts: list[list[int]], tokens: int, batch_size: int) -> list[list[int]]:
    return generate(model, prompts, max_new_tokens=tokens, batch_size=batch_size, eos_token_id=model.eos_token_ids)


def report(
    label: str, model: Any, expected: list[list[int]], prompts: list[list[int]], tokens: int, sizes: list[int]
) -> None:
    """Print the share of equal answers and the time of each batch size."""
    for size in sizes:
        start = time.perf_counter()
        found = answers(model, prompts, tokens, size)
        seconds = time.perf_counter() - start
        equal = sum(own == other for own, other in zip(found, expected, strict=True))
        rate = sum(map(len, found)) / seconds
        print(f"{label:42} batch {size}: {equal} of {len(prompts)} answers equal, {rate:6.1f} tokens/s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
