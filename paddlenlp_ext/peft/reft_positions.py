"""Which slots of a forward pass ReFT changes: the first n and last m positions of every prompt.

Positions count in the prompt, from its first real token: padding, before or behind, and neighbours in a pack do not
shift them. A prompt shorter than n + m is changed at each of its positions, once. What is the prompt:

    in training      what precedes the document's last answer; in a conversation its earlier turns are part of it, as
                     they are when the model is asked to give that answer
    in generation    the prompt; the tokens that are generated are not changed
    otherwise        the lengths that the caller gives, else the whole document
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Positions:
    """`first` positions from a prompt's beginning and `last` at its end."""

    first: int
    last: int


@dataclass(frozen=True)
class Document:
    """A document as a forward pass sees it.

    Attributes:
        origin: the slot where its position 0 lies or would lie, counted through the whole batch.
        begin, end: its positions that the pass computes: begin <= position < end.
        prompt_length: how many positions the prompt has.
    """

    origin: int
    begin: int
    end: int
    prompt_length: int


def parse_positions(text: str) -> Positions:
    """Read "f7+l7", "f7" or "l3".

    Raises:
        ValueError: it reads otherwise, or asks for no position at all.
    """
    counts: dict[str, int] = {}
    for part in text.replace(" ", "").split("+"):
        match = re.fullmatch(r"([fl])(\d+)", part)
        if match is None or match[1] in counts:
            break
        counts[match[1]] = int(match[2])
    else:
        if any(counts.values()):
            return Positions(counts.get("f", 0), counts.get("l", 0))
    raise ValueError(
        f'position={text!r} names no positions; write "f7" for the first 7 of the prompt, "l7" for its last 7, or '
        '"f7+l7" for both.'
    )


def packed_documents(
    document_lengths: Sequence[Sequence[int]], prompt_lengths: Sequence[Sequence[int]] | None
) -> list[Document]:
    """The documents of a pass without a cache.

    Args:
        document_lengths: of each row of the batch.
        prompt_lengths: as many numbers, 0 where nothing is to be changed; None: all of each document is prompt.

    Raises:
        ValueError: prompt lengths that do not belong to these documents.
    """
    prompts = document_lengths if prompt_lengths is None else prompt_lengths
    lengths = [length for row in document_lengths for length in row]
    wanted = [length for row in prompts for length in row]
    if [len(row) for row in prompts] != [len(row) for row in document_lengths] or any(
        not 0 <= prompt <= length for prompt, length in zip(wanted, lengths, strict=True)
    ):
        raise ValueError(f"prompt_lengths {prompts} do not fit documents of {document_lengths} tokens.")
    origins = np.cumsum([0, *lengths[:-1]]).tolist()
    return [Document(origin, 0, end, prompt) for origin, end, prompt in zip(origins, lengths, wanted, strict=True)]


def cached_documents(key_starts: Sequence[int], num_seen: int, num_new: int, prompt_end: int) -> list[Document]:
    """The documents of a pass over left-padded rows with a cache, one a row.

    Args:
        key_starts: column of each row's first token.
        num_seen: columns that the cache holds already.
        num_new: columns of this pass.
        prompt_end: the column where all prompts end.
    """
    return [
        Document(
            origin=row * num_new + start - num_seen,
            begin=num_seen - start,
            end=num_seen + num_new - start,
            prompt_length=prompt_end - start,
        )
        for row, start in enumerate(key_starts)
    ]


def chosen_slots(documents: Sequence[Document], positions: Positions) -> np.ndarray:
    """The slots to change, int64, ascending, each once."""
    chosen: list[int] = []
    for document in documents:
        head_end = min(positions.first, document.prompt_length)
        tail_begin = max(head_end, document.prompt_length - positions.last)
        for begin, end in ((0, head_end), (tail_begin, document.prompt_length)):
            begin, end = max(begin, document.begin), min(end, document.end)
            chosen.extend(range(document.origin + begin, document.origin + end))
    return np.array(chosen, dtype=np.int64)
