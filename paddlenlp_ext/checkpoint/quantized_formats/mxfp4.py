"""Dequantize the MXFP4 weights of gpt-oss while reading them.

    in files                                              as read
    down_proj_blocks [E, O, I / 32, 16], uint8            down_proj [E, I, O]
    down_proj_scales [E, O, I / 32], uint8

A block holds the weights for 32 inputs of one output. Each byte has two 4-bit codes, the first code in the low bits. A
stored scale s stands for the factor 2^(s - 127) (Open Compute Project, Microscaling Formats 1.0). Models are saved with
unquantized weights.

Shapes: E experts, O outputs, I inputs.
"""

from __future__ import annotations

import numpy as np

from paddlenlp_ext.checkpoint.dtypes import cast
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import Shard

MXFP4_METHOD = "mxfp4"
"""Value of `quant_method` in config.json for MXFP4 weights."""
_BLOCKS, _SCALES = "_blocks", "_scales"
_LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""Values of the 4-bit codes, which consist of a sign bit, two exponent bits and one mantissa bit."""


def open_mxfp4(source: WeightSource) -> WeightSource:
    """Return the stored tensors with MXFP4 weights dequantized; return `source` if it has no MXFP4 weights."""
    packed = [name.removesuffix(_BLOCKS) for name in source.names() if name.endswith(_BLOCKS)]
    return _MXFP4Weights(source, packed) if packed else source


class _MXFP4Weights(WeightSource):
    def __init__(self, source: WeightSource, packed: list[str]) -> None:
        self.path, self._source, self._packed = source.path, source, frozenset(packed)

    def names(self) -> list[str]:
        names = (name.removesuffix(_BLOCKS).removesuffix(_SCALES) for name in self._source.names())
        return list(dict.fromkeys(names))

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._packed:
            return self._source.shape(name)
        experts, outputs, blocks, width = self._source.shape(name + _BLOCKS)
        return experts, 2 * blocks * width, outputs

    def dtype(self, name: str) -> str:
        return "bfloat16" if name in self._packed else self._source.dtype(name)

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        if name not in self._packed:
            return self._source.read(name, dtype, shard)
        assert shard is None or shard.axis == 0, "stacked experts must be sharded by experts"
        blocks, scales = (self._source.read(name + suffix, None, shard) for suffix in (_BLOCKS, _SCALES))
        experts = [cast(_dequantized(*one), "float32", dtype or "bfloat16") for one in zip(blocks, scales, strict=True)]
        return np.stack(experts).swapaxes(1, 2)


def _dequantized(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the weight, float32 [O, I], for blocks [O, I / 32, 16] and scales [O, I / 32]."""
    codes = np.stack([blocks & 0x0F, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], -1)
    return np.ldexp(_LEVELS[codes], scales.astype(np.int32)[..., None] - 127).reshape(len(blocks), -1)
