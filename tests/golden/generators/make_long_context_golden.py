"""Write long_context.npz: rotation tables and logits of every long-sequence strategy, computed by transformers.

Run where `torch` and `transformers` are installed (constraints of this repository do not matter to it):
    python -m tests.golden.generators.make_long_context_golden
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.golden import DATA
from tests.golden.cases import long_context_cases as cases
from tests.golden.cases.model_cases import make_inputs, make_weight


def main() -> None:
    arrays = {}
    for strategy in cases.STRATEGIES:
        keys = cases.expected_keys(strategy, cases.TRAINED, cases.HEAD_DIM)
        sizes = {key: value for key, value in cases.TABLE_SIZES.items() if key != "model_type"}
        rotary = LlamaRotaryEmbedding(LlamaConfig(**{**sizes, **keys}))
        for where, positions in cases.POSITIONS.items():
            arrays[f"tables/{strategy}/{where}"] = _tables(rotary, positions)
        arrays[f"logits/{strategy}"] = _logits(strategy)
        print(f"{strategy}: largest logit {np.abs(arrays[f'logits/{strategy}']).max():.3f}")
    config = Gemma3TextConfig(
        head_dim=cases.HEAD_DIM,
        num_hidden_layers=2,
        layer_types=list(cases.BY_LAYER_TYPE),
        rope_parameters={kind: dict(settings) for kind, settings in cases.BY_LAYER_TYPE.items()},
    )
    for kind in cases.BY_LAYER_TYPE:
        positions = cases.POSITIONS["beyond the trained context"]
        arrays[f"by_layer_type/{kind}"] = _tables(Gemma3RotaryEmbedding(config), positions, kind)
    np.savez_compressed(DATA / "long_context.npz", **arrays)


def _tables(rotary: torch.nn.Module, positions: list[int], *layer_type: str) -> np.ndarray:
    """Return cosine and sine of the positions, [2, S, H]."""
    tables = rotary(torch.zeros(1), torch.tensor([positions]), *layer_type)
    return np.stack([table[0].numpy() for table in tables])


def _logits(strategy: str) -> np.ndarray:
    """Return the logits of the tiny model on inputs longer than its trained context."""
    keys = cases.expected_keys(strategy, cases.TINY["max_position_embeddings"], cases.TINY["head_dim"])
    config = AutoConfig.for_model(**{**cases.TINY, **keys})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        parameter.data = torch.from_numpy(make_weight("long_context", name, tuple(parameter.shape)))
    with torch.no_grad():
        return model(torch.from_numpy(make_inputs("long_context")[0]), use_cache=False).logits.numpy()[
            :, cases.LOGIT_POSITIONS
        ]


if __name__ == "__main__":
    main()
