"""Write the golden files of tests/generation with transformers (PyTorch): logits filters, and continuations of prompts.

Run where PyTorch and transformers are installed: `python -m tests.golden.generators.make_generate_golden`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.golden import DATA
from tests.golden.cases.generate_cases import BEAM_CASES, BEAM_OPTIONS, CASES, NUM_NEW, OPTIONS, make_prompts
from tests.golden.cases.model_cases import CASES as MODELS
from tests.golden.cases.model_cases import make_weight

FILTERS = {
    "penalty_1.3": RepetitionPenaltyLogitsProcessor(1.3),
    "penalty_0.8": RepetitionPenaltyLogitsProcessor(0.8),
    "temperature_0.6": TemperatureLogitsWarper(0.6),
    "top_k_1": TopKLogitsWarper(1),
    "top_k_7": TopKLogitsWarper(7),
    "top_p_0.1": TopPLogitsWarper(0.1),
    "top_p_0.7": TopPLogitsWarper(0.7),
    "top_p_0.95": TopPLogitsWarper(0.95),
}


def filters() -> dict[str, np.ndarray]:
    """Return each filter's output for one batch of random logits [4, 97] and previous ids [4, 11]."""
    rng = np.random.default_rng(20)
    logits = (rng.standard_normal((4, 97)) * 3).astype(np.float32)
    seen = rng.integers(0, 97, (4, 11))
    results = {
        name: apply(torch.from_numpy(seen), torch.from_numpy(logits.copy())).numpy() for name, apply in FILTERS.items()
    }
    chained = torch.from_numpy(logits.copy())
    for name in ("penalty_1.3", "temperature_0.6", "top_k_7", "top_p_0.7"):
        chained = FILTERS[name](torch.from_numpy(seen), chained)
    return {"logits": logits, "seen": seen, "chained": chained.numpy(), **results}


def continuations(
    cases: Sequence[str], options: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, list[list[int]]]]:
    """Return the tokens that `generate` appends to each prompt separately, without end token, by model and options."""
    results: dict[str, dict[str, list[list[int]]]] = {}
    for case in cases:
        config = AutoConfig.for_model(**MODELS[case])
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for name, parameter in model.named_parameters():
            parameter.data = torch.from_numpy(make_weight(case, name, tuple(parameter.shape)))
        results[case] = {
            option: [_continue(model, prompt, settings) for prompt in make_prompts(case)]
            for option, settings in options.items()
        }
    return results


def _continue(model: torch.nn.Module, prompt: list[int], settings: Mapping[str, Any]) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)  # otherwise transformers derives it from zeros in the prompt
    fixed = {"max_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    output = model.generate(ids, attention_mask=mask, **{**fixed, **settings})
    tokens = output[0, len(prompt) :].tolist()
    ends = [index for index, token in enumerate(tokens) if token in (settings.get("eos_token_id") or [])]
    return tokens[: ends[0]] if ends else tokens


if __name__ == "__main__":
    (DATA / "continuations.json").write_text(json.dumps(continuations(CASES, OPTIONS)) + "\n")
    (DATA / "beam_search.json").write_text(json.dumps(continuations(BEAM_CASES, BEAM_OPTIONS)) + "\n")
    np.savez_compressed(DATA / "logits_filters.npz", **filters())
