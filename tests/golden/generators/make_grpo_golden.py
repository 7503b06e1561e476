"""Write grpo.npz: advantages, losses, metrics and gradients of a tiny model under TRL's GRPOTrainer.

The trainer's methods run with a stand-in for the trainer, which has its options. The stand-in returns given completions
and rewards.
"""

from __future__ import annotations

import types
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head, split_tensor_dict

from tests.golden import DATA
from tests.golden.cases.grpo_cases import (
    CASES,
    END_TOKEN,
    GRADIENT,
    IN_MICRO_BATCHES,
    MAX_LENGTH,
    MODEL,
    NUM_GENERATIONS,
    REWARD_NAMES,
    REWARD_WEIGHTS,
    make_groups,
    make_rewards,
    make_sampling_noise,
    weight,
)
from tests.golden.cases.model_cases import CASES as MODELS

DEFAULTS = {
    "importance_sampling_level": "token",
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "scale_rewards": "group",
    "mask_truncated_completions": False,
    "temperature": 1.0,
    "importance_sampling_correction": False,
    "importance_sampling_mode": "sequence_mask",
    "importance_sampling_clip_max": 3.0,
}


def build_model(version: str, temperature: float) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[MODEL]), attn_implementation="eager").train()
    for name, parameter in model.named_parameters():
        parameter.data = torch.from_numpy(weight(version, name, tuple(parameter.shape)))
    add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
    return model


def build_trainer(options: dict[str, Any], sampling_logps: list[list[float]] | None, num_micro_batches: int) -> Any:
    groups = make_groups()
    prompts = [prompt for prompt, completions in groups for _ in completions]
    completions = [completion for _, each in groups for completion in each]
    accelerator = types.SimpleNamespace(
        device=torch.device("cpu"),
        gather=lambda value: value,
        reduce=lambda value, reduction: value,
        process_index=0,
        num_processes=1,
        is_main_process=False,
        unwrap_model=lambda model: model,
        autocast=lambda: torch.autocast("cpu", enabled=False),
    )
    high = options["epsilon"] if options["epsilon_high"] is None else options["epsilon_high"]
    args = types.SimpleNamespace(
        per_device_train_batch_size=len(prompts) // num_micro_batches,
        steps_per_generation=num_micro_batches,
        gradient_accumulation_steps=num_micro_batches,
        gradient_checkpointing_kwargs=None,
        report_to=[],
        use_bias_correction_kl=options["use_bias_correction_kl"],
        delta=options["delta"],
    )
    model = build_model("old", options["temperature"])
    trainer = types.SimpleNamespace(
        accelerator=accelerator,
        args=args,
        model=model,
        ref_model=build_model("reference", options["temperature"]),
        environment_factories=None,
        tools=None,
        environments=None,
        rollout_func=None,
        processing_class=types.SimpleNamespace(batch_decode=lambda ids, skip_special_tokens: ids),
        state=types.SimpleNamespace(num_input_tokens_seen=0, global_step=0),
        _tokenize_prompts=lambda _: (prompts, None, {}),
        _generate_single_turn=lambda *_: (completions, sampling_logps),
        _calculate_rewards=lambda *_: torch.from_numpy(make_rewards()).float(),
        _tokenizer=types.SimpleNamespace(pad_token_id=0),
        pad_to_multiple_of=None,
        eos_token_ids=[END_TOKEN],
        mask_truncated_completions=options["mask_truncated_completions"],
        num_iterations=2,
        use_vllm=options["importance_sampling_correction"],
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=options["importance_sampling_mode"],
        vllm_importance_sampling_clip_max=options["importance_sampling_clip_max"],
        vllm_importance_sampling_clip_min=None,
        beta=options["beta"],
        reward_weights=torch.tensor(REWARD_WEIGHTS),
        reward_func_names=list(REWARD_NAMES),
        reward_funcs=[None, None],
        num_generations=NUM_GENERATIONS,
        multi_objective_aggregation="sum_then_normalize",
        scale_rewards=options["scale_rewards"],
        importance_sampling_level=options["importance_sampling_level"],
        loss_type=options["loss_type"],
        epsilon_low=options["epsilon"],
        epsilon_high=high,
        max_completion_length=MAX_LENGTH,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=num_micro_batches,
        _metrics={"train": defaultdict(list)},
        _logs={
            "prompt": [],
            "completion": [],
            "advantages": [],
            "rewards": defaultdict(list),
            "extra": defaultdict(list),
        },
        _pending_extra_logs={},
        _pending_metrics={},
        log_multimodal=False,
    )
    trainer._get_per_token_logps_and_entropies = types.MethodType(
        GRPOTrainer._get_per_token_logps_and_entropies, trainer
    )
    trainer._generate = types.MethodType(GRPOTrainer._generate, trainer)
    trainer._is_vlm = False
    return trainer


