"""Write preference_training.npz: losses, metrics and gradients of a tiny model under TRL's DPOTrainer.

The trainer's loss runs on a model of transformers with TRL's own lm_head; a stand-in for the trainer has its options.
"""

from __future__ import annotations

import types
from collections import defaultdict

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.utils import add_fused_lm_head

from tests.golden import DATA
from tests.golden.cases.model_cases import CASES, make_weight
from tests.golden.cases.preference_training_cases import LOSSES, MODEL, make_pairs, make_reference

METRICS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen")


def build_model() -> torch.nn.Module:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CASES[MODEL]), attn_implementation="eager").train()
    for name, parameter in model.named_parameters():
        parameter.data = torch.from_numpy(make_weight(MODEL, name, tuple(parameter.shape)))
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    return model


def build_trainer(loss_type: str, beta: float) -> types.SimpleNamespace:
    accelerator = types.SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda value: value)
    accelerator.gather = accelerator.gather_for_metrics
    return types.SimpleNamespace(
        accelerator=accelerator,
        model=types.SimpleNamespace(training=True),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=beta,
        ld_alpha=None,
        label_smoothing=0.0,
        use_weighting=False,
        f_divergence_type="reverse_kl",
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )


def padded_batch() -> dict[str, torch.Tensor]:
    """Return the chosen rows, then the rejected ones, padded on the right."""
    pairs, reference = make_pairs(), torch.from_numpy(make_reference())
    rows = [(pair[0], pair[side]) for side in (1, 2) for pair in pairs]
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids, attention, completion = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(3))
    for index, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[index, :end] = torch.from_numpy(np.concatenate([prompt, answer]))
        attention[index, :end] = completion[index, len(prompt) : end] = 1
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "completion_mask": completion,
        "ref_chosen_logps": reference[:, 0],
        "ref_rejected_logps": reference[:, 1],
    }


def main() -> None:
    arrays = {}
    for loss_type, options in LOSSES.items():
        model, trainer = build_model(), build_trainer(loss_type, **options)
        loss = DPOTrainer._compute_loss(trainer, model, padded_batch(), False)
        loss.backward()
        arrays[f"{loss_type}/loss"] = loss.detach().numpy()
        arrays |= {f"{loss_type}/{name}": np.float32(trainer._metrics["train"][name][0]) for name in METRICS}
        if loss_type == "sigmoid":
            arrays |= {f"gradient:{name}": parameter.grad.numpy() for name, parameter in model.named_parameters()}
    np.savez_compressed(DATA / "preference_training.npz", **arrays)


if __name__ == "__main__":
    main()
