"""Arrow streams (.arrow) written by `Dataset.save_to_disk`, read with pyarrow (the extra `parquet`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from paddlenlp_ext.data.readers.arrow_buffers import expanded_bytes
from paddlenlp_ext.data.readers.base import READERS, Block, Cursor, FileReader
from paddlenlp_ext.data.readers.column_batches import column_blocks
from paddlenlp_ext.utils.optional_packages import import_extra

_MAX_EXPANDED_BYTES = 1 << 32


@READERS.register(".arrow")
class ArrowReader(FileReader):
    """Reader of an Arrow stream, which is memory-mapped; a cursor is the index of the next row.

    The line of a location is the row number. Null values are left out of rows.
    """

    may_be_compressed = False

    def blocks(self, start: Cursor = ()) -> Iterator[Block]:
        """Yield blocks, starting at a cursor."""
        pyarrow = import_extra("pyarrow", "parquet", self.name)
        ipc = import_extra("pyarrow.ipc", "parquet", self.name)
        (row,) = start or (0,)
        try:
            with pyarrow.memory_map(self.name) as source:
                self._check_compression(ipc.MessageReader.open_stream(source))
                source.seek(0)
                table = ipc.open_stream(source).read_all()
                batches = map(_validated, table.slice(row).to_batches())
                yield from column_blocks(batches, self.name, row, len(table))
        except (OSError, pyarrow.ArrowException) as error:
            raise ValueError(
                f"{self.path}: not an Arrow stream, or damaged ({error}); save the dataset again"
            ) from error

    def _check_compression(self, messages: Iterable[Any]) -> None:
        """Check the decompressed size of the compressed buffers. Other buffers are memory-mapped, and have no limit.

        Raises:
            ValueError: the decompressed buffers exceed `_MAX_EXPANDED_BYTES`.
        """
        num_bytes = 0
        for message in messages:
            num_bytes += expanded_bytes(message)
            if num_bytes > _MAX_EXPANDED_BYTES:
                raise ValueError(
                    f"{self.path}: the compressed columns expand to more than {_MAX_EXPANDED_BYTES >> 30} GiB; save "
                    "the dataset without compression, or in several files"
                )


def _validated(batch: Any) -> Any:
    """Return a record batch after validation; pyarrow itself does not check offsets and indices when it reads values.

    Raises:
        pyarrow.ArrowInvalid: offsets or indices lie outside their buffers, or text is not UTF-8.
    """
    batch.validate(full=True)
    return batch
