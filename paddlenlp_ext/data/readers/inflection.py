"""Build the dataset `inflection`: questions about English word forms with one-word answers.

The rows come from the lexicon in the package `lemminflect` (MIT; derived from the SPECIALIST lexicon), whose lines are
`lemma,part of speech,form,...`:

    verb   past, past participle (empty: same as the past), present participle, third person singular
    noun   plural
    adj    comparative, superlative

`a/b` lists variants of a form, and an empty column means that the form does not exist. Questions cover forms with a
single spelling and lemmas of 3 to 12 lower-case letters. The score, the fraction of correct words, measures how
well a model learns spelling rules (carry, carried; stop, stopping) and exceptions (mouse, mice).

A hash of the lemma selects the split of a question, so a lemma occurs in only one split.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paddlenlp_ext.data.readers.base import BLOCK_ROWS, Block, Cursor, FileReader, ParsedBlock
from paddlenlp_ext.data.rows.source_row import SourceRow
from paddlenlp_ext.utils.json_reader import Location

NUM_ROWS = {"train": 20_000, "dev": 400}
DEV_LEMMAS_IN_1000 = 40
REGULAR_PER_IRREGULAR = 1
"""Number of regular forms (lemma + ending) per irregular form."""
_LEMMA = re.compile(r"[a-z]{3,12}")
_FORM = re.compile(r"[a-z]+")


@dataclass(frozen=True)
class Form:
    """Inflected form: its column in the lexicon, its name in questions, and its regular ending."""

    column: int
    question: str
    ending: str


_VERB = (
    Form(2, "past tense of the verb", "ed"),
    Form(3, "past participle of the verb", "ed"),
    Form(4, "present participle of the verb", "ing"),
    Form(5, "third person singular of the verb", "s"),
)
FORMS = {
    "verb": _VERB,
    "noun": (Form(2, "plural of the noun", "s"),),
    "adj": (Form(2, "comparative of the adjective", "er"), Form(3, "superlative of the adjective", "est")),
}


@dataclass(frozen=True)
class Item:
    """Candidate question about one form of a lemma."""

    location: Location
    lemma: str
    form: Form
    answer: str

    @property
    def is_irregular(self) -> bool:
        """True if the answer is not the lemma followed by the regular ending."""
        return self.answer != self.lemma + self.form.ending

    @property
    def rank(self) -> str:
        """Sort key of a pseudo-random order that is the same on all machines."""
        return _digest(f"{self.lemma} {self.form.question}")


def lexicon_path() -> Path:
    """Return the path of the lexicon, without importing `lemminflect`.

    Raises:
        ValueError: `lemminflect` is not installed, or has no lexicon.
    """
    spec = importlib.util.find_spec("lemminflect")
    if spec is None or spec.origin is None:
        raise ValueError(
            "the built-in dataset 'inflection' needs the lexicon in the package lemminflect, which is not installed; "
            "run: pip install lemminflect"
        )
    path = Path(spec.origin).parent / "resources" / "infl_lu.csv.gz"
    if not path.is_file():
        raise ValueError(f"{path}: missing from the package lemminflect; run: pip install lemminflect==0.2.3")
    return path


def read_inflection(split: str) -> Iterator[SourceRow]:
    """Yield the questions of a split as {"src", "tgt"} rows with their locations in the lexicon."""
    path = lexicon_path()
    with gzip.open(path, "rt", encoding="utf-8") as lexicon:
        items = [
            item
            for line, text in enumerate(lexicon, start=1)
            for item in _items(Location(path.name, line, 1), text.rstrip("\n"))
        ]
    items = sorted((item for item in items if _split_of(item.lemma) == split), key=lambda item: item.rank)
    irregular = [item for item in items if item.is_irregular]
    regular = [item for item in items if not item.is_irregular][: REGULAR_PER_IRREGULAR * len(irregular)]
    for item in sorted([*irregular, *regular], key=lambda item: item.rank)[: NUM_ROWS[split]]:
        question = f'What is the {item.form.question} "{item.lemma}"? Answer with one word.'
        yield SourceRow(item.location, {"src": question, "tgt": item.answer})


class InflectionReader(FileReader):
    """Reader of the built-in dataset `inflection`; a cursor is the index of the next row."""

    def __init__(self, split: str) -> None:
        super().__init__(lexicon_path())
        self.name = self.path.name
        self._split = split

    @property
    def is_json_text(self) -> bool:
        """True, although the rows are not JSON, so that caches of earlier versions stay valid."""
        return True

    def blocks(self, start: Cursor = ()) -> Iterator[Block]:
        """Yield blocks, starting at a cursor."""
        rows = tuple(read_inflection(self._split))
        for first in range(start[0] if start else 0, len(rows), BLOCK_ROWS):
            block = rows[first : first + BLOCK_ROWS]
            end = first + len(block)
            yield ParsedBlock((end,), end / len(rows), block)


def _items(location: Location, text: str) -> Iterator[Item]:
    columns = text.split(",")
    lemma, part_of_speech = columns[:2]
    if not _LEMMA.fullmatch(lemma):
        return
    for form in FORMS.get(part_of_speech, ()):
        answer = columns[form.column]
        if form.column == 3 and part_of_speech == "verb" and not answer:
            answer = columns[2]
        # Skip plurals that equal the singular: these nouns usually have no plural.
        if _FORM.fullmatch(answer) and not (part_of_speech == "noun" and answer == lemma):
            column = 1 + sum(len(before) + 1 for before in columns[: form.column])
            yield Item(Location(location.file, location.line, column), lemma, form, answer)


def _split_of(lemma: str) -> str:
    return "dev" if int(_digest(lemma)[:8], 16) % 1000 < DEV_LEMMAS_IN_1000 else "train"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
