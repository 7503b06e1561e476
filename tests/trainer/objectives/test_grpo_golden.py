"""Losses, gradients and metrics of GRPO on stored rollouts against TRL, with shared prompts and plain documents."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddlenlp_ext.config.run_config import GRPO_SECTIONS, RunConfig
from paddlenlp_ext.data.rollouts.policy_order import PolicyStepBatch
from paddlenlp_ext.data.rollouts.prompt_dataset import StoredRollouts
from paddlenlp_ext.data.rollouts.rollout import Rollout, read_rollouts, write_rollouts
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.policy_optimization.advantages import group_advantages
from paddlenlp_ext.rewards.load_rewards import Reward
from paddlenlp_ext.rewards.score import total_rewards
from paddlenlp_ext.trainer.forward_backward import SequentialSchedule, hidden_states
from paddlenlp_ext.trainer.objectives.grpo_objective import GRPOObjective
from paddlenlp_ext.trainer.single_process import SingleProcess
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
from tests.golden.cases.model_cases import VOCAB

GOLDEN = np.load(DATA / "grpo.npz")


def make_model(version: str) -> CausalLM:
    model = CausalLM(DecoderConfig.from_dict({**MODELS[MODEL], "eos_token_id": END_TOKEN}))
    model.add_eos_token_ids([END_TOKEN])
    set_weights(model, version)
    return model


def set_weights(model: CausalLM, version: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.set_value(weight(version, name, tuple(parameter.shape)))


def make_rollouts(case: str) -> list[Rollout]:
    scores, groups = make_rewards(), make_groups()
    rewards = [Reward(*each, len, 1.0) for each in zip(REWARD_NAMES, REWARD_WEIGHTS, strict=True)]
    totals = total_rewards(scores, rewards)
    lengths = [len(completion) for _, completions in groups for completion in completions]
    logps = np.split(GOLDEN[f"{case}/old_logps"], np.cumsum(lengths)[:-1])
    noise, rollouts = make_sampling_noise(), []
    for index, (prompt, completions) in enumerate(groups):
        own = slice(index * NUM_GENERATIONS, (index + 1) * NUM_GENERATIONS)
        sampling = tuple(a + b for a, b in zip(logps[own], noise[own], strict=True))
        by_name = {name: scores[own, place] for place, name in enumerate(REWARD_NAMES)}
        is_corrected = "importance_sampling_mode" in CASES[case]
        rollouts.append(
            Rollout(
                index,
                prompt,
                tuple(completions),
                tuple(logps[own]),
                totals[own],
                sampling_logps=sampling if is_corrected else None,
                scores=by_name,
            )
        )
    return rollouts


def make_config(folder: Path, case: str, share_prompt: bool, num_micro_batches: int = 1) -> RunConfig:
    changes = dict(CASES[case])
    temperature = changes.pop("temperature", 1.0)
    grpo = GRPO_SECTIONS["grpo"](num_generations=NUM_GENERATIONS, share_prompt=share_prompt, **changes)
    generation = GRPO_SECTIONS["generation"](max_new_tokens=MAX_LENGTH, temperature=temperature)
    base = RunConfig(grpo=grpo, generation=generation, rewards=GRPO_SECTIONS["rewards"](), data=GRPO_SECTIONS["data"]())
    train = dataclasses.replace(
        base.train,
        output_dir=str(folder),
        per_device_train_batch_size=3 * NUM_GENERATIONS // num_micro_batches,
        gradient_accumulation_steps=num_micro_batches,
    )
    precision = dataclasses.replace(base.precision, device="cpu")
    return dataclasses.replace(base, train=train, precision=precision)


def run(folder: Path, case: str, share_prompt: bool, num_micro_batches: int = 1) -> tuple[float, dict[str, float], Any]:
    """Return loss, metrics and gradients of a step on the stored groups."""
    file = folder / "rollouts.jsonl"
    write_rollouts(file, make_rollouts(case))
    rows = StoredRollouts(read_rollouts(file), str(file))
    model = make_model("reference")
    config = make_config(folder, case, share_prompt, num_micro_batches)
    objective = GRPOObjective(config, model, SequentialSchedule(model), SingleProcess())
    set_weights(model, "new")
    collate_rows = objective.build_collate(rows, 0, VOCAB)
    micro_batches = tuple([[int(row)] for row in part] for part in np.split(np.arange(len(rows)), num_micro_batches))
    sampled = {"generation": 0, "sampled_rows": (0, 1, 2), "is_first": True}
    costs = (1,) * num_micro_batches
    step_batch = PolicyStepBatch(0, 0, micro_batches, costs, end_fraction=1.0, is_last=True, **sampled)
    objective.before_step(step_batch, collate_rows)
    batches = [collate_rows(packs, 0) for packs in micro_batches]
    num_units, total, sums = sum(map(objective.num_units, batches)), 0.0, np.zeros(objective.num_sums)
    for batch in batches:
        loss, own = objective.measure(model, hidden_states(model, batch), batch)
        mean = loss / num_units
        mean.backward()
        total, sums = total + float(mean), sums + own
    gradients = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    return total, objective.step_metrics(sums), gradients


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_stored_rollouts_have_the_loss_gradients_and_metrics_of_trl(tmp_path: Path, case: str, share_prompt: bool):
    loss, metrics, gradients = run(tmp_path, case, share_prompt)
    check_step(case, loss, gradients)
    prefix, compared = f"{case}/metric:", 0
    for key in GOLDEN.files:
        name = key.removeprefix(prefix)
        # With the standard deviation of the batch, TRL counts batches instead of groups.
        if name == "frac_reward_zero_std" and CASES[case].get("scale_rewards") == "batch":
            continue
        if key.startswith(prefix):
            np.testing.assert_allclose(metrics[name], GOLDEN[key], rtol=1e-5, atol=1e-5, err_msg=name)
            compared += 1
    assert compared >= 19


def check_step(case: str, loss: float, gradients: dict[str, np.ndarray]) -> None:
    np.testing.assert_allclose(loss, GOLDEN[f"{case}/loss"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradients[GRADIENT], GOLDEN[f"{case}/gradient"], rtol=1e-4, atol=1e-5)
    norms = [np.linalg.norm(gradients[name]) for name in sorted(gradients)]
    np.testing.assert_allclose(norms, GOLDEN[f"{case}/norms"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("case", IN_MICRO_BATCHES)
def test_stored_rollouts_in_micro_batches_have_the_loss_and_gradients_of_trl(tmp_path, case: str, share_prompt: bool):
    loss, _, gradients = run(tmp_path, case, share_prompt, num_micro_batches=3)
    check_step(f"{case}/micro_batches", loss, gradients)


def test_metrics_of_a_step_do_not_depend_on_its_micro_batches(tmp_path: Path):
    one, several = (run(tmp_path, "kl", True, count)[1] for count in (1, 3))
    assert one == pytest.approx(several, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("case", ["grpo", "dapo", "bnpo"])
def test_advantages_are_those_of_trl(case: str, tmp_path: Path) -> None:
    config = make_config(tmp_path, case, True)
    rewards = np.stack([rollout.rewards for rollout in make_rollouts(case)])
    found = group_advantages(rewards, config.grpo)
    np.testing.assert_allclose(found.ravel(), GOLDEN[f"{case}/advantages"], rtol=1e-5, atol=1e-6)


def test_stored_rollouts_are_read_with_the_same_bits(tmp_path: Path) -> None:
    written = make_rollouts("token_mask")
    write_rollouts(tmp_path / "rollouts.jsonl", written)
    for before, after in zip(written, read_rollouts(tmp_path / "rollouts.jsonl"), strict=True):
        assert before.completion_ids == after.completion_ids and list(before.prompt_ids) == after.prompt_ids
        for name in ("old_logps", "sampling_logps"):
            for one, other in zip(getattr(before, name), getattr(after, name), strict=True):
                np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(before.rewards, after.rewards)
