"""Write the golden file of tests/evaluation with transformers (PyTorch): log-likelihoods of continuations.

Each sequence is computed alone, without padding; one that is too long loses the beginning of its prompt.
Run where PyTorch and transformers are installed: `python -m tests.golden.generators.make_likelihood_golden`.
"""

from __future__ import annotations

import json

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.golden import DATA
from tests.golden.cases.likelihood_cases import CASES, MAX_LENGTH, make_pairs
from tests.golden.cases.model_cases import CASES as MODELS
from tests.golden.cases.model_cases import make_weight


def likelihoods(case: str) -> list[float]:
    """Return the log-likelihood of each continuation."""
    config = AutoConfig.for_model(**MODELS[case])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        parameter.data = torch.from_numpy(make_weight(case, name, tuple(parameter.shape)))
    results = []
    for prompt, tokens in make_pairs(case):
        ids = torch.tensor([(prompt + tokens)[-(MAX_LENGTH + 1) :]])
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits[0, -len(tokens) :].double()
        targets = torch.tensor(tokens)
        chosen = logits.log_softmax(-1)[torch.arange(len(tokens)), targets]
        results.append(chosen.sum().item())
    return results


if __name__ == "__main__":
    (DATA / "likelihoods.json").write_text(json.dumps({case: likelihoods(case) for case in CASES}) + "\n")
