"""Prefixes that rows share, such as a system prompt or few-shot examples; a pack computes a prefix once.

Example of three rows with a prefix of three tokens (`*` marks target tokens):

    row 0: s t u q a*      row 1: s t u q b* c*      row 2: s t u v d*

    document           0     | 1 | 2   | 3
    parent             -     | 0 | 0   | 0
    input_ids          s t u | q | q b | v
    labels             - - - | a | b c | d         - is -100: no loss at this position
    position_ids       0 1 2 | 3 | 3 4 | 3

The prefix is a document that the remainders of the rows continue (ops/attention/document_layout.py). The prefix ends
before the first position with a label, because a position has one label, and rows may have different labels there. Rows
share the positions of a prefix only if the rows are adjacent in a pack, so `bundle_rows` groups the rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from paddlenlp_ext.data.tokenization.encoded_row import Document, EncodedRow
from paddlenlp_ext.utils.labels import IGNORED_LABEL


@dataclass(frozen=True)
class PrefixedRows:
    """Rows of a pack that share a prefix, with the `EncodedRow` attributes that `collate` uses.

    Attributes:
        rows: at least two rows.
        prefix_length: number of tokens of the prefix; no row has a label at these positions.
    """

    rows: tuple[EncodedRow, ...]
    prefix_length: int

    @property
    def length(self) -> int:
        """Number of positions: the prefix once, and the remainder of each row."""
        return sum(row.length for row in self.rows) - (len(self.rows) - 1) * self.prefix_length

    @property
    def row_indices(self) -> tuple[int, ...]:
        """Indices of the rows in the dataset."""
        return tuple(row.row_index for row in self.rows)

    @property
    def documents(self) -> tuple[Document, ...]:
        """The prefix, and the remainders that continue it."""
        length = self.prefix_length
        wholes = [document for row in self.rows for document in row.documents]
        assert len(wholes) == len(self.rows), "a row with a shared prefix must be one document"
        prefix = Document(wholes[0].input_ids[:length], np.full(length, IGNORED_LABEL, np.int64))
        return (prefix, *(Document(whole.input_ids[length:], whole.labels[length:], length, 0) for whole in wholes))


@dataclass(frozen=True)
class SharedPrefixes:
    """Prefix of each row of a dataset.

    Attributes:
        groups: int64 [rows], index of the row's prefix; -1: the row has no shared prefix.
        lengths: int64 [prefixes], number of tokens of each prefix.
    """

    groups: np.ndarray
    lengths: np.ndarray

    @classmethod
    def concatenate(cls, parts: Sequence[SharedPrefixes]) -> SharedPrefixes:
        """Return the prefixes of concatenated datasets; rows of different datasets never share a prefix."""
        counts = [len(part.lengths) for part in parts]
        firsts = np.cumsum(counts) - counts
        groups = [np.where(part.groups < 0, -1, part.groups + first) for part, first in zip(parts, firsts, strict=True)]
        return cls(np.concatenate(groups), np.concatenate([part.lengths for part in parts]))

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the prefix length of each row in `rows`, int64; 0 for a row without a shared prefix."""
        return np.append(self.lengths, 0)[self.groups[rows]]

    def repeated(self, packs: Iterable[Sequence[int]]) -> np.ndarray:
        """Return the prefix length, int64, of each row whose predecessor in the pack has the same prefix."""
        found = [np.zeros(0, np.int64)]
        for pack in packs:
            groups = self.groups[np.asarray(pack)]
            found.append(self.lengths[groups[1:][(groups[1:] == groups[:-1]) & (groups[1:] >= 0)]])
        return np.concatenate(found)

    def num_saved(self, lengths: np.ndarray, capacity: int) -> int:
        """Estimate the number of positions that shared prefixes save in an epoch.

        Args:
            lengths: int64 [rows], number of positions of each row.
            capacity: number of positions of a pack.
        """
        rows = np.flatnonzero(self.groups >= 0)
        groups = self.groups[rows]
        return int(saved_positions(groups, lengths[rows], self.lengths, capacity).sum())

    def join(self, pack: Sequence[EncodedRow]) -> list[EncodedRow | PrefixedRows]:
        """Join adjacent rows of a pack that have the same prefix."""
        joined: list[EncodedRow | PrefixedRows] = []
        for group, members in itertools.groupby(pack, key=lambda row: int(self.groups[row.row_index])):
            rows = tuple(members)
            is_shared = group >= 0 and len(rows) > 1
            joined += [PrefixedRows(rows, int(self.lengths[group]))] if is_shared else rows
        return joined

    def describe(self) -> str:
        """Return the number of rows that share prefixes, and the number and lengths of the prefixes."""
        if not len(self.lengths):
            return f"none of {len(self.groups):,} rows shares a prefix"
        shortest, longest = int(self.lengths.min()), int(self.lengths.max())
        size = f"{shortest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
        what = "a prefix" if len(self.lengths) == 1 else f"{len(self.lengths):,} prefixes"
        return f"{int((self.groups >= 0).sum()):,} of {len(self.groups):,} rows share {what} of {size} tokens"


