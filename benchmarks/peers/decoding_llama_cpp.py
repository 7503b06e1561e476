"""Worker of benchmarks/decoding.py for llama.cpp: prints the seconds of the prompt and of a step as JSON.

The rows of a batch are sequences of one context, which are decoded together, as llama.cpp's `llama-batched-bench` does.
"""

from __future__ import annotations

import json
import sys

import llama_cpp
import numpy as np

from benchmarks.measure import decoding_seconds, random_documents


class Batch:
    """Rows of tokens in one `llama_batch`, which asks for the logits of the last position of each row."""

    def __init__(self, rows: int, width: int) -> None:
        self._batch = llama_cpp.llama_batch_init(rows * width, 0, 1)
        self._rows, self._width = rows, width

    def decode(self, context: llama_cpp.llama_context_p, tokens: np.ndarray, start: int, vocab: int) -> np.ndarray:
        """Run tokens [rows, width] at positions from `start` on; return the most likely next tokens, [rows, 1]."""
        batch, last = self._batch, []
        batch.n_tokens = tokens.size
        for row in range(self._rows):
            for column in range(self._width):
                index = row * self._width + column
                batch.token[index], batch.pos[index] = int(tokens[row, column]), start + column
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
                batch.logits[index] = column == self._width - 1
            last.append((row + 1) * self._width - 1)
        if llama_cpp.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        logits = [np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, index), (vocab,)) for index in last]
        return np.array([[row.argmax()] for row in logits])


def main() -> None:
    case = json.loads(sys.argv[1])
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(case["model"].encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_threads = params.n_threads_batch = case["threads"]
    params.n_seq_max = case["batch"]
    params.n_ctx = case["batch"] * (case["prompt"] + case["new"] + 32)
    params.n_batch = params.n_ubatch = max(512, case["batch"] * case["prompt"])
    context = llama_cpp.llama_init_from_model(model, params)
    assert model and context
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    prompts = random_documents(case["batch"], case["prompt"])
    whole, one = Batch(case["batch"], case["prompt"]), Batch(case["batch"], 1)

    def generate(count: int) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        tokens = whole.decode(context, prompts, 0, vocab)
        for step in range(count - 1):
            tokens = one.decode(context, tokens, case["prompt"] + step, vocab)

    print(json.dumps(decoding_seconds(generate, case["new"], case["repeats"])), flush=True)


if __name__ == "__main__":
    main()
