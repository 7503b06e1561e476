"""Weight source for weights that are stored quantized, or are quantized when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import numpy as np
import paddle

from paddlenlp_ext.checkpoint.dtypes import cast
from paddlenlp_ext.checkpoint.file_layouts.base import locate_matrix, matrix_name
from paddlenlp_ext.checkpoint.file_layouts.fused_projections import SplitWeights, projection_name, projection_rows
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.ops.dequantize import dequantize, dequantize_stack
from paddlenlp_ext.ops.quantized_weight import QuantizedStack, QuantizedWeight, stack_weights
from paddlenlp_ext.quantization.checkpoint_tensors import (
    is_auxiliary,
    read_stored,
    stored_dtype,
    stored_layers,
    stored_shape,
)
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_weight import BeforeQuantizing, quantize_layer
from paddlenlp_ext.quantization.quantized_grouped_linear import quantize_stack
from paddlenlp_ext.quantization.shard_weight import slice_weight
from paddlenlp_ext.sharding_spec import Shard


class QuantizedWeights(WeightSource):
    """Weight source that returns packed weights (`packed`) and dequantized weights (the methods of `WeightSource`).

    Args:
        source: the tensors on disk, in full precision or in the layout of checkpoint_tensors.py. If `source` is a
            `SplitWeights`, its quantized fused layers are split into the projections.
        options: quantization for weights stored in full precision; None: no quantization.
        layers: layer name -> number of matrices, for the layers to which `options` apply (`matrices_by_layer` in
            quantize_model.py).
        before: function that is applied to each weight, except expert weights, before quantization.

    Raises:
        ValueError: the weights are stored quantized and `options` is not None, or the size of a quantized fused layer
            is not the sum of its projections' sizes.
    """

    def __init__(
        self,
        source: WeightSource,
        options: QuantizationConfig | None = None,
        layers: Mapping[str, int] = MappingProxyType({}),
        before: BeforeQuantizing | None = None,
    ) -> None:
        self.path, self._source, self._before = source.path, source, before
        self._stored = stored_layers(source)
        if self._stored and options is not None:
            raise ValueError(
                f"{source.path}: the weights are already quantized; remove weight_quantize_algo, or start from "
                "the original model"
            )
        self._options = {} if options is None else options.for_layers(layers)
        self._matrices = layers
        # For each expert layer, the number of experts and the number of matrices per expert.
        self._stacks: dict[str, tuple[int, int]] = {}
        for stack, expert, part in filter(None, map(locate_matrix, self._stored)):
            experts, parts = self._stacks.get(stack, (0, 0))
            self._stacks[stack] = max(experts, expert + 1), max(parts, part + 1)
        self._parts: dict[str, tuple[str, slice]] = {}
        if isinstance(source, SplitWeights):
            for fused in [layer for layer in self._stored if layer.rpartition(".")[2] in source.layers]:
                self._add_parts(fused, projection_rows(fused, source.layers))

    def _add_parts(self, fused: str, rows: Mapping[str, slice]) -> None:
        """Add the projections of a fused layer that is stored quantized."""
        outputs, _ = stored_shape(fused, self._stored[fused], self._source)
        expected = list(rows.values())[-1].stop
        if outputs != expected:
            raise ValueError(
                f"{self.path}: {fused} has {outputs} outputs, but according to config.json its projections "
                f"({', '.join(rows)}) have {expected} outputs; download the model again"
            )
        self._parts |= {projection_name(fused, part): (fused, own) for part, own in rows.items()}

    def packed(self, layer: str) -> QuantizedWeight | QuantizedStack | None:
        """Return the quantized weight of a linear or expert layer; None if the layer stays in full precision.

        Raises:
            ValueError: a fused layer cannot be split into projections (`slice_weight`), the matrices of experts differ
                in number or format, or a weight cannot be quantized (`quantize`).
        """
        if layer in self._stacks:
            return self._read_stack(layer)
        if layer in self._stored:
            return read_stored(layer, self._stored[layer], self._source)
        if layer in self._parts:
            fused, rows = self._parts[layer]
            weight = read_stored(fused, self._stored[fused], self._source)
            try:
                return slice_weight(weight, Shard(0, rows.start, rows.stop, weight.shape[0]))
            except ValueError as error:
                raise ValueError(
                    f"{self.path}: {fused} is stored quantized and cannot be split into projections ({error}); start "
                    "from the original model, or from a dequantized copy of this model (pnx merge --model_name_or_path "
                    "MODEL --output_path COPY)"
                ) from error
        if layer not in self._options:
            return None
        name, chosen = f"{layer}.weight", self._options[layer]
        if len(shape := self._source.shape(name)) == 3:
            read = partial(self._read_expert, name, shape[0])
            return quantize_stack(layer, read, shape[0], self._matrices[layer], chosen)
        return quantize_layer(layer, paddle.to_tensor(self._source.read(name, "float32")), chosen, self._before)

    def _read_expert(self, name: str, num_experts: int, expert: int) -> paddle.Tensor:
        shard = Shard(0, expert, expert + 1, num_experts)
        return paddle.to_tensor(self._source.read(name, "float32", shard)[0])

    def _read_stack(self, layer: str) -> QuantizedStack:
        """Return the stored matrices of an expert layer."""
        experts, parts = self._stacks[layer]
        names = [[matrix_name(layer, expert, part) for part in range(parts)] for expert in range(experts)]
        algo = self._stored[names[0][0]]
        stored = [[read_stored(name, algo, self._source) for name in row] for row in names]
        formats = {(each.shape, each.block_size, each.group_size) for row in stored for each in row}
        if len(formats) > 1 or parts != self._matrices.get(layer, parts):
            raise ValueError(
                f"{self.path}: the experts of {layer} do not have the expected number of quantized matrices, or the "
                "matrices differ in shape or format; start from the original model"
            )
        return stack_weights(stored)

    def names(self) -> list[str]:
        names = [name for name in self._source.names() if not (self._stored and is_auxiliary(name))]
        replaced = {fused for fused, _ in self._parts.values()}
        replaced.update(layer for layer in self._stored if self._is_matrix(layer))
        return [name for name in names if name.removesuffix(".weight") not in replaced] + [
            f"{layer}.weight" for layer in (*self._parts, *self._stacks)
        ]

    def shape(self, name: str) -> tuple[int, ...]:
        if name.removesuffix(".weight") in self._parts:
            fused, rows = self._parts[name.removesuffix(".weight")]
            return rows.stop - rows.start, stored_shape(fused, self._stored[fused], self._source)[1]
        layer = self._stored_layer(name)
        shape = stored_shape(layer, self._stored[layer], self._source) if layer else self._source.shape(name)
        if name.removesuffix(".weight") in self._stacks:
            experts, parts = self._stacks[name.removesuffix(".weight")]
            return experts, parts * shape[0], shape[1]
        return shape

    def dtype(self, name: str) -> str:
        layer = self._stored_layer(name)
        return stored_dtype(layer, self._stored[layer], self._source) if layer else self._source.dtype(name)

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        packed = self.packed(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if packed is None:
            return self._source.read(name, dtype, shard)
        value = dequantize_stack(packed) if isinstance(packed, QuantizedStack) else dequantize(packed)
        full = cast(value.numpy(), "float32", dtype or self.dtype(name))
        return full if shard is None else full[shard.index]

    def _is_matrix(self, layer: str) -> bool:
        found = locate_matrix(layer)
        return found is not None and found[0] in self._stacks

    def _stored_layer(self, name: str) -> str | None:
        """Return the stored layer of a quantized weight (for experts, the first matrix); None for other weights."""
        layer = name.removesuffix(".weight")
        layer, _ = self._parts.get(layer, (layer, None))
        layer = matrix_name(layer, 0, 0) if layer in self._stacks else layer
        return layer if name.endswith(".weight") and layer in self._stored else None
