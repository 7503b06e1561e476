"""Preference losses: losses, rewards and gradients equal TRL's, or the formula of the paper where TRL has none."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.config.sections.preference import LOSS_TYPES, PreferenceConfig
from paddlenlp_ext.preference.dpo_losses import PAIR_LOSSES, PairLoss, pair_loss
from paddlenlp_ext.preference.kto_loss import kto_baseline, kto_loss
from tests.golden import DATA
from tests.golden.cases.preference_cases import (
    CPO_CASES,
    KTO_CASES,
    ORPO_CASES,
    PAIR_CASES,
    answer_inputs,
    pair_inputs,
)

GOLDEN = np.load(DATA / "preference.npz")
INPUTS = pair_inputs()
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def leaves(**arrays: np.ndarray) -> list[paddle.Tensor]:
    return [paddle.to_tensor(array, stop_gradient=False) for array in arrays.values()]


def run_pairs(options: PreferenceConfig, inputs: dict[str, np.ndarray] = INPUTS) -> tuple[PairLoss, Any, Any]:
    """Return the losses, and their gradients with respect to the log-probabilities of both answers."""
    chosen, rejected = leaves(chosen=inputs["chosen_logps"], rejected=inputs["rejected_logps"])
    found = pair_loss(
        chosen,
        rejected,
        paddle.to_tensor(inputs["reference_chosen"]),
        paddle.to_tensor(inputs["reference_rejected"]),
        options,
        paddle.to_tensor(inputs["chosen_lengths"]),
        paddle.to_tensor(inputs["rejected_lengths"]),
    )
    found.losses.sum().backward()
    assert found.chosen_rewards.stop_gradient and found.rejected_rewards.stop_gradient
    return found, chosen.grad.numpy(), rejected.grad.numpy()


def golden(case: str) -> dict[str, np.ndarray]:
    return {name.split("/")[1]: GOLDEN[name] for name in GOLDEN.files if name.split("/")[0] == case}


@pytest.mark.parametrize("case", [*PAIR_CASES, *CPO_CASES])
def test_pair_loss_equals_trl(case):
    options = PreferenceConfig(**{"loss_type": case, **(PAIR_CASES | CPO_CASES)[case]})
    found, chosen_gradients, rejected_gradients = run_pairs(options)
    expected = golden(case)
    np.testing.assert_allclose(found.losses.numpy(), expected["losses"], **TOLERANCE)
    np.testing.assert_allclose(found.chosen_rewards.numpy(), expected["chosen_rewards"], **TOLERANCE)
    np.testing.assert_allclose(found.rejected_rewards.numpy(), expected["rejected_rewards"], **TOLERANCE)
    np.testing.assert_allclose(chosen_gradients, expected["chosen_gradients"], **TOLERANCE)
    np.testing.assert_allclose(rejected_gradients, expected["rejected_gradients"], **TOLERANCE)


def test_orpo_with_trl_beta_as_ratio_equals_trl_and_adds_the_loss_of_the_chosen_answer():
    """Check that ORPO's weight is `pref_loss_ratio`, which TRL calls beta."""
    (beta,) = [case["beta"] for case in ORPO_CASES.values()]
    options = PreferenceConfig(loss_type="orpo", beta=beta, pref_loss_ratio=beta)
    found, chosen_gradients, rejected_gradients = run_pairs(options)
    expected, lengths = golden("orpo"), INPUTS["chosen_lengths"]
    nll = -INPUTS["chosen_logps"] / lengths
    np.testing.assert_allclose(found.losses.numpy(), expected["losses"] + nll, **TOLERANCE)
    np.testing.assert_allclose(found.chosen_rewards.numpy(), expected["chosen_rewards"], **TOLERANCE)
    np.testing.assert_allclose(chosen_gradients, expected["chosen_gradients"] - 1 / lengths, **TOLERANCE)
    np.testing.assert_allclose(rejected_gradients, expected["rejected_gradients"], **TOLERANCE)
    reweighted = PreferenceConfig(loss_type="orpo", pref_loss_ratio=0.0, sft_loss_ratio=0.5)
    np.testing.assert_allclose(run_pairs(reweighted)[0].losses.numpy(), 0.5 * nll, **TOLERANCE)


