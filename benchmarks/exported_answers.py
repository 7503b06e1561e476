"""Compare the greedy answers of a model with an adapter: unmerged, merged, served, as GGUF, and as static graphs.

    python -m benchmarks.exported_answers [--adapter FOLDER] [--prompts 50] [--tokens 32] [--batch_sizes 1,8]

Every variant answers the same prompts. The table has the fraction of answers that equal the answers of base and
adapter, and for exported programs the largest difference between a logit and the logit of the exported model. The
server receives as many requests at a time as a batch has rows. Without `--adapter`, a LoRA adapter with random weights
is used. llama.cpp runs in a separate environment (`make .venv-llama-cpp/installed`).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from paddlenlp_ext._runtime import configure_runtime

configure_runtime()  # before Paddle is imported

import numpy as np

from benchmarks import ROOT
from benchmarks.measure import environment
from benchmarks.serving import running_server
from paddlenlp_ext.checkpoint.tokenizer import AutoTokenizer
from paddlenlp_ext.cli.export_gguf import export_arguments, run_export
from paddlenlp_ext.cli.export_model import export_model
from paddlenlp_ext.cli.export_model_arguments import parse_arguments
from paddlenlp_ext.cli.merge_peft_params import MergeArguments, run_merge
from paddlenlp_ext.data.rows.conversation import Conversation
from paddlenlp_ext.data.templates.load import load_template
from paddlenlp_ext.generation.generate import generate
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.static_graph.static_model import StaticModel

Prompts = Sequence[list[int]]
Answers = Callable[[Prompts, int], Sequence[Any]]
"""Function of prompts and batch size that returns the answers: tokens, or the text that a server sends."""

BASE = "smollm2-135m-instruct"
MODEL = ["--model_name_or_path", BASE]
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
    default = str(ROOT / ".venv-llama-cpp" / "bin" / "python")
    parser.add_argument("--llama_cpp", default=default, help="Python interpreter of an environment with llama.cpp")
    options = parser.parse_args()
    sizes = [int(size) for size in options.batch_sizes.split(",")]
    template = load_template(None, AutoTokenizer.from_pretrained(BASE))
    questions = [question.format(thing) for question in QUESTIONS for thing in THINGS][: options.prompts]
    prompts = [template.encode_prompt(Conversation.asking(question)) for question in questions]
    print(environment())
    print(f"{len(prompts)} prompts, {options.tokens} tokens; batches of {options.batch_sizes}")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        adapter = options.adapter or random_adapter(work / "adapter")
        unmerged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), adapter)
        expected = in_process(unmerged, options.tokens)(prompts, max(sizes))
        compare = partial(report, expected=expected, prompts=prompts, sizes=sizes)
        run_merge(MergeArguments(adapter_path=str(adapter), output_path=str(work / "merged"), model_name_or_path=BASE))
        merged = AutoModelForCausalLM.from_pretrained(work / "merged")
        compare("base and adapter", in_process(unmerged, options.tokens))
        compare("merged", in_process(merged, options.tokens))
        tokenizer = AutoTokenizer.from_pretrained(BASE)
        texts = [tokenizer.decode(row, skip_special_tokens=True) for row in expected]
        with running_server([*MODEL, "--lora_path", f"tuned={adapter}"]) as port:
            compare("served", served(port, options.tokens), expected=texts)
        file = work / "model.gguf"
        run_export(export_arguments([*MODEL, "--lora_path", str(adapter), "--output_file", str(file)]))
        compare("GGUF F16, read here", in_process(AutoModelForCausalLM.from_pretrained(file), options.tokens))
        case = {"model": str(file), "tokens": options.tokens, "end_tokens": unmerged.eos_token_ids}
        compare("GGUF F16, llama.cpp", in_llama_cpp(options.llama_cpp, case, work / "case.json"))
        for label, words in FORMATS.items():
            names = [*MODEL, "--lora_path", str(adapter), "--output_path", str(work / "exported")]
            line = export_model(parse_arguments([*names, "--device", "cpu", "--overwrite", "true", *words]))
            found = re.search(r"by up to (\S+)", line)
            assert found is not None, line
            static = StaticModel(work / "exported")
            compare(f"{label}; logits {found[1]}", in_process(static, options.tokens))


def random_adapter(folder: Path) -> str:
    """Write a LoRA adapter with random weights, large enough to change the answers."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(BASE), LoRAConfig(rank=8))
    rng = np.random.default_rng(0)
    for parameter in model.parameters():
        if not parameter.stop_gradient:
            parameter.set_value(rng.normal(0, 0.02, parameter.shape).astype(np.float32))
    model.save_pretrained(folder)
    return str(folder)


def in_process(model: Any, tokens: int) -> Answers:
    """Return the function that generates answers in this process."""

    def answers(prompts: Prompts, batch_size: int) -> Prompts:
        end_tokens = model.eos_token_ids
        return generate(model, prompts, max_new_tokens=tokens, batch_size=batch_size, eos_token_id=end_tokens)

    return answers


def served(port: int, tokens: int) -> Answers:
    """Return the function that requests completions from a server, one request per prompt."""

    def ask(prompt: list[int]) -> str:
        body = {"model": "tuned", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as response:
            return json.load(response)["choices"][0]["text"]

    def answers(prompts: Prompts, batch_size: int) -> list[str]:
        with ThreadPoolExecutor(batch_size) as pool:
            return list(pool.map(ask, prompts))

    return answers


def in_llama_cpp(python: str, case: dict[str, Any], file: Path) -> Answers:
    """Return the function that generates answers with llama.cpp."""

    def answers(prompts: Prompts, batch_size: int) -> Prompts:
        file.write_text(json.dumps({**case, "prompts": prompts, "batch": batch_size}))
        command = [python, "-m", "benchmarks.peers.answers_llama_cpp", str(file)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
        return json.loads(done.stdout.strip().splitlines()[-1])

    return answers


def report(label: str, answers: Answers, *, expected: Sequence[Any], prompts: Prompts, sizes: Sequence[int]) -> None:
    """Print the share of equal answers and the seconds of each batch size."""
    for size in sizes:
        start = time.perf_counter()
        found = answers(prompts, size)
        seconds = time.perf_counter() - start
        equal = sum(own == other for own, other in zip(found, expected, strict=True))
        print(f"{label:42} batch {size}: {equal} of {len(prompts)} answers equal, {seconds:6.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
