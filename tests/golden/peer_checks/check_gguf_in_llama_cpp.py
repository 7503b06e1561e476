"""Run the GGUF files of `export_for_llama_cpp.py` in llama.cpp and print the largest difference of a log-probability.

Run where `xllamacpp` is installed:
    python -m tests.golden.peer_checks.check_gguf_in_llama_cpp FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import xllamacpp

ALLOWED = 2e-2  # of a log-probability: SmolLM2 in float16; others differ by 2e-4
ALLOWED_WITH_GELU = 1e-1  # llama.cpp reads GELU from a table of float16
POSITIONS = (3, 9, 17, 24)


def main() -> None:
    failed = False
    for path in sorted(Path(sys.argv[1]).glob("*.gguf")):
        stored = np.load(path.with_suffix(".npz"))
        server = open_server(path)
        differences = []
        for length in POSITIONS:
            logits = stored["logits"][length - 1].astype(np.float64)
            expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            found = next_token_logprobs(server, stored["ids"][:length].tolist(), len(logits))
            differences.append(np.abs(found - expected).max())
        print(f"{path.stem}: log-probabilities differ by {max(differences):.2e}")
        failed |= max(differences) > (ALLOWED_WITH_GELU if "gemma" in path.stem else ALLOWED)
    sys.exit(int(failed))


def open_server(path: Path) -> xllamacpp.Server:
    """Load a model with caches in float32, and the adapter NAME.lora beside it if there is one."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 128, 1, False, -1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if path.with_suffix(".lora").is_file():
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(path.with_suffix(".lora")), 1.0)]
    return xllamacpp.Server(params)


def next_token_logprobs(server: xllamacpp.Server, ids: list[int], vocab_size: int) -> np.ndarray:
    """Return the log-probabilities of all tokens after a prompt, [V]."""
    request = {"prompt": ids, "max_tokens": 1, "logprobs": vocab_size, "temperature": 0.0, "cache_prompt": False}
    answer = server.handle_completions(request)
    entries = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    logprobs = np.full(vocab_size, -np.inf)
    for entry in entries:
        logprobs[entry["id"]] = entry["logprob"]
    return logprobs


if __name__ == "__main__":
    main()
