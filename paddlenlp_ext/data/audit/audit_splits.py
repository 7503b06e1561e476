"""Audit all splits of a run: checks of rows, duplicates within and across splits, rare languages, and token counts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from paddlenlp_ext.data.audit.audited_row import TokenizerInfo
from paddlenlp_ext.data.audit.block_auditor import AuditedRows, BlockAuditor
from paddlenlp_ext.data.audit.duplicates import TRAIN_ROWS, Duplicate, DuplicateFinder
from paddlenlp_ext.data.audit.findings import ERROR, NOTE, WARNING, Finding, Kind
from paddlenlp_ext.data.audit.languages import UNKNOWN
from paddlenlp_ext.data.audit.report import AuditReport, SplitReport
from paddlenlp_ext.data.readers.base import Block, Reader
from paddlenlp_ext.data.tokenization.row_encoder import RowEncoder
from paddlenlp_ext.data.tokenization.workers import BlockEncoder, num_workers
from paddlenlp_ext.utils.json_reader import Location

EXACT = Kind("duplicate", WARNING, "remove one of the rows, unless the repetition is intended")
NEAR = Kind("near-duplicate", WARNING, "remove one of the rows, unless the repetition is intended")
LEAK = Kind(
    "dev row in train", ERROR, "remove the row from one of the splits, so that metrics measure answers to new questions"
)
PROMPT_LEAK = Kind("dev question in train", WARNING, "remove the row from one of the splits, unless the answers differ")
RARE_LANGUAGE = Kind("rare language", NOTE, "check the rows: nearly all other rows are in another language")
UNKNOWN_FIELD = Kind(
    "field without effect", NOTE, "rename or remove the field; docs/reference/data_formats.md lists the known fields"
)
TRAIN = "train"
"""Name of the split of training rows."""
ACCOUNT = Kind("account", ERROR, "report a bug and attach the data files: the counts of audit and training differ")
_MOST, _RARE, _FEW_ROWS = 0.9, 0.02, 50
"""A language with at most 2 % of the rows is rare if the split has at least 50 rows, 90 % of them in one language."""


@dataclass(frozen=True)
class AuditedSplit:
    """Split to audit.

    Attributes:
        name: `TRAIN`, or "dev" with the name of the dev set.
        readers: readers of the files of the split.
        encoder: encoder of the rows; `encoder.files` are the files of the readers.
        max_rows: total number of rows to read, divided evenly among the files and rounded up to whole blocks; None: all
            rows.
    """

    name: str
    readers: Sequence[Reader]
    encoder: RowEncoder
    max_rows: int | None = None


def audit_splits(
    splits: Sequence[AuditedSplit], title: str, num_processes: int | None = None, max_context: int | None = None
) -> AuditReport:
    """Audit the splits of a run.

    Memory use grows with the number of rows only in the duplicate search, which compares at most `duplicates.MAX_ROWS`
    rows.

    Args:
        splits: the splits, training rows first.
        title: names of the datasets, shown in the report.
        num_processes: number of processes; None: see `num_workers`.
        max_context: context length of the model, in positions; None: unknown.

    Raises:
        ValueError: a file is damaged.
    """
    start = time.perf_counter()
    reports = []
    info = TokenizerInfo.of(splits[0].encoder.template, max_context)
    with DuplicateFinder() as finder:
        for number, split in enumerate(splits):
            reports.append(_audit_split(split, number, info, finder, num_processes))
        _add_duplicates(reports, splits, finder)
        num_compared = finder.num_rows
    for report in reports:
        _add_rare_languages(report.rows)
        _add_unknown_fields(report.rows)
    max_length = splits[0].encoder.limits.max_length
    return AuditReport(title, max_length, reports, time.perf_counter() - start, num_compared)


def _audit_split(
    split: AuditedSplit, number: int, info: TokenizerInfo, finder: DuplicateFinder, num_processes: int | None
) -> SplitReport:
    rows = AuditedRows()
    processes = num_workers(num_processes, sum(reader.size for reader in split.readers))
    is_sample = False
    with BlockEncoder(BlockAuditor(split.encoder, info), processes) as workers:
        # Without max_rows, all files are one sequence: a worker can start a file before the previous file is complete.
        for readers in [split.readers] if split.max_rows is None else [[reader] for reader in split.readers]:
            num_read = 0
            for block in workers.encode(_blocks(readers)):
                rows.merge(block.rows)
                finder.append(block.records, TRAIN_ROWS if split.name == TRAIN else number + 1)
                num_read += block.rows.stats.num_read
                if split.max_rows is not None and num_read * len(split.readers) >= split.max_rows:
                    is_sample = True
                    break
    rows.stats.check()
    return SplitReport(split.name, tuple(reader.name for reader in split.readers), rows, is_sample)


def _blocks(readers: Iterable[Reader]) -> Iterator[Block]:
    for reader in readers:
        yield from reader.blocks()


def _add_duplicates(reports: Sequence[SplitReport], splits: Sequence[AuditedSplit], finder: DuplicateFinder) -> None:
    records = finder.records()

    def split_of(row: int) -> int:
        return max(0, int(records[row]["split"]) - 1)

    def place(row: int) -> Location:
        return Location(splits[split_of(row)].encoder.files[int(records[row]["file"])], int(records[row]["line"]))

    for duplicate in finder.duplicates():
        record, other = records[duplicate.row], records[duplicate.other]
        kind = _kind_of(duplicate, is_leak=other["split"] == TRAIN_ROWS != record["split"])
        beginning = bytes(record["beginning"]).decode(errors="ignore")
        likeness = "the same question as" if duplicate.same_prompt else _likeness(duplicate)
        finding = Finding(place(duplicate.row), f"{likeness} {place(duplicate.other)}: {beginning}")
        reports[split_of(duplicate.row)].rows.findings.add(kind, finding)


def _kind_of(duplicate: Duplicate, is_leak: bool) -> Kind:
    if is_leak:
        return PROMPT_LEAK if duplicate.same_prompt else LEAK
    return EXACT if duplicate.similarity == 1 else NEAR


def _likeness(duplicate: Duplicate) -> str:
    return "the same words as" if duplicate.similarity == 1 else f"{duplicate.similarity:.0%} of the words of"


def _add_rare_languages(rows: AuditedRows) -> None:
    known = {language: count for language, count in rows.languages.items() if language != UNKNOWN}
    total = sum(known.values())
    if total < _FEW_ROWS or max(known.values()) < _MOST * total:
        return
    for language, count in known.items():
        if count <= _RARE * total:
            places = rows.language_places[language]
            for place in places:
                rows.findings.add(RARE_LANGUAGE, Finding(place.location, f"{language}: {place.excerpt}"))
            rows.findings.counts[RARE_LANGUAGE] += count - len(places)


def _add_unknown_fields(rows: AuditedRows) -> None:
    for file, counts in rows.stats.unknown_fields.items():
        for name, count in counts.items():
            rows.findings.add(UNKNOWN_FIELD, Finding(Location(file), f"{name} ({count:,} rows)"))


def check_account(report: SplitReport, expected: dict[str, int]) -> None:
    """Add a finding for each count of rows or tokens that differs between the audit and training.

    Args:
        report: report of the split.
        expected: name of an attribute of `DataStats` -> count in training.
    """
    for name, number in expected.items():
        if (found := getattr(report.rows.stats, name)) != number:
            place = Location(", ".join(report.files))
            report.rows.findings.add(ACCOUNT, Finding(place, f"{name}: {found:,} here, {number:,} in training"))
