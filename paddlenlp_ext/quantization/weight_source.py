"""Weight source for models whose layers are stored quantized, or are quantized while they are read."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import paddle

from paddlenlp_ext.checkpoint.dtypes import cast
from paddlenlp_ext.checkpoint.fused import SplitWeights, part_name, part_rows
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.ops.quantized.dequantize import dequantize
from paddlenlp_ext.ops.quantized.weight import QuantizedWeight
from paddlenlp_ext.quantization.options import QuantizationConfig
from paddlenlp_ext.quantization.quantize import BeforeQuantizing, quantize_layer
from paddlenlp_ext.quantization.slicing import slice_weight
from paddlenlp_ext.quantization.storage import is_auxiliary, quantized_layers, read_stored, stored_dtype, stored_shape
from paddlenlp_ext.sharding_spec import Shard


class QuantizedWeights(WeightSource):
    """Packed weights by layer; as a `WeightSource`, the dequantized weights under their ordinary names.

    Args:
        source: the tensors on disk, in full precision or in the layout of quantization/storage.py. Quantized fused
            layers of a `SplitWeights` are split into their parts.
        options: quantization of weights stored in full precision; None leaves them in full precision.
        layers: names of the layers to which `options` apply.
        before: transform of each weight before it is quantized.

    Raises:
        ValueError: `options` for weights that are stored quantized, or a quantized fused layer of another size than its
            parts.
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
        self._parts: dict[str, tuple[str, slice]] = {}
        if isinstance(source, SplitWeights):
            for fused in [layer for layer in self._stored if layer.rpartition(".")[2] in source.layers]:
                self._add_parts(fused, part_rows(fused, source.layers))

    def _add_parts(self, fused: str, rows: Mapping[str, slice]) -> None:
        """Add the parts of a layer that is stored quantized.

        Raises:
            ValueError: the layer has another size than its parts.
        """
        outputs, _ = stored_shape(fused, self._stored[fused], self._source)
        expected = list(rows.values())[-1].stop
        if outputs != expected:
            raise ValueError(
                f"{self.path}: {fused} has {outputs} outputs, but its parts ({', '.join(rows)}) have {expected} by "
                "config.json; download the model again"
            )
        self._parts |= {part_name(fused, part): (fused, own) for part, own in rows.items()}

    def packed(self, layer: str) -> QuantizedWeight | None:
        """Return the quantized weight of a layer; None if the layer stays in full precision.

        Raises:
            ValueError: the layer is part of a fused layer, and shares small blocks of scales with another part.
        """
        if layer in self._stored:
            return read_stored(layer, self._stored[layer], self._source)
        if layer in self._parts:
            fused, rows = self._parts[layer]
            weight = read_stored(fused, self._stored[fused], self._source)
            try:
                return slice_weight(weight, Shard(0, rows.start, rows.stop, weight.shape[0]))
            except ValueError as error:
                raise ValueError(
                    f"{self.path}: {fused} is stored quantized and cannot be split into its parts ({error}); start "
                    "from the original model, or dequantize this one (llm/merge_lora_params.py --model_name_or_path "
                    "MODEL --output_path COPY)"
                ) from error
        if layer not in self._options:
            return None
        weight = paddle.to_tensor(self._source.read(f"{layer}.weight", "float32"))
        return quantize_layer(layer, weight, self._options[layer], self._before)

    # -- as a WeightSource --------------------------------------------------------------------------------------------
    def names(self) -> list[str]:
        names = [name for name in self._source.names() if not (self._stored and is_auxiliary(name))]
        fused = {fused for fused, _ in self._parts.values()}
        return [name for name in names if name.removesuffix(".weight") not in fused] + [
            f"{part}.weight" for part in self._parts
        ]

    def shape(self, name: str) -> tuple[int, ...]:
        if name.removesuffix(".weight") in self._parts:
            fused, rows = self._parts[name.removesuffix(".weight")]
            return rows.stop - rows.start, stored_shape(fused, self._stored[fused], self._source)[1]
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
        layer, _ = self._parts.get(layer, (layer, None))
        return layer if name.endswith(".weight") and layer in self._stored else None
