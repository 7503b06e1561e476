"""Worker of benchmarks/decoding.py for transformers: prints the seconds of the prompt and of a step as JSON."""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM

from benchmarks.measure import decoding_seconds, random_documents


def main() -> None:
    case = json.loads(sys.argv[1])
    torch.set_num_threads(case["threads"])
    model = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.bfloat16).eval()
    prompts = torch.from_numpy(random_documents(case["batch"], case["prompt"]))
    mask = torch.ones_like(prompts)

    def generate(count: int) -> None:
        rows = model.generate(prompts, attention_mask=mask, do_sample=False, min_new_tokens=count, max_new_tokens=count)
        assert rows.shape == (case["batch"], case["prompt"] + count)

    print(json.dumps(decoding_seconds(generate, case["new"], case["repeats"])))


if __name__ == "__main__":
    main()
