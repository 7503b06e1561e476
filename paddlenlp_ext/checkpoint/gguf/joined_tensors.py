"""Tensors that a GGUF file stores in parts, under the names of Hugging Face's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paddlenlp_ext.checkpoint.weight_source import WeightSource


class JoinedTensors(WeightSource):
    """Base class of sources some of whose tensors are joined from stored ones; subclasses shape and read them."""

    def __init__(self, source: WeightSource, parts: Mapping[str, Sequence[str]]) -> None:
        """Check that all parts are stored.

        Args:
            source: the stored tensors.
            parts: names of the stored tensors by the name of the joined one.

        Raises:
            ValueError: a part is missing.
        """
        self.path, self._source, self._parts = source.path, source, parts
        missing = {part for names in parts.values() for part in names}.difference(source.names())
        if missing:
            raise ValueError(f"{self.path}: no tensor of {min(missing)}; use a file with the whole model")

    def names(self) -> list[str]:
        return list(self._parts)

    def dtype(self, name: str) -> str:
        return self._source.dtype(self._parts[name][0])
