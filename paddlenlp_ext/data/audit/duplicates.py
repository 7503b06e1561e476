"""Find near-duplicate rows with MinHash over word triples and locality-sensitive hashing.

    row --> words --> hashes of word triples --> 128 minima, 8 bits each --> 16 bands of 64 bits

Rows with an equal band are candidates. The fraction of equal minima estimates the Jaccard similarity of two rows. The
records of all rows are stored in a temporary file; rows with an equal band are found by sorting.

MinHash: Broder 1997, doi:10.1109/SEQUEN.1997.666900; 8 bits of each minimum: Li and König 2010, arXiv:0910.3349.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paddlenlp_ext.data.audit.findings import printable

TRAIN_ROWS = 0
"""Value of `split` in the records of training rows; dev splits have other values."""
MAX_ROWS = 1 << 22
"""Maximum number of compared rows; each row takes about 70 bytes of memory."""
THRESHOLD = 0.85
"""Minimum estimated similarity of near-duplicates."""
MIN_WORDS = 8
"""Minimum number of words of near-duplicates and of equal prompts; shorter rows are compared only for equality."""
NUM_MINIMA, NUM_BANDS = 128, 16
RECORD = np.dtype(
    [
        ("signature", np.uint8, (NUM_MINIMA,)),
        ("text", np.uint64),
        ("prompt", np.uint64),
        ("split", np.uint32),
        ("file", np.uint32),
        ("line", np.uint32),
        ("num_words", np.uint32),
        ("beginning", "S72"),
    ]
)
"""Record of a row for the duplicate search.

signature: MinHash signature. text: hash of all words. prompt: hash of the words of the prompt; 0 for a short prompt.
split, file, line: location of the row. beginning: first characters of the text.
"""

# Each Chinese or Japanese character is a word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\d_\u3040-\u30ff\u3400-\u9fff]+|\d+")
_RANDOM = np.random.default_rng(20261122)
_FACTORS, _OFFSETS = _RANDOM.integers(1, 1 << 63, (2, NUM_MINIMA), np.uint64) | np.uint64(1)
_TRIPLE = _RANDOM.integers(1, 1 << 63, 3, np.uint64) | np.uint64(1)
_CHUNK = 1 << 12
_MAX_EQUAL_PROMPTS = 10
_MOST_ALIKE = np.float32(0.995)
"""Upper limit of the similarity reported for rows with different words."""


@dataclass(frozen=True)
class Duplicate:
    """Pair of similar rows.

    Attributes:
        row: index of the record of the later row.
        other: index of the record of the earlier row, from the same split or an earlier split.
        similarity: estimated Jaccard similarity; 1.0 for equal words, or if `same_prompt` is true.
        same_prompt: whether the rows have equal prompts but are not similar.
    """

    row: int
    other: int
    similarity: float
    same_prompt: bool = False


def record_of(text: str, prompt: str, file: int, line: int) -> np.ndarray:
    """Return the record of a row, a scalar array of dtype `RECORD`; `DuplicateFinder.append` sets the field `split`.

    Args:
        text: texts of the row, without system prompts.
        prompt: texts before the last answer.
        file: index of the data file.
        line: line of the row.
    """
    words, prompt_words = _WORD.findall(text.lower()), _WORD.findall(prompt.lower())
    hashes = np.array([zlib.crc32(word.encode()) for word in words], np.uint64)
    record = np.zeros((), RECORD)
    record["text"] = _hash(words)
    record["prompt"] = _hash(prompt_words) if len(prompt_words) >= MIN_WORDS else 0
    record["file"], record["line"], record["num_words"] = file, line, len(words)
    record["beginning"] = printable(text[:72]).encode()[:72]
    if len(words) >= MIN_WORDS:
        record["signature"] = _signature(hashes)
    return record


def _hash(words: list[str]) -> np.uint64:
    digest = hashlib.blake2b("\n".join(words).encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def _signature(hashes: np.ndarray) -> np.ndarray:
    """Return the MinHash signature: 8 bits of the minimum of each hash function over word triples, uint8 [NUM_MINIMA].

    Args:
        hashes: hashes of the words in order, uint64.
    """
    with np.errstate(over="ignore"):
        triples = np.unique(hashes[:-2] * _TRIPLE[0] + hashes[1:-1] * _TRIPLE[1] + hashes[2:] * _TRIPLE[2])
        triples ^= triples >> np.uint64(29)
        minima = np.full(NUM_MINIMA, np.iinfo(np.uint64).max, np.uint64)
        for start in range(0, len(triples), _CHUNK):
            hashed = triples[start : start + _CHUNK, None] * _FACTORS + _OFFSETS
            minima = np.minimum(minima, hashed.min(axis=0))
        return (minima * _FACTORS[0] >> np.uint64(56)).astype(np.uint8)


class DuplicateFinder:
    """Context manager that collects records of rows in a temporary file and compares them.

    Attributes:
        num_rows: number of appended rows, at most `MAX_ROWS`.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self._file = tempfile.NamedTemporaryFile(prefix="paddlenlp_ext_audit_")  # noqa: SIM115 (closed by __exit__)

    def __enter__(self) -> DuplicateFinder:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, records: np.ndarray, split: int) -> None:
        """Append records of a split; records of an earlier split cannot be appended later."""
        added = records[: MAX_ROWS - self.num_rows].copy()
        added["split"] = split
        self._file.write(added.tobytes())
        self.num_rows += len(added)

    def records(self) -> np.ndarray:
        """Return all records, memory-mapped from the temporary file."""
        self._file.flush()
        if not self.num_rows:
            return np.zeros(0, RECORD)
        return np.memmap(Path(self._file.name), RECORD, mode="r")

    def duplicates(self) -> Iterator[Duplicate]:
        """Yield each row that is similar to an earlier row, in reading order.

        Rows of dev splits are also compared with training rows by their prompts.
        """
        records = self.records()
        found = _Matches(records)
        found.match("text", np.arange(len(records)))
        long_enough = np.flatnonzero(records["num_words"] >= MIN_WORDS)
        for band in range(NUM_BANDS):
            found.match(band, long_enough)
        found.match_prompts()
        for row in np.flatnonzero(found.other >= 0).tolist():
            similarity = float(found.similarity[row])
            yield Duplicate(row, int(found.other[row]), abs(similarity), similarity < 0)


