"""Write OUT/ARCHITECTURE.gguf, models of every architecture in GGUF files, with the logits computed here.

`check_gguf_in_llama_cpp.py` reads them.

    python -m tests.golden.peer_checks.export_for_llama_cpp OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

import paddle

from tests.checkpoint.gguf.llama_cpp_files import MODELS, make_model, write_model


@paddle.no_grad()
def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    ids = np.random.default_rng(0).integers(5, 90, 24)
    for architecture in MODELS:
        model = make_model(architecture)
        write_model(model, architecture, out / f"{architecture}.gguf")
        np.savez(out / f"{architecture}.npz", ids=ids, logits=model(paddle.to_tensor(ids[None])).numpy()[0])


if __name__ == "__main__":
    main()
