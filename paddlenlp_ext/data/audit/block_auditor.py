"""Audit a block of rows in a worker process."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from paddlenlp_ext.data.audit.audited_row import CHECKS, AuditedRow, TokenizerInfo, joined, text_parts
from paddlenlp_ext.data.audit.duplicates import RECORD, record_of
from paddlenlp_ext.data.audit.findings import MAX_PLACES, Finding, Findings, excerpt
from paddlenlp_ext.data.audit.languages import UNKNOWN, language_of
from paddlenlp_ext.data.readers.base import Block
from paddlenlp_ext.data.rows.source_row import InvalidRow, SourceRow, location_of
from paddlenlp_ext.data.tokenization.encoded_row import TokenizedRow
from paddlenlp_ext.data.tokenization.row_encoder import RowEncoder
from paddlenlp_ext.data.tokenization.statistics import DataStats
from paddlenlp_ext.utils.json_reader import Location

NUM_SHARES = 20
"""Number of bins of the histogram over the fraction of target tokens."""
NUM_SAMPLES = 3
"""Number of examples per split on the HTML page."""


@dataclass
class AuditedRows:
    """Audit results of consecutive rows.

    Attributes:
        stats: counts of rows and tokens.
        num_examples: number of examples.
        findings: findings of the checks.
        lengths: length of an example before truncation -> number of examples.
        target_shares: histogram of examples over the fraction of target tokens, int64 [NUM_SHARES].
        languages: language -> number of rows.
        language_places: language -> first rows in the language.
        samples: the first examples.
    """

    stats: DataStats = field(default_factory=DataStats)
    num_examples: int = 0
    findings: Findings = field(default_factory=Findings)
    lengths: Counter[int] = field(default_factory=Counter)
    target_shares: np.ndarray = field(default_factory=lambda: np.zeros(NUM_SHARES, np.int64))
    languages: Counter[str] = field(default_factory=Counter)
    language_places: dict[str, list[Finding]] = field(default_factory=dict)
    samples: list[TokenizedRow] = field(default_factory=list)

    def merge(self, other: AuditedRows) -> None:
        """Add the results of later rows to these results."""
        self.stats.add(other.stats)
        self.num_examples += other.num_examples
        self.findings.merge(other.findings)
        self.lengths += other.lengths
        self.target_shares += other.target_shares
        self.languages += other.languages
        for language, places in other.language_places.items():
            listed = self.language_places.setdefault(language, [])
            listed += places[: MAX_PLACES - len(listed)]
        self.samples = (self.samples + other.samples)[:NUM_SAMPLES]

    def add(self, row: AuditedRow, info: TokenizerInfo) -> None:
        """Run all checks on a row, and add the row to the counts."""
        for _, check in CHECKS.items():
            for hit in check.find(row, info):
                self.findings.add(check.kind, Finding(_location(row, hit.path), hit.excerpt))
        self.num_examples += len(row.examples)
        for example in row.examples:
            length = len(example.tokens)
            share = int(example.loss_mask.sum()) / length
            self.lengths[length + example.num_truncated_tokens] += 1
            self.target_shares[min(NUM_SHARES - 1, int(share * NUM_SHARES))] += 1
        if row.parts:
            language = language_of(row.text)
            self.languages[language] += 1
            listed = self.language_places.setdefault(language, [])
            if language != UNKNOWN and len(listed) < MAX_PLACES:
                listed.append(Finding(_location(row), excerpt(row.text)))
        self.samples += row.examples[: max(0, NUM_SAMPLES - len(self.samples))]


@dataclass(frozen=True)
class AuditedBlock:
    """Audit results of a block of rows.

    Attributes:
        rows: counts and findings.
        records: records of the rows for the duplicate search, dtype `RECORD`.
    """

    rows: AuditedRows
    records: np.ndarray


class BlockAuditor:
    """Callable that encodes a block of rows in the same way as training, and audits the rows.

    Args:
        encoder: encoder of the rows.
        info: special tokens and template of the encoder.
    """

    def __init__(self, encoder: RowEncoder, info: TokenizerInfo) -> None:
        self._encoder, self._info = encoder, info
        self._file_index = {name: index for index, name in enumerate(encoder.files)}

    def __call__(self, block: Block) -> AuditedBlock:
        rows = list(block.rows())
        results, stats = self._encoder.encode_and_count(rows)
        audited = AuditedRows(stats)
        records = []
        for row, examples in zip(rows, _by_row(results), strict=True):
            each = self._row(row, examples)
            audited.add(each, self._info)
            if each.parts:
                location = _location(each)
                file, line = self._file_index[str(location.file)], location.line or 0
                records.append(record_of(joined(each.dialogue), joined(each.prompt), file, line))
        return AuditedBlock(audited, np.array(records, RECORD))

    def _row(self, row: SourceRow | InvalidRow, results: list[TokenizedRow | InvalidRow]) -> AuditedRow:
        dropped = next((result for result in results if isinstance(result, InvalidRow)), None)
        if isinstance(row, InvalidRow):
            return AuditedRow(None, dropped=row)
        examples = tuple(result for result in results if isinstance(result, TokenizedRow))
        return AuditedRow(row, text_parts(self._encoder, row.value), examples, dropped)


def _by_row(results: Iterable[TokenizedRow | InvalidRow]) -> Iterator[list[TokenizedRow | InvalidRow]]:
    """Group results by row."""
    listed = list(results)
    starts = [i for i, result in enumerate(listed) if isinstance(result, InvalidRow) or result.part == 0]
    yield from (listed[start:end] for start, end in itertools.pairwise([*starts, len(listed)]))


def _location(row: AuditedRow, path: tuple[str | int, ...] = ()) -> Location:
    if row.dropped is not None and not path:
        return row.dropped.location
    assert row.source is not None, "unreadable rows must have been dropped"
    return location_of(row.source, path)
