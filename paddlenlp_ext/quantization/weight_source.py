"""The weights of a model of which some layers are stored in few bits, or become so as they are read."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import paddle

from paddlenlp_ext.checkpoint.dtypes import cast
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.ops.quantized.dequantize import dequantize
from paddlenlp_ext.ops.quantized.weight import QuantizedWeight
from paddlenlp_ext.quantization.options import QuantizationConfig
from paddlenlp_ext.quantization.quantize import BeforeQuantizing, quantize_layer
from paddlenlp_ext.quantization.storage import is_auxiliary, quantized_layers, read_stored, stored_dtype, stored_shape
from paddlenlp_ext.sharding_spec import Shard


class QuantizedWeights(WeightSource):
    """Packed weights by layer; and as a `WeightSource` the plain numbers that they stand for, by the plain names.

    Args:
        source: the tensors on disk, in plain numbers or as quantization/storage.py lays them out.
        options: how those are quantized that lie there in plain numbers; None leaves them.
        layers: names of the layers that `options` is for.
        before: what to make of each weight before it is quantized.

    Raises:
        ValueError: `options` for weights that are quantized already.
    """

    def __init__(
        self,
        source: WeightSource,
        options: QuantizationConfig | None = None,
        layers: Collection[str] = (),
        before: BeforeQuantizing | None = None,
    ) -> None:
        self.path, self._source, self._before = source.path, source, before
        self._stored = quantized_layers(source)
        if self._stored and options is not None:
            raise ValueError(
                f"{source.path}: its weights are quantized already; leave weight_quantize_algo out, or start from "
                "the original model."
            )
        self._options = {} if options is None else options.for_layers(layers)

    def packed(self, layer: str) -> QuantizedWeight | None:
        """The quantized weight of a layer, None where it stays in plain numbers."""
        if layer in self._stored:
            return read_stored(layer, self._stored[layer], self._source)
        if layer not in self._options:
            return None
        weight = paddle.to_tensor(self._source.read(f"{layer}.weight", "float32"))
        return quantize_layer(layer, weight, self._options[layer], self._before)

    # -- as a WeightSource --------------------------------------------------------------------------------------------
    def names(self) -> list[str]:
        return [name for name in self._source.names() if not (self._stored and is_auxiliary(name))]

    def shape(self, name: str) -> tuple[int, ...]:
        layer = self._stored_layer(name)
        return stored_shape(layer, self._stored[layer], self._source) if layer else self._source.shape(name)

    def dtype(self, name: str) -> str:
        layer = self._stored_layer(name)
        return stored_dtype(layer, self._stored[layer], self._source) if layer else self._source.dtype(name)

    def read(self, name: str, dtype: str | None = None, cut: Shard | None = None) -> np.ndarray:
        packed = self.packed(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if packed is None:
            return self._source.read(name, dtype, cut)
        whole = cast(dequantize(packed).numpy(), "float32", dtype or self.dtype(name))
        return whole if cut is None else whole[cut.index]

    def _stored_layer(self, name: str) -> str | None:
        layer = name.removesuffix(".weight")
        return layer if layer != name and layer in self._stored else None
