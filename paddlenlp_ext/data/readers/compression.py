"""Read plain and compressed files (.gz, .zst) as a stream of uncompressed bytes."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from paddlenlp_ext.utils.optional_packages import import_extra

_CHUNK = 1 << 17
_COMPRESSED_CHUNK = 1 << 11
"""Bytes of Zstandard data per decompression call; 4 bytes can expand to 128 KB, so a call returns at most 64 MB."""
MAX_ROW_BYTES = 1 << 24
"""Maximum size of a row; tokenizing takes about 200 bytes of memory for each byte of a row."""
MAX_BLANK_BYTES = 1 << 26
"""Maximum size of whitespace between rows; a few megabytes of a compressed file can expand to gigabytes."""


def row_too_long() -> str:
    """Return the error message about a row longer than `MAX_ROW_BYTES`."""
    return f"a row is longer than {MAX_ROW_BYTES >> 20} MiB; split it into several rows"


class ByteStream:
    """Stream of the uncompressed bytes of a file.

    Args:
        file: the open file.
        path: path of the file; the suffix selects the decompression.

    Raises:
        ValueError: the package that decompresses the file is not installed.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path, self._size = file, path, max(1, path.stat().st_size)
        self._compressed = path.suffix in COMPRESSIONS
        self._stream = COMPRESSIONS[path.suffix](file, path) if self._compressed else file
        self._errors = (EOFError, OSError, zlib.error)
        self._num_blank = 0

    @property
    def fraction(self) -> float:
        """Fraction of the file that has been read."""
        return min(1.0, self._file.tell() / self._size)

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes, or fewer at the end of the file.

        Raises:
            ValueError: the compressed data is damaged, or whitespace between rows is longer than `MAX_BLANK_BYTES`.
        """
        try:
            content = self._stream.read(count)
        except self._errors as error:
            raise self._damaged(error) from error
        self._num_blank = self._num_blank + len(content) if content.isspace() else 0
        if self._num_blank > MAX_BLANK_BYTES:
            raise ValueError(
                f"{self._path}: more than {MAX_BLANK_BYTES >> 20} MiB of whitespace between two rows; remove it"
            )
        return content

    def read_lines(self, count: int) -> bytes:
        """Return `count` bytes and the rest of the last line, or fewer bytes at the end of the file.

        Raises:
            ValueError: `read` raises a ValueError, or a line is longer than `MAX_ROW_BYTES`.
        """
        content = self.read(count)
        if not content or content.endswith(b"\n"):
            return content
        try:
            rest = self._stream.readline(MAX_ROW_BYTES)
        except self._errors as error:
            raise self._damaged(error) from error
        if len(rest) == MAX_ROW_BYTES:
            raise ValueError(f"{self._path}: {row_too_long()}")
        return content + rest

    def skip(self, count: int) -> None:
        """Skip `count` uncompressed bytes.

        Raises:
            ValueError: `read` raises a ValueError, or the file has become shorter.
        """
        if not self._compressed:
            self._file.seek(count, io.SEEK_CUR)
            return
        while count > 0:
            skipped = len(self.read(min(count, _CHUNK)))
            if not skipped:
                raise ValueError(f"{self._path}: shorter than when the checkpoint was saved; restore the file")
            count -= skipped

    def _damaged(self, error: Exception) -> ValueError:
        return ValueError(f"{self._path}: damaged ({error}); restore the file, or compress it again")


@contextmanager
def open_bytes(path: Path) -> Iterator[ByteStream]:
    """Open a plain or compressed file.

    Raises:
        ValueError: the package that decompresses the file is not installed.
    """
    with open(path, "rb") as file:
        yield ByteStream(file, path)


class _ZstandardFile(io.RawIOBase):
    """Decompressing view of a file of one or more Zstandard frames; an incomplete frame raises EOFError."""

    def __init__(self, file: BinaryIO, zstandard: Any) -> None:
        self._file = file
        self._zstandard = zstandard
        self._frame: Any = None
        self._input = self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output and (self._input or self._read_input()):
            self._decompress()
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def _read_input(self) -> bool:
        self._input = self._file.read(_COMPRESSED_CHUNK)
        if not self._input and self._frame is not None:
            raise EOFError("the last Zstandard frame is incomplete")
        return bool(self._input)

    def _decompress(self) -> None:
        if self._frame is None:
            self._frame = self._zstandard.ZstdDecompressor().decompressobj()
        try:
            self._output = self._frame.decompress(self._input)
        except self._zstandard.ZstdError as error:
            raise OSError(str(error)) from error
        self._input = b""
        if self._frame.eof:
            self._input, self._frame = self._frame.unused_data, None


def _open_gzip(file: BinaryIO, _path: Path) -> Any:
    return gzip.GzipFile(fileobj=file)


def _open_zstandard(file: BinaryIO, path: Path) -> Any:
    zstandard = import_extra("zstandard", "zstd", str(path))
    return io.BufferedReader(_ZstandardFile(file, zstandard), _CHUNK)


COMPRESSIONS = {".gz": _open_gzip, ".zst": _open_zstandard}
"""Suffix of a compressed file -> function that returns a stream of the uncompressed bytes."""
