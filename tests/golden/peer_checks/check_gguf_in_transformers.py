"""Load the GGUF files of `export_gguf_for_peers.py` in transformers: logits, tokens and chat template.

transformers reads files of some architectures only, and not all of their metadata. Only those are compared whose
settings it reads or supposes.

Run where `torch`, `transformers` and `gguf` are installed:
    python -m tests.golden.peer_checks.check_gguf_in_transformers FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ALLOWED = 1e-2
COMPARED = ("llama", "qwen2", "smollm2", "qwen3_plain", "phi3_plain", "gemma2_plain", "gemma3_plain")


def main() -> None:
    folder, worst, failures = Path(sys.argv[1]), 0.0, 0
    for path in [*(folder / f"{name}.gguf" for name in COMPARED), *sorted(folder.glob("types/*.gguf"))]:
        stored = np.load(path.with_suffix(".npz"))
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        with torch.no_grad():
            logits = model.eval()(torch.from_numpy(stored["ids"][None])).logits.numpy()[0]
        difference = float(np.abs(logits - stored["logits"]).max())
        print(f"{path.stem}: logits differ by {difference:.2e} (largest {np.abs(logits).max():.3g})")
        worst = max(worst, difference)
        if path.with_suffix(".json").is_file():
            failures += check_text(path)
    sys.exit(int(worst > ALLOWED or failures > 0))


def check_text(path: Path) -> int:
    """Compare tokens and chat template; return the number of differences.

    transformers does not know SmolLM2's rule of single digits, so that texts with digits are only counted.
    """
    stored = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokens = [tokenizer.encode(text, add_special_tokens=False) for text in stored["texts"]]
    equal = sum(found == expected for found, expected in zip(tokens, stored["tokens"], strict=True))
    prompts = [
        tokenizer.apply_chat_template(chat["messages"], tokenize=False, add_generation_prompt=True) == chat["prompt"]
        for chat in stored["chats"]
    ]
    print(f"{path.stem}: {equal} of {len(tokens)} texts have the same tokens; {sum(prompts)} prompts are equal")
    pairs = zip(stored["texts"], tokens, stored["tokens"], strict=True)
    others = [text for text, found, expected in pairs if found != expected]
    return sum(not any(map(str.isnumeric, text)) for text in others) + prompts.count(False)


if __name__ == "__main__":
    main()