def test_orpo_of_a_certain_answer_stays_finite():
    inputs = INPUTS | {"chosen_logps": np.zeros(7, np.float32)}
    found, *gradients = run_pairs(PreferenceConfig(loss_type="orpo"), inputs)
    assert all(np.isfinite(values).all() for values in (found.losses.numpy(), *gradients))


def log_sigmoid(x: np.ndarray) -> np.ndarray:
    return -np.logaddexp(0, -x)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(log_sigmoid(x))


def smoothed_dpo(chosen, rejected, values):
    logits = 0.3 * (chosen - values["reference_chosen"] - rejected + values["reference_rejected"])
    return -0.85 * log_sigmoid(logits) - 0.15 * log_sigmoid(-logits)


def dpop(chosen, rejected, values):
    margins = chosen - values["reference_chosen"] - rejected + values["reference_rejected"]
    penalty = np.maximum(0, values["reference_chosen"] - chosen)
    return -log_sigmoid(0.1 * (margins - 5.0 * penalty))


def kto_pair(chosen, rejected, values):
    chosen_kl = max(0, np.mean(values["chosen_logps"] - values["reference_chosen"]))  # no gradient: from the inputs
    rejected_kl = max(0, np.mean(values["rejected_logps"] - values["reference_rejected"]))
    desirable = 1 - sigmoid(0.4 * (chosen - values["reference_chosen"] - rejected_kl))
    return (desirable + 1 - sigmoid(0.4 * (chosen_kl - rejected + values["reference_rejected"]))) / 2


def weighted_hinge(chosen, rejected, values):
    margins = chosen - values["reference_chosen"] - rejected + values["reference_rejected"]
    return 0.7 * np.maximum(0, 1 - 0.1 * margins) - 0.3 * chosen / values["chosen_lengths"]


FORMULAS = {
    "sigmoid": (smoothed_dpo, {"beta": 0.3, "label_smoothing": 0.15}),
    "dpop": (dpop, {"dpop_lambda": 5.0}),
    "kto_pair": (kto_pair, {"beta": 0.4}),
    "hinge": (weighted_hinge, {"pref_loss_ratio": 0.7, "sft_loss_ratio": 0.3}),
}


@pytest.mark.parametrize("loss_type", FORMULAS)
def test_pair_loss_equals_the_formula_with_its_gradients(loss_type):
    formula, options = FORMULAS[loss_type]
    less_likely = {name: INPUTS[name] - np.float32(2) for name in ("reference_chosen", "reference_rejected")}
    inputs = INPUTS | less_likely  # the mean log-ratios, which kto_pair clips at 0, are positive
    found, *gradients = run_pairs(PreferenceConfig(loss_type=loss_type, **options), inputs)
    values = {name: array.astype(np.float64) for name, array in inputs.items()}
    point = [values["chosen_logps"], values["rejected_logps"]]
    np.testing.assert_allclose(found.losses.numpy(), formula(*point, values), **TOLERANCE)
    step = 1e-6
    for side, gradient in enumerate(gradients):
        ahead, behind = ([p + sign * step * (i == side) for i, p in enumerate(point)] for sign in (1, -1))
        slope = (formula(*ahead, values) - formula(*behind, values)) / (2 * step)
        np.testing.assert_allclose(gradient, slope, **TOLERANCE)


