"""Convert layer scalars: checkpoints store a tensor per layer, GGUF files a metadata list with one item per layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from paddlenlp_ext.checkpoint.dtypes import cast
from paddlenlp_ext.checkpoint.file_layouts.base import split_layer
from paddlenlp_ext.checkpoint.gguf.gguf_file import open_gguf
from paddlenlp_ext.checkpoint.gguf.registry import num_layers
from paddlenlp_ext.checkpoint.safetensors import LazyTensor
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import Shard


class ListedTensor(NamedTuple):
    """Metadata key of a list, and the shape of the checkpoint tensor that holds an item of the list."""

    key: str
    shape: tuple[int, ...]


ListedTensors = Mapping[str, ListedTensor]
"""Name of a tensor after "model.layers.N." -> its list in the metadata."""


def scalar_metadata(tensors: Mapping[str, LazyTensor], listed: ListedTensors) -> dict[str, Any]:
    """Return the metadata lists that hold the tensors of `listed`; the inverse of `LayerScalars`."""
    lists: dict[str, list[float]] = {each.key: [] for each in listed.values()}
    for layer in range(sum(split_layer(name)[1] == next(iter(listed)) for name in tensors)):
        for name, each in listed.items():
            tensor = tensors[f"model.layers.{layer}.{name}"]
            lists[each.key].append(float(cast(tensor.read(), tensor.dtype, "float32").item()))
    return dict(lists)


def without_scalars(tensors: Mapping[str, LazyTensor], listed: ListedTensors) -> dict[str, LazyTensor]:
    """Return the tensors that GGUF files do not store in metadata lists."""
    return {name: tensor for name, tensor in tensors.items() if split_layer(name)[1] not in listed}


class LayerScalars(WeightSource):
    """Tensors of a GGUF file, with a tensor for each item of the metadata lists.

    Raises:
        ValueError: a list is missing, has an item of the wrong type, or does not have one item for each layer.
    """

    def __init__(self, source: WeightSource, listed: ListedTensors) -> None:
        self.path, self._source = source.path, source
        file = open_gguf(source.path)
        self._values: dict[str, np.ndarray] = {}
        for name, (key, shape) in listed.items():
            values = file.require_list(key, float)
            if len(values) != num_layers(file):
                raise ValueError(
                    f"{self.path}: {key} has {len(values)} items for {num_layers(file)} layers; the file is damaged"
                )
            for layer, value in enumerate(values):
                self._values[f"model.layers.{layer}.{name}"] = np.full(shape, value, np.float32)

    def names(self) -> list[str]:
        return [*self._source.names(), *self._values]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._values[name].shape if name in self._values else self._source.shape(name)

    def dtype(self, name: str) -> str:
        return "float32" if name in self._values else self._source.dtype(name)

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        if name not in self._values:
            return self._source.read(name, dtype, shard)
        values = cast(self._values[name], "float32", dtype or "float32")
        return values if shard is None else values[shard.index]
