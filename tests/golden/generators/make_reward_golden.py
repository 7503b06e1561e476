"""Write reward.npz: scores, losses, metrics and gradients of tiny reward models under TRL's RewardTrainer.

The trainer's loss runs on a sequence classifier of transformers; a stand-in for the trainer has its options. The config
that transformers saves is written to reward_config.json.
"""

from __future__ import annotations

import json
import tempfile
import types
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification
from trl.trainer.reward_trainer import RewardTrainer

from tests.golden import DATA
from tests.golden.cases.model_cases import CASES, make_weight
from tests.golden.cases.preference_training_cases import MODEL, make_pairs
from tests.golden.cases.reward_cases import FAMILIES, LOSSES, PAD_TOKEN_ID

METRICS = ("accuracy", "margin", "mean_reward", "min_reward", "max_reward")


def build_model(case: str) -> torch.nn.Module:
    config = AutoConfig.for_model(**{**CASES[case], "num_labels": 1, "pad_token_id": PAD_TOKEN_ID})
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").train()
    for name, parameter in model.named_parameters():
        parameter.data = torch.from_numpy(make_weight(case, name, tuple(parameter.shape)))
    return model


def build_trainer(model: torch.nn.Module, coefficient: float | None) -> types.SimpleNamespace:
    accelerator = types.SimpleNamespace(gather=lambda value: value, gather_for_metrics=lambda value: value)
    return types.SimpleNamespace(
        accelerator=accelerator,
        model=model,
        args=types.SimpleNamespace(center_rewards_coefficient=coefficient),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )


def padded_batch() -> dict[str, torch.Tensor]:
    """Return the chosen rows, then the rejected ones, padded on the right."""
    rows = [np.concatenate([pair[0], pair[side]]) for side in (1, 2) for pair in make_pairs()]
    ids = torch.full((len(rows), max(map(len, rows))), PAD_TOKEN_ID, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.from_numpy(row)
        attention[index, : len(row)] = 1
    return {"input_ids": ids, "attention_mask": attention}


def main() -> None:
    arrays = {}
    for case in FAMILIES:
        with torch.no_grad():
            arrays[f"scores/{case}"] = build_model(case)(**padded_batch()).logits.numpy().reshape(2, -1).T
    for name, options in LOSSES.items():
        model = build_model(MODEL)
        trainer, batch = build_trainer(model, options.get("center_rewards_coefficient")), padded_batch()
        if "margins" in options:
            batch["margin"] = torch.tensor(options["margins"])
        loss = RewardTrainer.compute_loss(trainer, model, batch)
        loss.backward()
        arrays[f"{name}/loss"] = loss.detach().numpy()
        arrays |= {f"{name}/{metric}": np.float32(trainer._metrics["train"][metric][0]) for metric in METRICS}
        if name == "centered":
            arrays |= {f"{name}/gradient:{key}": value.grad.numpy() for key, value in model.named_parameters()}
    np.savez_compressed(DATA / "reward.npz", **arrays)
    with tempfile.TemporaryDirectory() as folder:
        build_model(MODEL).save_pretrained(folder)
        saved = json.loads((Path(folder) / "config.json").read_text())
    kept = ("architectures", "id2label", "label2id", "num_labels", "pad_token_id", "problem_type")
    text = json.dumps({key: saved[key] for key in kept if key in saved}, indent=2)
    (DATA / "reward_config.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
