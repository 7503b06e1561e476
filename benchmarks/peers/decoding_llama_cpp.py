"""Worker of benchmarks/decoding.py for llama.cpp: prints the seconds of the prompt and of a step as JSON.

A batch is as many requests at the same time, which llama.cpp's server decodes together.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import xllamacpp

from benchmarks.measure import decoding_seconds, random_documents


def main() -> None:
    case = json.loads(sys.argv[1])
    params = xllamacpp.CommonParams()
    params.model.path = case["model"]
    params.n_parallel, params.verbosity = case["batch"], -1
    params.n_ctx = case["batch"] * (case["prompt"] + case["new"] + 32)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = case["threads"]
    server = xllamacpp.Server(params)
    prompts = random_documents(case["batch"], case["prompt"]).tolist()

    def request(prompt: list[int], count: int) -> None:
        options = {"max_tokens": count, "temperature": 0.0, "cache_prompt": False, "ignore_eos": True}
        answer = server.handle_completions({"prompt": prompt, **options})
        assert answer["usage"]["completion_tokens"] == count, answer

    with ThreadPoolExecutor(case["batch"]) as pool:
        figures = decoding_seconds(
            lambda count: list(pool.map(request, prompts, [count] * case["batch"])), case["new"], case["repeats"]
        )
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
