"""Base class for joining several stored tensors into one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paddlenlp_ext.checkpoint.weight_source import WeightSource


class JoinedTensors(WeightSource):
    """Weight source that joins stored tensors; subclasses implement `shape` and `read`."""

    def __init__(self, source: WeightSource, parts: Mapping[str, Sequence[str]]) -> None:
        """Check that all tensors to join are stored.

        Args:
            source: the stored tensors.
            parts: name of a joined tensor -> names of the stored tensors to join.

        Raises:
            ValueError: a stored tensor is missing.
        """
        self.path, self._source, self._parts = source.path, source, parts
        missing = {part for names in parts.values() for part in names}.difference(source.names())
        if missing:
            raise ValueError(f"{self.path}: the tensor for {min(missing)} is missing; copy or download the model again")

    def names(self) -> list[str]:
        return list(self._parts)

    def dtype(self, name: str) -> str:
        return self._source.dtype(self._parts[name][0])
