"""Worker of benchmarks/decoding.py for llama.cpp: prints the seconds of the prompt and of a step as JSON.

The rows of a batch are sequences of one context, which are decoded together, as llama.cpp's `llama-batched-bench` does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import llama_cpp
import numpy as np

from benchmarks.measure import decoding_seconds, random_documents


class Context:
    """llama.cpp context, which decodes several sequences with the model in a GGUF file.

    Args:
        file: the GGUF file.
        rows: number of sequences.
        length: number of tokens of a sequence, including the tokens to be generated.
        threads: number of threads.
    """

    def __init__(self, file: str, rows: int, length: int, threads: int) -> None:
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_threads = params.n_threads_batch = threads
        params.n_seq_max, params.n_ctx = rows, rows * (length + 32)
        params.n_batch = params.n_ubatch = max(512, rows * length)
        self._context = llama_cpp.llama_init_from_model(model, params)
        assert model and self._context
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(rows * length, 0, 1)
        self._positions = [0] * rows

    def clear(self) -> None:
        """Clear the key-value cache."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        self._positions = [0] * len(self._positions)

    def decode(self, rows: Sequence[Sequence[int]]) -> list[int]:
        """Append tokens to each sequence; return the most likely next token of each."""
        batch, last = self._batch, []
        batch.n_tokens = 0
        for sequence, tokens in enumerate(rows):
            for token in tokens:
                index = batch.n_tokens
                batch.token[index], batch.pos[index] = int(token), self._positions[sequence]
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
                batch.logits[index] = False
                batch.n_tokens, self._positions[sequence] = index + 1, self._positions[sequence] + 1
            batch.logits[batch.n_tokens - 1] = True
            last.append(batch.n_tokens - 1)
        if llama_cpp.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        rows_of_logits = [llama_cpp.llama_get_logits_ith(self._context, index) for index in last]
        return [int(np.ctypeslib.as_array(row, (self._vocab,)).argmax()) for row in rows_of_logits]


def main() -> None:
    case = json.loads(sys.argv[1])
    prompts = random_documents(case["batch"], case["prompt"]).tolist()
    context = Context(case["model"], case["batch"], case["prompt"] + case["new"], case["threads"])

    def generate(count: int) -> None:
        context.clear()
        tokens = context.decode(prompts)
        for _ in range(count - 1):
            tokens = context.decode([[token] for token in tokens])

    print(json.dumps(decoding_seconds(generate, case["new"], case["repeats"])), flush=True)


if __name__ == "__main__":
    main()