def unpadded(values: torch.Tensor) -> np.ndarray:
    """Return the values of the tokens of all completions, one completion after the other."""
    lengths = [len(completion) for _, completions in make_groups() for completion in completions]
    return np.concatenate([row[:length] for row, length in zip(values.numpy(), lengths, strict=True)])


def run(
    options: dict[str, Any], sampling_logps: list[list[float]] | None = None, num_micro_batches: int = 1
) -> tuple[Any, Any, Any, float]:
    """Return the trainer, the sampled batch, the model with the gradient of all micro-batches, and their loss."""
    trainer = build_trainer(options, sampling_logps, num_micro_batches)
    inputs = [{"prompt": "p"} for _, completions in make_groups() for _ in completions]
    batch = GRPOTrainer._generate_and_score_completions(trainer, inputs)
    model = build_model("new", options["temperature"])
    total = 0.0
    for micro_batch in split_tensor_dict(batch, num_micro_batches):
        loss = GRPOTrainer._compute_loss(trainer, model, micro_batch)
        loss.backward()
        total += loss.item()
    return trainer, batch, model, total


def gradients_of(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Return the gradient of one parameter, and the norms of all gradients, which keep the file small."""
    gradients = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    norms = np.array([np.linalg.norm(gradients[name]) for name in sorted(gradients)], np.float32)
    return {"gradient": gradients[GRADIENT], "norms": norms}


def main() -> None:
    PartialState()
    arrays = {}
    for case, changes in CASES.items():
        options, sampling = {**DEFAULTS, **changes}, None
        if options["importance_sampling_correction"]:
            # A first run computes the log-probabilities in training.
            _, batch, _, _ = run({**options, "importance_sampling_correction": False})
            noise = make_sampling_noise()
            ends = np.cumsum([len(each) for each in noise])[:-1]
            logps = np.split(unpadded(batch["old_per_token_logps"]), ends)
            sampling = [(each + own).tolist() for each, own in zip(logps, noise, strict=True)]
        trainer, batch, model, loss = run(options, sampling)
        arrays[f"{case}/loss"] = np.float32(loss)
        arrays[f"{case}/advantages"] = batch["advantages"].numpy()
        arrays[f"{case}/old_logps"] = unpadded(batch["old_per_token_logps"])
        if options["beta"]:
            arrays[f"{case}/reference_logps"] = unpadded(batch["ref_per_token_logps"])
        metrics = trainer._metrics["train"]
        compared = metrics.keys() - {"num_tokens"}
        arrays |= {f"{case}/metric:{name}": np.float32(metrics[name][0]) for name in sorted(compared)}
        arrays |= {f"{case}/{name}": values for name, values in gradients_of(model).items()}
        if case in IN_MICRO_BATCHES:
            _, _, model, loss = run(options, sampling, len(make_groups()))
            arrays[f"{case}/micro_batches/loss"] = np.float32(loss)
            arrays |= {f"{case}/micro_batches/{name}": values for name, values in gradients_of(model).items()}
    np.savez_compressed(DATA / "grpo.npz", **arrays)


if __name__ == "__main__":
    main()
