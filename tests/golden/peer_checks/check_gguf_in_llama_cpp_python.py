"""Compare logits, prompts and answers of SmolLM2's GGUF files in llama.cpp with those computed here.

llama.cpp's CPU kernels round activations to a type that goes with the weights (float16, bfloat16, blocks of int8).
Built with BLAS, it widens weights to float32 and multiplies in float32 in products of 32 rows or more. Every position
of a text is output, so that every product with weights has so many rows, and caches are in float32. Other builds exceed
the allowed difference.

Run where `llama-cpp-python` is installed, on the files of `export_gguf_for_peers.py`:
    python -m tests.golden.peer_checks.check_gguf_in_llama_cpp_python FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

ALLOWED = 1e-3  # of a logit


def main() -> None:
    folder, failed = Path(sys.argv[1]), False
    for path in sorted(folder.glob("types/*.gguf")):
        stored = np.load(path.with_suffix(".npz"))
        expected, found = stored["logits"], logits(path, stored["ids"].tolist())
        difference = np.abs(found - expected).max()
        of_logprobs = np.abs(log_softmax(found) - log_softmax(expected)).max()
        equal = np.mean(found.argmax(-1) == expected.argmax(-1))
        print(f"{path.stem}: logits differ by {difference:.2e}, log-probabilities by {of_logprobs:.2e};", end=" ")
        print(f"the most likely token is the same at {equal:.1%} of {len(expected)} positions")
        failed |= bool(difference > ALLOWED)
    chats = json.loads((folder / "smollm2.json").read_text(encoding="utf-8"))["chats"]
    model = load(folder / "smollm2.gguf", 256)
    for chat in chats:
        failed |= not same_chat(model, chat)
    sys.exit(int(failed))


def load(path: Path, length: int) -> llama_cpp.Llama:
    """Load a model with a cache in float32 that computes prompts of up to `length` tokens at once."""
    return llama_cpp.Llama(
        str(path),
        n_ctx=length,
        n_batch=length,
        n_ubatch=length,
        n_threads=1,  # others would spin where processors are shared
        n_threads_batch=1,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        flash_attn=False,
        logits_all=True,
        verbose=False,
    )


def logits(path: Path, ids: list[int]) -> np.ndarray:
    """Return the logits of all positions of a text, [T, V] float32."""
    model = load(path, len(ids))
    model.eval(ids)
    return model.scores[: len(ids)]


def log_softmax(rows: np.ndarray) -> np.ndarray:
    shifted = rows.astype(np.float64) - rows.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def same_chat(model: llama_cpp.Llama, chat: dict[str, Any]) -> bool:
    """Answer a chat by the file's own template; compare the prompt's tokens, the answer and what ended it."""
    answer: Any = model.create_chat_completion(
        chat["messages"], temperature=0.0, repeat_penalty=1.0, max_tokens=chat["max_tokens"]
    )
    choice = answer["choices"][0]
    prompt = model.input_ids[: answer["usage"]["prompt_tokens"]].tolist()
    text, reason = choice["message"]["content"], choice["finish_reason"]
    equal = [prompt == chat["prompt_ids"], text.strip() == chat["answer"].strip(), reason == chat["reason"]]
    print(f"prompt, answer, end equal: {equal}; ended by {reason}: {text!r}")
    return all(equal)


if __name__ == "__main__":
    main()
