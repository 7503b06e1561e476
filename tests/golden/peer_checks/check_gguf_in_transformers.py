"""Load the GGUF files of `export_gguf_for_peers.py` in transformers: logits, tokens and chat template.

transformers reads files of some architectures only; the others are listed.

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


def main() -> None:
    worst, refused, failures = 0.0, [], 0
    for path in sorted(Path(sys.argv[1]).glob("*.gguf")):
        stored = np.load(path.with_suffix(".npz"))
        try:
            model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        except Exception as error:  # of many kinds, by architecture
            refused.append(f"{path.stem} ({type(error).__name__}: {str(error).splitlines()[0][:80]})")
            continue
        with torch.no_grad():
            logits = model.eval()(torch.from_numpy(stored["ids"][None])).logits.numpy()[0]
        difference = float(np.abs(logits - stored["logits"]).max())
        print(f"{path.stem}: logits differ by {difference:.2e} (largest {np.abs(logits).max():.3g})")
        worst = max(worst, difference)
        if path.with_suffix(".json").is_file():
            failures += check_text(path)
    print("not read by transformers:", "; ".join(refused))
    sys.exit(int(worst > ALLOWED or failures > 0))


def check_text(path: Path) -> int:
    """Compare tokens and chat template; return the number of differences."""
    stored = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokens = [tokenizer.encode(text, add_special_tokens=False) for text in stored["texts"]]
    equal = sum(found == expected for found, expected in zip(tokens, stored["tokens"], strict=True))
    prompts = [
        tokenizer.apply_chat_template(chat["messages"], tokenize=False, add_generation_prompt=True) == chat["prompt"]
        for chat in stored["chats"]
    ]
    print(f"{path.stem}: {equal} of {len(tokens)} texts have the same tokens; {sum(prompts)} prompts are equal")
    return len(tokens) - equal + prompts.count(False)


if __name__ == "__main__":
    main()
