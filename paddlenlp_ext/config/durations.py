"""Convert durations in configurations, such as `max_train_time`, to seconds."""

from __future__ import annotations

import re

_TIME = re.compile(r"(?:(\d+)-)?(\d+):(\d{2}):(\d{2})")


def parse_time(value: float | str) -> float:
    """Convert a time to seconds: a number, "HH:MM:SS" or "D-HH:MM:SS".

    Raises:
        ValueError: the time has a different format, or is not positive.
    """
    seconds = 0.0
    if not isinstance(value, str):
        seconds = float(value)
    elif match := _TIME.fullmatch(value.strip()):
        days, hours, minutes, rest = (int(part or 0) for part in match.groups())
        seconds = float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
    if seconds <= 0.0:
        raise ValueError(
            f'max_train_time: {value!r} is not a positive time; write seconds, "HH:MM:SS" or "D-HH:MM:SS", for example '
            '"23:30:00"'
        )
    return seconds
