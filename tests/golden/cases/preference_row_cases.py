"""Rows of preference data in the formats of TRL's documentation."""

from __future__ import annotations

from typing import Any


def user(text: str) -> dict[str, str]:
    """Return a message of the user."""
    return {"role": "user", "content": text}


def bot(text: str) -> dict[str, str]:
    """Return a message of the assistant."""
    return {"role": "assistant", "content": text}


TURNS = [{"role": "system", "content": "Add."}, user("1 + 1?"), bot("2"), user("2 + 2?")]
GOOD, BAD = bot("the answer is four"), bot("the answer is five")
ROWS: dict[str, dict[str, Any]] = {
    "explicit": {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
    "implicit": {"chosen": "The sky is blue.", "rejected": "The sky is green."},
    "unpaired": {"prompt": "The sky is", "completion": " blue.", "label": True},
    "explicit, messages": {"prompt": TURNS, "chosen": [GOOD], "rejected": [BAD]},
    "implicit, messages": {"chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD]},
    "unpaired, messages": {"prompt": TURNS, "completion": [BAD], "label": False},
    "text of the prompt, messages": {"prompt": "2 + 2?", "chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD]},
    "answers of several messages": {
        "chosen": [*TURNS, bot("4"), user("sure?"), bot("yes")],
        "rejected": [*TURNS, bot("5"), user("sure?"), bot("no")],
    },
}
