"""Stop a run that loses too many target tokens or rows (`max_lost_targets`)."""

from __future__ import annotations

from paddlenlp_ext.data.tokenization.statistics import DataStats


def check_losses(stats: DataStats, limit: float) -> None:
    """Check the fraction of target tokens lost to truncation and dropped rows, and the fraction of dropped rows.

    Args:
        stats: statistics of the training split.
        limit: largest allowed fraction (`max_lost_targets`).

    Raises:
        ValueError: a fraction exceeds the limit.
    """
    remedy = "--audit_only lists the rows; fix them, or raise max_length or max_lost_targets"
    dropped_share = stats.num_dropped / max(1, stats.num_read)
    if stats.lost_target_share > limit:
        raise ValueError(
            f"max_lost_targets {limit:g}: {stats.lost_target_share:.1%} of the target tokens "
            f"({stats.num_lost_target_tokens:,}) are lost to truncation and dropped rows; {remedy}"
        )
    if dropped_share > limit:
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(stats.dropped.items()))
        raise ValueError(
            f"max_lost_targets {limit:g}: {dropped_share:.1%} of the rows are dropped ({reasons}); {remedy}"
        )
