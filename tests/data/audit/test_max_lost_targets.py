"""The error when too many targets are lost."""

from __future__ import annotations

import pytest

from paddlenlp_ext.data.audit.max_lost_targets import check_losses
from paddlenlp_ext.data.tokenization.statistics import DataStats


def stats(**counts):
    return DataStats(**{"num_read": 10, "num_untruncated": 10, "num_target_tokens": 80, **counts})


def test_check_losses_within_the_limit_passes():
    check_losses(stats(num_lost_target_tokens=20), 0.2)
    check_losses(stats(num_untruncated=8, dropped={"broken JSON": 2}), 0.2)
    check_losses(stats(num_lost_target_tokens=800, dropped={"broken JSON": 9}), 1.0)


def test_check_losses_names_share_key_and_remedy():
    with pytest.raises(ValueError, match=r"max_lost_targets 0.2: 20.8% of the target tokens \(21\).*raise max_length"):
        check_losses(stats(num_lost_target_tokens=21), 0.2)
    with pytest.raises(ValueError, match=r"max_lost_targets 0.2: 30.0% of the rows are dropped \(broken JSON: 3\)"):
        check_losses(stats(num_untruncated=7, dropped={"broken JSON": 3}), 0.2)


def test_check_losses_of_a_cache_without_the_number_passes():
    check_losses(stats(num_lost_target_tokens=None), 0.0)


def test_data_stats_lost_targets_are_unknown_if_one_part_is():
    total = stats(num_lost_target_tokens=3)
    total.add(stats(num_lost_target_tokens=4))
    assert total.num_lost_target_tokens == 7
    total.add(stats(num_lost_target_tokens=None))
    assert total.num_lost_target_tokens is None
    assert DataStats.from_json(total.to_json()) == total
