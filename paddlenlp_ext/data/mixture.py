"""Interleave several datasets by weight (`train_dataset_prob`).

Row k (from 0) of a source with weight w has the virtual time (k + 1/2) / w, and rows are read in the order of virtual
time. With n sources, the row count of a source never differs by more than (n - 1) / 2 from its weight times the total
row count. When all rows of a source have been read, the source is shuffled again and read from its start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from paddlenlp_ext.data.dataset import TokenizedDataset
from paddlenlp_ext.data.shared_prefixes import SharedPrefixes
from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow
from paddlenlp_ext.data.tokenization.memory_mapped_arrays import TokenArrays
from paddlenlp_ext.data.tokenization.statistics import DataStats
from paddlenlp_ext.utils.logging import get_logger


def parse_weights(written: str, names: Sequence[str]) -> tuple[float, ...]:
    """Parse `train_dataset_prob` into weights that sum to 1.

    Args:
        written: numbers separated by commas.
        names: names of the datasets.

    Raises:
        ValueError: the number of weights differs from the number of datasets, or a weight is not a positive number.
    """
    try:
        weights = [float(part) for part in written.split(",")]
    except ValueError:
        raise ValueError(f'train_dataset_prob: {written!r} is not a list of numbers; write e.g. "0.7,0.3"') from None
    if len(weights) != len(names):
        raise ValueError(
            f"train_dataset_prob: {len(weights)} weight{'s' * (len(weights) != 1)} for {len(names)} dataset"
            f"{'s' * (len(names) != 1)} in dataset_name_or_path ({', '.join(names)}); write one weight per dataset"
        )
    if not all(weight > 0 and math.isfinite(weight) for weight in weights):
        raise ValueError(
            f"train_dataset_prob: {written!r} has a weight that is not positive; use a positive weight, or remove the "
            "dataset from dataset_name_or_path"
        )
    return tuple(weight / sum(weights) for weight in weights)


def next_source(drawn: Sequence[int], weights: Sequence[float]) -> int:
    """Return the index of the source of the next row; `drawn` is the number of rows read from each source."""
    return min(range(len(weights)), key=lambda source: (drawn[source] + 0.5) / weights[source])


def schedule(weights: Sequence[float], first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute the results of `next_source` for `count` rows, starting at row `first` of the mixture.

    Returns:
        The source of each row, int [count], and the number of earlier rows from the same source, int [count].
    """
    end = first + count
    numbers = [np.arange(math.ceil(end * weight) + 1) for weight in weights]
    times = np.concatenate([(each + 0.5) / weight for each, weight in zip(numbers, weights, strict=True)])
    sources = np.repeat(np.arange(len(weights)), [len(each) for each in numbers])
    order = np.lexsort((sources, times))[first:end]
    return sources[order], np.concatenate(numbers)[order]


class MixedDataset:
    """Concatenation of several datasets, which `epoch_rows` interleaves by weight.

    The number of rows in an epoch is the maximum of (row count / weight) over the datasets, rounded up. A pass over a
    dataset can continue in the next epoch, so some epochs do not contain every row.

    Args:
        parts: the datasets.
        names: names of the datasets, for the log.
        weights: fraction of the rows to read from each dataset, with sum 1.

    Attributes:
        lengths, sequence_lengths: int64 [rows], see `TokenizedDataset`.
        stats: counts of rows and tokens over all datasets.
        rows_per_epoch: number of rows that are read in an epoch.
        prefixes: prefixes that rows share; None without `share_prefix`.
    """

    def __init__(self, parts: Sequence[TokenizedDataset], names: Sequence[str], weights: Sequence[float]) -> None:
        self.lengths = self.sequence_lengths = np.concatenate([part.lengths for part in parts])
        self.stats = DataStats()
        for part in parts:
            self.stats.add(part.stats)
        self.weights = tuple(weights)
        self.rows_per_epoch = max(math.ceil(len(part) / weight) for part, weight in zip(parts, weights, strict=True))
        found = [part.prefixes for part in parts if part.prefixes is not None]
        self.prefixes = SharedPrefixes.concatenate(found) if found else None
        self._parts = list(parts)
        self._first = np.cumsum([0, *(len(part) for part in parts)])
        self._log(names)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> EncodedRow:
        part, row = self._find(index)
        found = self._parts[part][row]
        return EncodedRow(found.tokens, found.loss_mask, int(index))

    @property
    def token_arrays(self) -> list[TokenArrays]:
        """Tokens of all rows, one item per dataset."""
        return [arrays for part in self._parts for arrays in part.token_arrays]

    def source(self, index: int) -> tuple[str, int]:
        """Return the file and the line of row `index`."""
        part, row = self._find(index)
        return self._parts[part].source(row)

    def head(self, count: int) -> list[EncodedRow]:
        """Return at most `count` rows from the start."""
        return [self[index] for index in range(min(count, len(self)))]

    def epoch_rows(self, epoch: int, seed: int) -> np.ndarray:
        """Return the row indices of an epoch in reading order, int64 [rows_per_epoch].

        A pass reads each row of a dataset once, in a new order. A pass that is incomplete at the end of an epoch
        continues in the next epoch.
        """
        sources, numbers = schedule(self.weights, epoch * self.rows_per_epoch, self.rows_per_epoch)
        rows = np.empty(self.rows_per_epoch, dtype=np.int64)
        for part, dataset in enumerate(self._parts):
            chosen = sources == part
            passes, places = np.divmod(numbers[chosen], len(dataset))
            found = np.empty(len(places), dtype=np.int64)
            for number in np.unique(passes).tolist():
                bits = np.random.PCG64([seed, part, number]).random_raw(len(dataset))
                found[passes == number] = np.argsort(bits, kind="stable")[places[passes == number]]
            rows[chosen] = self._first[part] + found
        return rows

    def _find(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        part = int(np.searchsorted(self._first, index, side="right")) - 1
        return part, int(index - self._first[part])

    def _log(self, names: Sequence[str]) -> None:
        drawn = [weight * self.rows_per_epoch for weight in self.weights]
        tokens = [rows * float(part.lengths.mean()) for rows, part in zip(drawn, self._parts, strict=True)]
        for part, name, weight, rows, num_tokens in zip(self._parts, names, self.weights, drawn, tokens, strict=True):
            get_logger().info(
                "mix: %s: %.2f%% of the rows, %.2f%% of the tokens, %.2f passes over its %d rows per epoch",
                *(name, 100 * weight, 100 * num_tokens / sum(tokens), rows / len(part), len(part)),
            )