@pytest.mark.parametrize("case", KTO_CASES)
def test_kto_loss_equals_trl(case):
    options = PreferenceConfig(**{"loss_type": "kto", **KTO_CASES[case]})
    values, expected = answer_inputs(), golden(case)
    (logps,) = leaves(logps=values["logps"])
    mismatched = leaves(logps=values["mismatched_logps"])[0]
    baseline = kto_baseline(mismatched, paddle.to_tensor(values["mismatched_reference"]), options)
    assert baseline.stop_gradient
    np.testing.assert_allclose(baseline.item(), expected["kl"], **TOLERANCE)
    reference, is_desirable = paddle.to_tensor(values["reference"]), values["is_desirable"]
    lengths = paddle.to_tensor(values["lengths"])
    found = kto_loss(logps, reference, paddle.to_tensor(is_desirable), baseline, options, lengths)
    found.losses.mean().backward()
    np.testing.assert_allclose(found.losses.mean().item(), expected["mean_loss"], **TOLERANCE)
    np.testing.assert_allclose(logps.grad.numpy(), expected["gradients"], **TOLERANCE)
    np.testing.assert_allclose(found.rewards.numpy()[is_desirable].mean(), expected["rewards_chosen"], **TOLERANCE)


def test_kto_pair_baselines_are_at_least_zero():
    """Check that the baselines of answers that became less likely are 0, whatever their distance."""
    inputs = INPUTS | {name: np.zeros(7, np.float32) for name in ("reference_chosen", "reference_rejected")}
    found, *_ = run_pairs(PreferenceConfig(loss_type="kto_pair"), inputs)
    chosen, rejected = (0.1 * INPUTS[name] for name in ("chosen_logps", "rejected_logps"))
    np.testing.assert_allclose(found.losses.numpy(), (2 - sigmoid(chosen) - sigmoid(-rejected)) / 2, **TOLERANCE)


def test_kto_loss_with_sft_ratio_adds_the_loss_of_desirable_answers_only():
    values = answer_inputs()
    arguments = [paddle.to_tensor(values[name]) for name in ("logps", "reference", "is_desirable")]
    lengths = paddle.to_tensor(values["lengths"])
    plain, added = (
        kto_loss(*arguments, 0.0, PreferenceConfig(loss_type="kto", sft_loss_ratio=ratio), lengths).losses.numpy()
        for ratio in (0.0, 0.5)
    )
    expected = np.where(values["is_desirable"], -0.5 * values["logps"] / values["lengths"], 0)
    np.testing.assert_allclose(added - plain, expected, **TOLERANCE)


def test_kto_baseline_is_at_least_zero():
    low, high = paddle.to_tensor([-3.0, -4.0]), paddle.to_tensor([-1.0, -1.0])
    assert kto_baseline(low, high, PreferenceConfig(loss_type="kto")).item() == 0


@pytest.mark.parametrize("loss_type", PAIR_LOSSES)
def test_reference_free_equals_a_reference_with_probability_one(loss_type):
    certain = INPUTS | {"reference_chosen": np.zeros(7, np.float32), "reference_rejected": np.zeros(7, np.float32)}
    expected, *expected_gradients = run_pairs(PreferenceConfig(loss_type=loss_type), certain)
    found, *gradients = run_pairs(PreferenceConfig(loss_type=loss_type, reference_free=True))
    np.testing.assert_array_equal(found.losses.numpy(), expected.losses.numpy())
    np.testing.assert_array_equal(found.chosen_rewards.numpy(), expected.chosen_rewards.numpy())
    np.testing.assert_array_equal(gradients, expected_gradients)


def test_simpo_and_orpo_are_reference_free_without_the_key():
    for loss_type in LOSS_TYPES:
        options = PreferenceConfig(loss_type=loss_type)
        assert options.has_reference == (loss_type not in ("simpo", "orpo"))
        if not options.has_reference:
            chosen = paddle.to_tensor(INPUTS["chosen_logps"])
            lengths = paddle.to_tensor(INPUTS["chosen_lengths"])
            assert pair_loss(chosen, chosen, None, None, options, lengths, lengths).losses.shape == [7]


def test_pair_losses_cover_all_loss_types_but_kto():
    assert {*PAIR_LOSSES, "kto"} == set(LOSS_TYPES)
    logps = paddle.to_tensor(INPUTS["chosen_logps"])
    with pytest.raises(ValueError, match="loss_type kto does not compare pairs"):
        pair_loss(logps, logps, logps, logps, PreferenceConfig(loss_type="kto"), logps, logps)
