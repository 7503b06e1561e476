"""Times of configurations in seconds."""

from __future__ import annotations

import pytest

from paddlenlp_ext.config.durations import parse_time


def test_parse_time_reads_seconds_and_clock_times():
    assert [parse_time(text) for text in (90.0, "1:30:00", "2-00:00:10", "0:00:01")] == [90, 5400, 172810, 1]
    for wrong in ("1:30", "1h", 0.0, "0:00:00", -3.0):
        with pytest.raises(ValueError, match="is not a positive time; write seconds"):
            parse_time(wrong)
