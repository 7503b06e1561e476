"""Write OUT/CASE/, the static graph of a tiny model of every family, with tokens and the model's logits.

`check_program_without_package.py` runs them where only paddlepaddle and numpy are installed.

    python -m tests.golden.peer_checks.export_programs OUT
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

import paddle

from paddlenlp_ext.checkpoint.config_json import write_model_config
from paddlenlp_ext.generation.logits_processors import on_host
from paddlenlp_ext.generation.prefill_and_decode import prefill, step
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_model import quantize_linears
from paddlenlp_ext.static_graph.export import describe_program
from paddlenlp_ext.static_graph.trace import save_program
from tests.generation.tiny_models import FAMILIES, SIZES, random_prompts, tiny_model

LENGTHS, LENGTHS_BFLOAT16 = (5, 11, 1), (4, 1)  # from nine positions on, the model rounds activations to bfloat16
STEPS = 4


def cases() -> Iterator[tuple[str, Any]]:
    """Yield the name and the model of each case."""
    for family in FAMILIES:
        yield family, tiny_model(family)
    for family in ("llama_grouped_heads", "mixtral_experts", "deepseek_v3_latents"):
        for algo in ("weight_only_int8", "weight_only_int4"):
            model = AutoModelForCausalLM.from_config({**SIZES, **FAMILIES[family]})
            quantize_linears(model, QuantizationConfig(algo=algo))
            yield f"{family}_{algo}", model
        yield f"{family}_bfloat16", AutoModelForCausalLM.from_config({**SIZES, **FAMILIES[family]}, dtype="bfloat16")


@paddle.no_grad()
def write_case(folder: Path, model: Any) -> None:
    """Write the program, the tokens of left-padded prompts and of some steps, and the logits after each."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model_config(folder, model.config.source, model.dtype_name)
    save_program(model, folder, "model")
    describe_program(folder, model)
    prompts = random_prompts(LENGTHS if model.dtype_name == "float32" else LENGTHS_BFLOAT16)
    width = max(map(len, prompts))
    ids_BS = np.array([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask_BS = np.array([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    cache, logits_BV = prefill(model, prompts)
    tokens, logits = [], [logits_BV.astype("float32").numpy()]
    for _ in range(STEPS):
        tokens.append(logits[-1].argmax(-1)[:, None])
        logits.append(on_host(step(model, tokens[-1].tolist(), cache))[:, -1].copy())
    np.savez(folder / "expected.npz", ids=ids_BS, mask=mask_BS, tokens=np.stack(tokens), logits=np.stack(logits))


def main() -> None:
    for name, model in cases():
        write_case(Path(sys.argv[1]) / name, model)


if __name__ == "__main__":
    main()