class _Matches:
    """Best match of each row so far.

    Attributes:
        records: records of all rows.
        other: index of the matching row; -1 for a row without match.
        similarity: similarity to the matching row; -1 if only the prompts of the two rows are equal.
    """

    def __init__(self, records: np.ndarray) -> None:
        self.records = records
        self.other = np.full(len(records), -1, np.int32)
        self.similarity = np.zeros(len(records), np.float32)

    def match(self, key: str | int, rows: np.ndarray) -> None:
        """Compare each row with the first row and with the previous row among the rows with the same key.

        Args:
            key: field of the record with a hash, or index of a band of the signature.
            rows: indices of the rows to compare.
        """
        if isinstance(key, str):
            keys = self.records[key][rows]
        else:
            width = NUM_MINIMA // NUM_BANDS
            band = self.records["signature"][:, key * width : (key + 1) * width][rows]
            keys = np.ascontiguousarray(band).view(np.uint64)[:, 0]
        order = np.argsort(keys, kind="stable")
        is_new = np.concatenate([[True], keys[order[1:]] != keys[order[:-1]]]) if len(order) else np.zeros(0, bool)
        starts = np.maximum.accumulate(np.where(is_new, np.arange(len(order)), 0))
        repeated = np.flatnonzero(~is_new)
        for earlier in (starts[repeated], repeated - 1):
            self._compare(rows[order[repeated]], rows[order[earlier]], is_equal=key == "text")

    def _compare(self, rows: np.ndarray, others: np.ndarray, is_equal: bool) -> None:
        for start in range(0, len(rows), _CHUNK):
            row, other = rows[start : start + _CHUNK], others[start : start + _CHUNK]
            alike = np.ones(len(row), np.float32)
            if not is_equal:
                equal = self.records["signature"][row] == self.records["signature"][other]
                alike = np.minimum(equal.mean(1, np.float32), _MOST_ALIKE)
            better = (alike >= THRESHOLD) & (alike > self.similarity[row])
            self.other[row[better]], self.similarity[row[better]] = other[better], alike[better]

    def match_prompts(self) -> None:
        """Match each unmatched eval row to a training row with an equal prompt, unless more than 10 rows have it."""
        prompts, splits = self.records["prompt"], self.records["split"]
        train, dev = (np.flatnonzero(chosen & (prompts > 0)) for chosen in (splits == TRAIN_ROWS, splits != TRAIN_ROWS))
        order = train[np.argsort(prompts[train], kind="stable")]
        first = np.searchsorted(prompts[order], prompts[dev], "left")
        last = np.searchsorted(prompts[order], prompts[dev], "right")
        matched = (last > first) & (last - first <= _MAX_EQUAL_PROMPTS) & (self.other[dev] < 0)
        self.other[dev[matched]], self.similarity[dev[matched]] = order[first[matched]], -1
