"""Metrics of preference training: TRL's values and names, whatever the division into micro-batches."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.preference.preference_metrics import PreferenceMetrics
from tests.golden import DATA
from tests.golden.cases.preference_cases import NUM_PAIRS, answer_inputs, pair_inputs

GOLDEN = np.load(DATA / "preference.npz")
IS_DESIRABLE = np.arange(2 * NUM_PAIRS) % 2 == 0


def interleaved(chosen: np.ndarray, rejected: np.ndarray) -> np.ndarray:
    return np.stack([chosen, rejected], axis=1).reshape(-1)


def pair_metrics(pairs: slice) -> PreferenceMetrics:
    inputs = {name: array[pairs] for name, array in pair_inputs().items()}
    rewards = [GOLDEN[f"sigmoid/{side}_rewards"][pairs] for side in ("chosen", "rejected")]
    logps = interleaved(inputs["chosen_logps"], inputs["rejected_logps"])
    lengths = interleaved(inputs["chosen_lengths"], inputs["rejected_lengths"])
    return PreferenceMetrics.from_answers(logps, interleaved(*rewards), IS_DESIRABLE[: len(logps)], lengths)


def test_metrics_of_pairs_have_the_means_of_trl():
    means, inputs = pair_metrics(slice(None)).means(), pair_inputs()
    chosen, rejected = GOLDEN["sigmoid/chosen_rewards"], GOLDEN["sigmoid/rejected_rewards"]
    expected = {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "rewards/accuracies": GOLDEN["sigmoid/accuracies"].mean(),
        "logps/chosen": inputs["chosen_logps"].mean(),
        "logps/rejected": inputs["rejected_logps"].mean(),
        "nll_loss": (-inputs["chosen_logps"] / inputs["chosen_lengths"]).mean(),
    }
    assert means == pytest.approx(expected, rel=1e-5)


def test_metrics_of_rated_answers_have_the_means_of_trl():
    values, baseline = answer_inputs(), GOLDEN["kto/kl"]
    rewards = 0.1 * (values["logps"] - values["reference"])
    metrics = PreferenceMetrics.from_answers(
        values["logps"], rewards, values["is_desirable"], values["lengths"], in_pairs=False, baseline=baseline
    )
    means = metrics.means()
    assert "rewards/accuracies" not in means
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "kl"):
        assert means[name] == pytest.approx(float(GOLDEN[f"kto/{name.replace('/', '_')}"]), rel=1e-4), name


def test_metrics_added_over_micro_batches_and_ranks_equal_those_of_all_pairs():
    parts = [pair_metrics(slice(0, 1)), pair_metrics(slice(1, 5)), pair_metrics(slice(5, None))]
    added = parts[0] + parts[1] + parts[2]
    assert added.means() == pytest.approx(pair_metrics(slice(None)).means())
    summed = PreferenceMetrics.from_vector(np.sum([part.to_vector() for part in parts], axis=0))
    assert summed.means() == added.means()
    assert (PreferenceMetrics() + added).means() == added.means()


def test_metrics_of_equal_rewards_are_not_accurate():
    metrics = PreferenceMetrics.from_answers(np.zeros(2), np.ones(2), np.array([True, False]), np.ones(2))
    assert metrics.means()["rewards/accuracies"] == 0


def test_metrics_without_values_are_absent():
    assert PreferenceMetrics().means() == {}
    only_good = PreferenceMetrics.from_answers(
        np.array([-1.0]), np.array([0.5]), np.array([True]), np.array([3]), in_pairs=False
    )
    assert set(only_good.means()) == {"rewards/chosen", "logps/chosen", "nll_loss"}