def saved_positions(
    groups: np.ndarray, row_lengths: np.ndarray, prefix_lengths: np.ndarray, capacity: int
) -> np.ndarray:
    """Estimate how many positions each prefix saves, int64 [prefixes].

    Args:
        groups: int64 [rows], index of the prefix of each row.
        row_lengths: int64 [rows], number of positions of each row, including its prefix.
        prefix_lengths: int64 [prefixes].
        capacity: number of positions of a pack. Each pack with rows of a prefix has one copy of the prefix.
    """
    num_prefixes = len(prefix_lengths)
    counts = np.bincount(groups, minlength=num_prefixes)
    totals = np.bincount(groups, weights=row_lengths, minlength=num_prefixes).astype(np.int64)
    copies = -(-(totals - counts * prefix_lengths) // (capacity - prefix_lengths))
    return (counts - copies) * prefix_lengths


@dataclass(frozen=True)
class Bundles:
    """Rows of an epoch, grouped into bundles; the rows of a bundle stay together in a pack.

    Attributes:
        rows: int64 [rows], dataset indices of the rows, bundle by bundle.
        starts: int64 [bundles + 1]; bundle i is rows[starts[i] : starts[i + 1]].
        lengths: int64 [bundles], number of positions.
        costs: int64 [bundles], attention cost, see `attention_cost` in packing.py.
        is_full: bool [bundles], true if the rest of the rows with the same prefix did not fit into the bundle.
    """

    rows: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    costs: np.ndarray
    is_full: np.ndarray

    def rows_of(self, bundles: Iterable[int]) -> list[int]:
        """Return the dataset indices of the rows of some bundles."""
        return [row for each in bundles for row in self.rows[self.starts[each] : self.starts[each + 1]].tolist()]


def bundle_rows(
    order: np.ndarray,
    lengths: np.ndarray,
    prefixes: SharedPrefixes,
    capacity: int,
    pack: Callable[[np.ndarray, int], Iterable[list[int]]],
) -> Bundles:
    """Group rows that share a prefix into bundles that fit into a pack; every other row is a bundle of one row.

    Bundles are sorted by the position, in the epoch, of their row with the lowest dataset index; after a shuffle, this
    position is random. Sorting by the first row of each bundle would move large bundles to the start of the epoch.

    Args:
        order: int64 [rows], dataset indices of the rows in reading order.
        lengths: int64, number of positions of each row by dataset index.
        prefixes: prefix of each row by dataset index.
        capacity: number of positions of a pack.
        pack: function that packs rows: takes their lengths and a capacity, and returns lists of indices.
    """
    groups = prefixes.groups[order]
    found = [([place], False) for place in np.flatnonzero(groups < 0).tolist()]
    shared = np.flatnonzero(groups >= 0)
    shared = shared[np.argsort(groups[shared], kind="stable")]
    for places in np.split(shared, np.flatnonzero(np.diff(groups[shared])) + 1) if len(shared) else ():
        prefix = int(prefixes.lengths[groups[places[0]]])
        remainders = lengths[order[places]] - prefix
        if remainders.sum() <= capacity - prefix:
            found.append((places.tolist(), False))
        else:
            *full, last = (places[bundle].tolist() for bundle in pack(remainders, capacity - prefix))
            found += [*((bundle, True) for bundle in full), (last, False)]
    index_of = order.tolist()
    found.sort(key=lambda bundle: min(bundle[0], key=index_of.__getitem__))
    bundles = [places for places, _ in found]
    rows = order[np.fromiter(itertools.chain.from_iterable(bundles), np.int64, len(order))]
    sizes = np.fromiter(map(len, bundles), np.int64, len(bundles))
    starts = np.cumsum(sizes) - sizes
    own, repeated = lengths[rows], prefixes.of_rows(rows[starts])
    return Bundles(
        rows,
        np.append(starts, len(rows)),
        np.add.reduceat(own, starts) - (sizes - 1) * repeated,
        np.add.reduceat(np.square(own), starts) - (sizes - 1) * np.square(repeated),
        np.array([is_full for _, is_full in found], bool),
    )
