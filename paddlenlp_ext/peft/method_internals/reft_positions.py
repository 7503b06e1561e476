"""Positions that ReFT changes: the first n and the last m positions of each prompt, in packed rows or with a cache.

    position "f2+l1"     padding   prompt                answer
    tokens                 _  _    t0  t1  t2  t3  t4    a0  a1
    changed                        ^^  ^^          ^^

Positions are counted within each document, from the first token of the prompt; padding does not count. In a prompt
with fewer than n + m tokens, every position is changed once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paddlenlp_ext.ops.attention import AttentionLayout, DocumentParents


@dataclass(frozen=True)
class PositionSpec:
    """Number of positions to change at the start (`first`) and at the end (`last`) of a prompt."""

    first: int
    last: int


@dataclass(frozen=True)
class Document:
    """Location of a document in the flattened batch of a forward pass.

    Attributes:
        origin: index of position 0 in the flattened batch; out of range if position 0 is in the cache.
        begin: first position that the forward pass computes.
        end: last position that the forward pass computes, plus 1.
        prompt_length: number of positions of the prompt.
    """

    origin: int
    begin: int
    end: int
    prompt_length: int


def parse_positions(text: str) -> PositionSpec:
    """Parse the option `position`: "f7+l7", "f7" or "l3".

    Raises:
        ValueError: the text does not have one of these formats, or selects no position.
    """
    counts: dict[str, int] = {}
    for part in text.replace(" ", "").split("+"):
        match = re.fullmatch(r"([fl])(\d+)", part)
        if match is None or match[1] in counts:
            break
        counts[match[1]] = int(match[2])
    else:
        if any(counts.values()):
            return PositionSpec(counts.get("f", 0), counts.get("l", 0))
    raise ValueError(
        f'position={text!r} selects no positions; use "f7" for the first 7 positions of the prompt, "l7" for the last '
        '7, or "f7+l7" for both'
    )


def packed_documents(
    document_lengths: Sequence[Sequence[int]],
    prompt_lengths: Sequence[Sequence[int]] | None,
    document_parents: DocumentParents | None = None,
) -> list[Document]:
    """Return the documents of a forward pass without a cache.

    Args:
        document_lengths: lengths of the documents in each row of the batch.
        prompt_lengths: prompt length of each document; 0: no position is changed; None: the full document is the
            prompt. The prompt length of a document with a parent includes the positions of the parent. The prompt
            length of a parent includes the prompt positions of the documents that continue it.
        document_parents: parent of each document: the document that it continues, or None.

    Raises:
        ValueError: the prompt lengths do not match the documents, or are missing although documents have parents.
    """
    layout = AttentionLayout.from_documents(document_lengths, document_parents=document_parents)
    starts, lengths = (x.tolist() for x in layout.documents())
    begins = layout.first_positions().tolist()
    ends = [begin + length for begin, length in zip(begins, lengths, strict=True)]
    if prompt_lengths is None and layout.document_parents is not None:
        raise ValueError("document_parents needs prompt_lengths; pass the prompt length of each document")
    rows = document_lengths if prompt_lengths is None else prompt_lengths
    prompts = [length for row in rows for length in row]
    if [len(row) for row in rows] != [len(row) for row in document_lengths] or any(
        not 0 <= prompt <= length for prompt, length in zip(prompts, layout.sequence_lengths(), strict=True)
    ):
        raise ValueError(
            f"prompt_lengths is {rows} for documents of lengths {document_lengths}; pass one prompt length per "
            "document, not longer than the document"
        )
    return [
        Document(start - begin, begin, end, prompt)
        for start, begin, end, prompt in zip(starts, begins, ends, prompts, strict=True)
    ]


def cached_documents(
    key_starts: Sequence[int], num_seen: int, num_new: int, prompt_ends: Sequence[int]
) -> list[Document]:
    """Return the documents of a forward pass with a cache, one document per row.

    Args:
        key_starts: column of the first token of each row.
        num_seen: number of columns in the cache before the forward pass.
        num_new: number of columns that the forward pass computes.
        prompt_ends: first column after the prompt of each row.
    """
    return [
        Document(
            origin=row * num_new + start - num_seen,
            begin=num_seen - start,
            end=num_seen + num_new - start,
            prompt_length=prompt_end - start,
        )
        for row, (start, prompt_end) in enumerate(zip(key_starts, prompt_ends, strict=True))
    ]


def selected_indices(documents: Sequence[Document], positions: PositionSpec) -> np.ndarray:
    """Return the selected positions as indices into the flattened batch, int64, ascending and unique."""
    chosen: list[int] = []
    for document in documents:
        head_end = min(positions.first, document.prompt_length)
        tail_begin = max(head_end, document.prompt_length - positions.last)
        for begin, end in ((0, head_end), (tail_begin, document.prompt_length)):
            begin, end = max(begin, document.begin), min(end, document.end)
            chosen.extend(range(document.origin + begin, document.origin + end))
    return np.array(chosen, dtype=np.int64)
