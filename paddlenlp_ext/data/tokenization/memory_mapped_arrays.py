"""Arrays of tokenized rows, which are appended to files and then memory-mapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow, TokenizedRow

_ARRAY_FILES = {"loss_mask": "learned", "locations": "places"}
"""Attribute of `TokenArrays` -> file name without suffix, if the names differ."""
VALUES, VALUES_FILE = "values", "values.npy"
"""Name and file of an array that only some kinds of rows have."""


@dataclass(frozen=True)
class TokenArrays:
    """Concatenated tokens of rows.

    Attributes:
        tokens: int32 [tokens].
        loss_mask: bool [tokens], true for target tokens.
        offsets: int64 [rows + 1]; row i is tokens[offsets[i] : offsets[i + 1]].
        locations: int64 [rows, 3]: file index, line and column of each row.
        answers: int64 [rows, k], `TokenizedRow.answers` of each row. For fine-tuning, k is 2: `answer_start` and
            `last_turn`.
        values: float64 [rows, v], `TokenizedRow.values` of each row, such as margins; None if v is 0.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    locations: np.ndarray
    answers: np.ndarray
    values: np.ndarray | None = None

    @classmethod
    def from_rows(
        cls, rows: Sequence[TokenizedRow], files: Sequence[str], num_answers: int = 2, num_values: int = 0
    ) -> TokenArrays:
        """Concatenate tokenized rows.

        Args:
            rows: the rows.
            files: names of the data files; locations store indices into this list.
            num_answers: number of columns of `answers`.
            num_values: number of columns of `values`; 0: `values` is None.
        """
        file_index: dict[str | None, int] = {file: index for index, file in enumerate(files)}
        lengths = [len(row.tokens) for row in rows]
        locations = [(file_index[row.location.file], row.location.line, row.location.column) for row in rows]
        return cls(
            tokens=np.concatenate([row.tokens for row in rows]) if rows else np.zeros(0, np.int32),
            loss_mask=np.concatenate([row.loss_mask for row in rows]) if rows else np.zeros(0, bool),
            offsets=np.cumsum([0, *lengths], dtype=np.int64),
            locations=np.array(locations, dtype=np.int64).reshape(len(rows), 3),
            answers=np.array([row.answers for row in rows], dtype=np.int64).reshape(len(rows), num_answers),
            values=np.array([row.values for row in rows], np.float64).reshape(-1, num_values) if num_values else None,
        )

    @classmethod
    def gather(cls, rows: Sequence[tuple[TokenArrays, int]]) -> TokenArrays:
        """Concatenate rows; each row is given as arrays and the index of the row in the arrays."""
        values = [arrays.values[index] for arrays, index in rows if arrays.values is not None]
        spans = [(arrays, *arrays.offsets[index : index + 2].tolist()) for arrays, index in rows]
        return cls(
            tokens=np.concatenate([arrays.tokens[start:end] for arrays, start, end in spans]),
            loss_mask=np.concatenate([arrays.loss_mask[start:end] for arrays, start, end in spans]),
            offsets=np.cumsum([0, *(end - start for _, start, end in spans)], dtype=np.int64),
            locations=np.stack([arrays.locations[index] for arrays, index in rows]),
            answers=np.stack([arrays.answers[index] for arrays, index in rows]),
            values=np.stack(values) if values else None,
        )

    @classmethod
    def load(cls, folder: Path) -> TokenArrays:
        """Memory-map the arrays in a folder that `TokenWriter` wrote.

        Raises:
            ValueError: a file is missing or damaged.
        """
        try:
            names = [name for name in cls.__dataclass_fields__ if name != VALUES or (folder / VALUES_FILE).is_file()]
            mapped = [np.load(folder / file_name_of(name), mmap_mode="r", allow_pickle=False) for name in names]
        except (OSError, ValueError, EOFError) as error:
            raise ValueError(f"{folder}: {error}; delete this directory") from error
        arrays = cls(*map(np.asarray, mapped))  # np.asarray, because slicing a np.memmap is slow
        if len(arrays.offsets) < 1 or arrays.offsets[-1] != len(arrays.tokens):
            raise ValueError(f"{folder}: the files have different lengths; delete this directory")
        return arrays

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int, row_index: int) -> EncodedRow:
        """Return row `index` of the arrays as row `row_index` of the dataset."""
        start, end = self.offsets[index : index + 2]
        return EncodedRow(self.tokens[start:end], self.loss_mask[start:end], row_index)

    @property
    def lengths(self) -> np.ndarray:
        """Number of positions that each row occupies in a batch: its token count minus one, int64 [rows]."""
        return np.diff(self.offsets) - 1


class TokenWriter:
    """Context manager that appends rows to the array files of a folder; the files are complete when it exits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, _GrowingArray] = {}
        self.num_tokens = 0

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._files:
            self.append(TokenArrays.from_rows([], []))
        for file in self._files.values():
            file.close()

    def append(self, arrays: TokenArrays) -> None:
        # Skip the first offset if rows were written before: it equals the last offset in the file.
        offsets = arrays.offsets[bool(self._files) :] + self.num_tokens
        self.num_tokens += len(arrays.tokens)
        for name, array in {**vars(arrays), "offsets": offsets}.items():
            if array is None:
                continue
            if name not in self._files:
                self._files[name] = _GrowingArray(self._folder / file_name_of(name), array)
            self._files[name].append(array)


class _GrowingArray:
    """File in NumPy's format to which rows are appended; the header has space for the final number of rows."""

    def __init__(self, path: Path, first: np.ndarray) -> None:
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115 (closed by TokenWriter)
        self._dtype, self._row_shape, self._num_rows = first.dtype, first.shape[1:], 0
        self._write_header()
        self._header_size = self._file.tell()

    def append(self, array: np.ndarray) -> None:
        assert array.dtype == self._dtype and array.shape[1:] == self._row_shape
        self._file.write(np.ascontiguousarray(array).data)
        self._num_rows += len(array)

    def close(self) -> None:
        """Write the number of rows into the header, and close the file."""
        self._file.seek(0)
        self._write_header()
        assert self._file.tell() == self._header_size, "the header must have the announced size"
        self._file.close()

    def _write_header(self) -> None:
        shape = (self._num_rows, *self._row_shape)
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)


def file_name_of(name: str) -> str:
    """Return the file name of the array `name` of `TokenArrays`."""
    return f"{_ARRAY_FILES.get(name, name)}.npy"
