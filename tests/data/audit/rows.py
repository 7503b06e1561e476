"""Generated rows: clean ones of which no two are alike, and faults of many kinds."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any


def _words(text: str) -> list[str]:
    return text.split()


_NOUNS = _words("river window engine teacher garden letter market winter doctor bridge island kitchen forest planet")
_VERBS = _words("carries repairs follows paints forgets counts opens visits teaches measures answers hides buys draws")
_ADJECTIVES = _words("quiet broken early golden narrow honest foreign heavy simple curious distant frozen gentle")


def sentence(generator: random.Random) -> str:
    """Return a sentence of made-up content."""
    pick = generator.choice
    return (
        f"The {pick(_ADJECTIVES)} {pick(_NOUNS)} {pick(_VERBS)} {generator.randint(2, 999)} {pick(_ADJECTIVES)} "
        f"{pick(_NOUNS)}s, and what {pick(_VERBS)} the {pick(_NOUNS)} is {pick(_ADJECTIVES)}."
    )


def text(seed: int, sentences: int = 1) -> str:
    """Return sentences that depend on a seed."""
    generator = random.Random(seed)
    return " ".join(sentence(generator) for _ in range(sentences))


def clean_row(seed: int) -> dict[str, Any]:
    """Return a question and an answer."""
    return {"src": text(2 * seed, 1 + seed % 2), "tgt": text(2 * seed + 1, 1 + seed % 3)}


def _question(change: Callable[[str], str]) -> Callable[[int], dict[str, Any]]:
    return lambda seed: {**clean_row(seed), "src": change(clean_row(seed)["src"])}


def _answer(change: Callable[[str], str]) -> Callable[[int], dict[str, Any]]:
    return lambda seed: {**clean_row(seed), "tgt": change(clean_row(seed)["tgt"])}


def _inside(addition: str) -> Callable[[str], str]:
    """Return a function that writes an addition after the third word of a text."""
    return lambda text: " ".join([*text.split()[:3], addition, *text.split()[3:]])


def _changed_word(seed: int) -> dict[str, Any]:
    row = {"src": text(9000 + seed, 3), "tgt": text(9500 + seed, 2)}
    return {**row, "tgt": row["tgt"].replace(row["tgt"].split()[-2], "violet", 1)}


FAULTS: dict[str, tuple[str, Callable[[int], Any]]] = {
    "broken JSON": ("invalid row", lambda seed: '{"src": "What is it?", "tgt": '),
    "empty answer": ("invalid row", _answer(lambda _: "  ")),
    "unknown format": ("invalid row", lambda seed: {"frage": text(seed), "antwort": text(seed + 1)}),
    "long system prompt": ("target cut away", lambda seed: {**clean_row(seed), "system": text(seed, 12)}),
    "long answer": ("target mostly cut away", _answer(lambda text_: text_ + text(len(text_), 40))),
    "answer a little too long": ("target truncated", lambda seed: {"src": text(seed, 2), "tgt": text(seed + 7, 6)}),
    "long question": ("prompt truncated", _question(lambda text_: text_ + text(len(text_), 9))),
    "special token": ("special token in the text", _question(_inside("<|eot_id|>"))),
    "two begin tokens": ("doubled begin token", _question(_inside("<s><s>"))),
    "end token": ("doubled end token", _answer(lambda text: text + "<|im_end|>")),
    "Llama 2's markers": ("marker of another template", _question(lambda text: f"[INST] {text} [/INST]")),
    "alpaca's headings": ("marker of another template", _question(lambda text: f"### Instruction:\n{text}")),
    "U+FFFD": ("replacement character", _answer(_inside("Gr\ufffd\ufffde"))),
    "Latin-1": ("wrong encoding", _answer(_inside("CafÃ© au lait"))),
    "Windows-1252": ("wrong encoding", _question(_inside("itâ€™s"))),
    "Chinese as Latin-1": ("wrong encoding", _answer(lambda text: "你好吗".encode().decode("latin-1") + text)),
    "bell": ("control character", _question(_inside("\x07"))),
    "zero width": ("control character", _answer(_inside("\u200b"))),
    "tags": ("HTML", _answer(_inside("<br/>"))),
    "entities": ("HTML", _question(_inside("&nbsp;"))),
    "refusal": ("refusal", _answer(lambda text: f"As an AI language model, I do not know. {text}")),
    "one word": ("repeated text", _answer(lambda _: "ha " * 140)),
    "no question": ("empty question", _question(lambda _: " ")),
    "echo": ("answer equals question", lambda seed: {"src": text(seed + 5), "tgt": text(seed + 5)}),
    "Russian": ("rare language", lambda seed: {"src": f"Сколько будет {seed}?", "tgt": "Я не знаю этого точно."}),
    "dropped by the template": ("text lost", _question(_inside("#lost"))),
    "copy": ("duplicate", lambda seed: clean_row(seed % 10)),
    "one word changed": ("near-duplicate", _changed_word),
}
"""Fault -> the check that finds it, and the function from a seed to the row, or to a line of a file."""
DEV_FAULTS: dict[str, tuple[str, Callable[[int], Any]]] = {
    "copy from train": ("dev row in train", lambda seed: clean_row(10 + seed % 10)),
    "question from train": (
        "dev question in train",
        lambda seed: {**clean_row(20 + seed % 10), "tgt": text(seed + 77)},
    ),
}
BEFORE = [{"src": text(9000 + seed, 3), "tgt": text(9500 + seed, 2)} for seed in (1000, 1001, 1002)]
"""Rows of which "one word changed" makes near-duplicates."""


def dumps(row: Any) -> str:
    """Return a row as a line of a file."""
    return row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)
