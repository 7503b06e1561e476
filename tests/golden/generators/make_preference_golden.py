"""Write preference.npz: losses, rewards and gradients of TRL's preference trainers.

The methods that compute a loss from log-probabilities are called with a stand-in for the trainer, which has its
options, and a stand-in for the model, whose outputs are the given log-probabilities. TRL returns the mean over a batch,
so that each pair is a batch of its own.
"""

from __future__ import annotations

import types
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

from tests.golden import DATA
from tests.golden.cases.preference_cases import (
    CPO_CASES,
    KTO_CASES,
    NUM_PAIRS,
    ORPO_CASES,
    PAIR_CASES,
    answer_inputs,
    pair_inputs,
)

Stub = types.SimpleNamespace


class Accelerator:
    """Stand-in for the accelerator of one process."""

    device = torch.device("cpu")

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        return value

    gather_for_metrics = gather


class Trainer(Stub):
    """Stand-in for a trainer, with the attributes that its loss reads."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            accelerator=Accelerator(),
            model=Stub(training=True),
            aux_loss_enabled=False,
            precompute_ref_logps=True,
            _metrics={"train": defaultdict(list)},
            _total_train_tokens=0,
            _tp_size=1,
            **options,
        )


def model_with(log_probs: torch.Tensor) -> Any:
    """Return a stand-in for a model that assigns these log-probabilities to the tokens, [rows, positions]."""
    zeros = torch.zeros_like(log_probs)
    outputs = Stub(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    return lambda **_: outputs


def spread(total: torch.Tensor, length: int, width: int) -> torch.Tensor:
    """Return `width` log-probabilities, of which the first `length` are equal and sum to `total`."""
    return torch.cat([(total / length).expand(length), torch.zeros(width - length)])


def completion_mask(lengths: list[int]) -> torch.Tensor:
    """Return a mask [rows, 1 + positions]: a prompt of one token, then the tokens of each answer."""
    return torch.tensor([[0] + [1] * length + [0] * (max(lengths) - length) for length in lengths])


def dpo(options: dict[str, Any], inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    settings = {"loss_type": "sigmoid", "beta": 0.1, "label_smoothing": 0.0, **options}
    found = defaultdict(list)
    for pair in range(NUM_PAIRS):
        trainer = Trainer(
            loss_types=[settings["loss_type"]], loss_weights=[1.0], beta=settings["beta"], ld_alpha=None,
            label_smoothing=settings["label_smoothing"], use_weighting=False, f_divergence_type="reverse_kl",
        )  # fmt: skip
        chosen, rejected = leaf(inputs["chosen_logps"][pair]), leaf(inputs["rejected_logps"][pair])
        lengths = [int(inputs[f"{side}_lengths"][pair]) for side in ("chosen", "rejected")]
        width = max(lengths)
        mask = completion_mask(lengths)
        batch = {
            "input_ids": torch.ones_like(mask),
            "attention_mask": torch.ones_like(mask),
            "completion_mask": mask,
            "ref_chosen_logps": torch.tensor([inputs["reference_chosen"][pair]]),
            "ref_rejected_logps": torch.tensor([inputs["reference_rejected"][pair]]),
        }
        log_probs = torch.stack([spread(chosen, lengths[0], width), spread(rejected, lengths[1], width)])
        loss = DPOTrainer._compute_loss(trainer, model_with(log_probs), batch, False)
        loss.backward()
        metrics = trainer._metrics["train"]
        for name, value in (
            ("losses", loss.item()),
            ("chosen_rewards", metrics["rewards/chosen"][0]),
            ("rejected_rewards", metrics["rewards/rejected"][0]),
            ("accuracies", metrics["rewards/accuracies"][0]),
            ("chosen_gradients", chosen.grad.item()),
            ("rejected_gradients", rejected.grad.item()),
        ):
            found[name].append(value)
    return {name: np.array(values, np.float32) for name, values in found.items()}


def cpo(options: dict[str, Any], inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    settings = {"beta": 0.1, "label_smoothing": 0.0, "simpo_gamma": 0.5, **options}
    trainer = Trainer(alpha=0.0, **settings)
    leaves, given = without_reference(inputs, per_token=settings["loss_type"] == "simpo")
    return results(leaves, *CPOTrainer.cpo_loss(trainer, *given))


def orpo(options: dict[str, Any], inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    leaves, given = without_reference(inputs, per_token=True)
    ratios, *rewards, _, _ = ORPOTrainer.odds_ratio_loss(Trainer(**options), *given)
    return results(leaves, -ratios, *rewards)  # the trainer subtracts them from the loss of the chosen answer


def without_reference(inputs: dict[str, Any], per_token: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the log-probabilities of both answers, and what the loss reads: them, or their means per token."""
    leaves = [leaf(inputs["chosen_logps"]), leaf(inputs["rejected_logps"])]
    lengths = [torch.from_numpy(inputs[f"{side}_lengths"]) for side in ("chosen", "rejected")]
    return leaves, [values / length if per_token else values for values, length in zip(leaves, lengths, strict=True)]


def results(leaves: list[torch.Tensor], losses: torch.Tensor, *rewards: torch.Tensor) -> dict[str, np.ndarray]:
    losses.sum().backward()
    return {
        "losses": losses.detach().numpy(),
        "chosen_rewards": rewards[0].numpy(),
        "rejected_rewards": rewards[1].numpy(),
        "chosen_gradients": leaves[0].grad.numpy(),
        "rejected_gradients": leaves[1].grad.numpy(),
    }


def kto(options: dict[str, Any], inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    settings = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, "loss_type": "kto", **options}
    trainer = Trainer(calculate_KL=True, **settings)
    trainer._compute_kl_logps = lambda _model, _batch: torch.from_numpy(inputs["mismatched_logps"])
    lengths = inputs["lengths"].tolist()
    mask = completion_mask(lengths)
    logps = leaf(inputs["logps"])
    batch = {
        "input_ids": torch.ones_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "label": torch.from_numpy(inputs["is_desirable"]),
        "ref_logps": torch.from_numpy(inputs["reference"]),
        "ref_KL_logps": torch.from_numpy(inputs["mismatched_reference"]),
    }
    log_probs = torch.stack([spread(total, length, max(lengths)) for total, length in zip(logps, lengths, strict=True)])
    loss = KTOTrainer._compute_loss(trainer, model_with(log_probs), batch, False)
    loss.backward()
    metrics = {name.replace("/", "_"): np.float32(values[0]) for name, values in trainer._metrics["train"].items()}
    used = ("kl", "rewards_chosen", "rewards_rejected", "rewards_margins", "logps_chosen", "logps_rejected")
    return {
        "mean_loss": np.float32(loss.item()),
        "gradients": logps.grad.numpy(),
        **{name: metrics[name] for name in used},
    }


def leaf(values: Any) -> torch.Tensor:
    return torch.tensor(values, requires_grad=True)


def main() -> None:
    arrays = {}
    for cases, compute, inputs in (
        (PAIR_CASES, dpo, pair_inputs()),
        (CPO_CASES, cpo, pair_inputs()),
        (ORPO_CASES, orpo, pair_inputs()),
        (KTO_CASES, kto, answer_inputs()),
    ):
        for case, options in cases.items():
            found = compute({"loss_type": case, **options}, inputs)
            arrays |= {f"{case}/{name}": values for name, values in found.items()}
    np.savez_compressed(DATA / "preference.npz", **arrays)


if __name__ == "__main__":
    main()
