"""Weight source for models whose layers are stored quantized, or are quantized while they are read."""

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
    """Packed weights by layer; as a `WeightSource`, the dequantized weights under their ordinary names.

    Args:
        source: the tensors on disk, in full precision or in the layout of quantization/storage.py.
        options: quantization of weights stored in full precision; None leaves them in full precision.
        layers: names of the layers to which `options` apply.
        before: transform of each weight before it is quantized.

    Raises:
        ValueError: `options` for weights that are stored quantized.
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
                f"{source.path}: the weights are already quantized; remove weight_quantize_algo, or start from "
                "the original model"
            )
        self._options = {} if options is None else options.for_layers(layers)

    def packed(self, layer: str) -> QuantizedWeight | None:
        """Return the quantized weight of a layer; None if the layer stays in full precision."""
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

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        packed = self.packed(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if packed is None:
            return self._source.read(name, dtype, shard)
        full = cast(dequantize(packed).numpy(), "float32", dtype or self.dtype(name))
        return full if shard is None else full[shard.index]

    def _stored_layer(self, name: str) -> str | None:
        layer = name.removesuffix(".weight")
        return layer if layer != name and layer in self._stored else None
