"""Write models/<case>.npz: logits, loss and all gradients of the tiny models, computed by transformers with PyTorch.

Run where `torch` and `transformers` are installed (constraints of this repository do not matter to it):
    python -m tests.golden.generators.make_model_golden [CASE ...]
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from transformers import AutoConfig

from tests.golden import DATA
from tests.golden.cases.model_cases import CASES, make_inputs, make_weight
from tests.golden.causal_lms import AutoModelForCausalLM

FOLDER = DATA / "models"
IN_FLOAT64 = {
    "gemma4_keys_as_values",
    "kimi_linear_query_latents",
}  # rounding in fp32 alone takes most of the bound of the tests


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for case in sys.argv[1:] or CASES:
        settings = CASES[case]
        config = AutoConfig.for_model(**settings)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
        for name, parameter in model.named_parameters():
            parameter.data = torch.from_numpy(make_weight(case, name, tuple(parameter.shape)))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias", "act_fn.beta", "act_fn.eps", "layer_scalar")):
                buffer.copy_(torch.from_numpy(make_weight(case, name, tuple(buffer.shape))))
        if case in IN_FLOAT64:
            model.set_experts_implementation("eager")  # grouped products have no float64
            model = model.double()
        input_ids, labels = (torch.from_numpy(array) for array in make_inputs(case))
        output = model(input_ids, use_cache=False)
        logits = output.logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if getattr(config, "output_router_logits", False):
            loss = loss + config.router_aux_loss_coef * output.aux_loss
        loss.backward()
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        gradients = {f"gradient:{name}": parameter.grad.numpy() for name, parameter in trained.items()}
        arrays = {"logits": logits.detach().numpy(), "loss": loss.detach().numpy(), **gradients}
        in_fp32 = {name: array.astype(np.float32) for name, array in arrays.items()}
        np.savez_compressed(FOLDER / f"{case}.npz", **in_fp32)
        print(f"{case}: loss {loss:.6f}, {len(gradients)} gradients")


if __name__ == "__main__":
    main()
