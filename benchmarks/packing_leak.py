"""Leak between the documents of a pack in this project and in transformers, on tiny models with slow decays.

    python -m benchmarks.packing_leak [--families NAME ... --peers .venv-peers/bin/python]

Both programs read the same saved models and the same documents. transformers gets one row with positions that restart
in each document, from its DataCollatorWithFlattening. `benchmarks/leak.py` defines the columns of the table.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

import numpy as np
import paddle
from paddle.nn import functional as F

from benchmarks import ROOT
from benchmarks.bench import run_module
from benchmarks.leak import Documents, Pass, measure_leak
from benchmarks.measure import environment
from benchmarks.triton_table import markdown
from paddlenlp_ext import AutoModelForCausalLM
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.utils.run_command import run_command
from tests.common.models import slow_decays
from tests.generation.tiny_models import FAMILIES, SIZES

CASES = {
    "Qwen3.5": "qwen3_5_gated_delta",
    "Qwen3-Next": "qwen3_next_fused_delta",
    "OLMo Hybrid": "olmo_hybrid_split_delta",
    "LFM2": "lfm2_convolutions",
    "Granite 4 H": "granite_4_mamba2",
    "Granite 4 without Mamba": "granite_4_without_rope",
    "Falcon H1": "falcon_h1_two_mixers",
    "Kimi Linear": "kimi_linear_delta",
    "Nemotron H": "nemotron_h_single_blocks",
    "Gemma 4": "gemma4_keys_as_values",
    "Gemma 4 E": "gemma4_e_shared_keys",
    "Qwen3": "qwen3_qk_norm",
}
"""Name of a family in the table -> tiny model."""


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--peers", default=str(ROOT / ".venv-peers" / "bin" / "python"), help="Python with transformers"
    )
    args = parser.parse_args(argv)
    table, peers = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for family in args.families:
            path = Path(folder) / CASES[family]
            config = {**SIZES, **FAMILIES[CASES[family]], "pad_token_id": None}
            model = slow_decays(AutoModelForCausalLM.from_config(config))
            model.save_pretrained(path)
            ours = leak_of(model)
            peers[family] = run_module(args.peers, f"peers.packing_leak {shlex.quote(str(path))}")
            table[family] = [*_cells(ours), *_cells(peers[family])]
    heads = ("logits", "gradient", "changed bits")
    print(
        markdown(
            [f"{program}, {head}" for program in ("this project", "transformers") for head in heads], table, "family"
        )
    )
    print(json.dumps({"peers": peers, **environment("paddlepaddle")}))


def leak_of(model: CausalLM) -> dict[str, float | int]:
    """Return the result of `measure_leak` for a model of this project."""
    model.train()

    def run(documents: Documents) -> Pass:
        embeddings = []

        def keep(layer: paddle.nn.Layer, inputs: object, output: paddle.Tensor) -> None:
            output.retain_grads()
            embeddings.append(output)

        hook = model.model.embed_tokens.register_forward_post_hook(keep)
        ids = paddle.to_tensor(np.concatenate(documents)[None])
        logits_BSV = model(ids, document_lengths=[[len(document) for document in documents]])
        hook.remove()
        targets = np.concatenate([np.append(document[1:], -100) for document in documents])
        F.cross_entropy(logits_BSV[0], paddle.to_tensor(targets), ignore_index=-100, reduction="sum").backward()
        weights = {name: _gradient(each) for name, each in model.named_parameters() if not each.stop_gradient}
        model.clear_gradients()
        return Pass(logits_BSV[0].numpy(), _gradient(embeddings[0])[0], weights)

    return measure_leak(run, model.config.vocab_size)


def _gradient(x: paddle.Tensor) -> np.ndarray:
    """Return the gradient of a tensor; zeros for a tensor that does not affect the loss."""
    return np.zeros(x.shape, np.float32) if x.grad is None else x.grad.numpy()


def _cells(leak: dict[str, float | int]) -> list[str]:
    share = leak["changed_bits"] / leak["bits"]
    changed = f"{leak['changed_bits']:,} ({share:.0%})" if leak["changed_bits"] else "0"
    return [f"{leak['logits']:.1e}", f"{leak['gradient']:.1e}", changed]


if __name__ == "__main__":
    run_command(main)
