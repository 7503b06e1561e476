"""Write distillation.npz: losses and gradients of tiny models under the loss of TRL's GKDTrainer."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trl.experimental.gkd import GKDTrainer

from tests.golden import DATA
from tests.golden.cases.distillation_cases import CASES, GRADIENT, make_rows, weight
from tests.golden.cases.model_cases import CASES as MODELS


def build_model(role: str, case: str) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[case]), attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        parameter.data = torch.from_numpy(weight(role, case, name, tuple(parameter.shape)).astype(np.float32))
    return model


def padded_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return input ids, attention mask and labels [B, S], padded on the right."""
    rows = make_rows()
    longest = max(len(tokens) for tokens, _ in rows)
    ids, labels = np.zeros((len(rows), longest), np.int64), np.full((len(rows), longest), -100, np.int64)
    for index, (tokens, start) in enumerate(rows):
        ids[index, : len(tokens)] = tokens
        labels[index, start : len(tokens)] = tokens[start:]
    mask = np.arange(longest) < np.array([[len(tokens)] for tokens, _ in rows])
    return torch.from_numpy(ids), torch.from_numpy(mask.astype(np.int64)), torch.from_numpy(labels)


def main() -> None:
    arrays = {}
    ids, mask, labels = padded_rows()
    for case, options in CASES.items():
        student, teacher = build_model("student", options["student"]), build_model("teacher", options["teacher"])
        with torch.no_grad():
            teacher_logits = teacher(input_ids=ids, attention_mask=mask).logits[:, :-1]
        loss = GKDTrainer.generalized_jsd_loss(
            student(input_ids=ids, attention_mask=mask).logits[:, :-1],
            teacher_logits,
            labels=labels[:, 1:],
            beta=options["beta"],
            temperature=options["temperature"],
        )
        loss.backward()
        arrays[f"{case}/loss"] = np.float32(loss.item())
        gradients = {name: parameter.grad.numpy() for name, parameter in student.named_parameters()}
        # The gradient of one parameter, and the norms of all gradients, keep the file small.
        arrays[f"{case}/gradient"] = gradients[GRADIENT]
        arrays[f"{case}/norms"] = np.array([np.linalg.norm(gradients[name]) for name in sorted(gradients)], np.float32)
    np.savez_compressed(DATA / "distillation.npz", **arrays)


if __name__ == "__main__":
    main()
