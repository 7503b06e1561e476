"""Worker of benchmarks/exported_answers.py for llama.cpp: prints greedy answers of a GGUF file as JSON.

    PYTHON -m benchmarks.peers.answers_llama_cpp CASE.json

CASE.json has the file `model`, `prompts` (token ids), `tokens`, `batch` and `end_tokens`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from benchmarks.peers.decoding_llama_cpp import Context


def main() -> None:
    case = json.loads(Path(sys.argv[1]).read_text())
    prompts, count, rows = case["prompts"], case["tokens"], case["batch"]
    context = Context(case["model"], rows, max(map(len, prompts)) + count, os.cpu_count() or 1)
    answers = []
    for first in range(0, len(prompts), rows):
        group = prompts[first : first + rows]
        context.clear()
        next_tokens = context.decode(group)
        found = [[token] for token in next_tokens]
        for _ in range(count - 1):
            next_tokens = context.decode([[token] for token in next_tokens])
            for row, token in zip(found, next_tokens, strict=True):
                row.append(token)
        answers += [ended(row, case["end_tokens"]) for row in found]
    print(json.dumps(answers), flush=True)


def ended(row: list[int], end_tokens: list[int]) -> list[int]:
    """Return the tokens before the first end token."""
    return row[: next((index for index, token in enumerate(row) if token in end_tokens), len(row))]


if __name__ == "__main__":
    main()
