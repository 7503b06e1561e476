"""GGUF layout of decoders with Mamba-2 layers and attention layers.

in a GGUF file              in the checkpoint
ssm_a [N, 1]                A_log [N]; the file stores -exp(A_log)
ssm_d [N, 1]                D [N]
ssm_norm [G, F / G]         norm [F]
ssm_conv1d [C, L]           conv1d [C, 1, L]

Shapes: N heads, G groups, F channels of all heads, C channels of the convolution, L taps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.gguf.architecture import Architecture, Key, count, kv_heads_by_layer
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.safetensors import LazyTensor
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import Shard

MAMBA = "Mamba-2"
"""Kind of the token mixer (`MixerShape.kind`)."""
_IN_BLOCK = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_KEYS = {
    "mamba_d_conv": Key("ssm.conv_kernel"),
    "mamba_d_state": Key("ssm.state_size"),
    "mamba_n_groups": Key("ssm.group_count"),
    "mamba_n_heads": Key("ssm.time_step_rank"),
}
_COLUMNS = ("mamba.A_log", "mamba.D")
_FLAT = (*_COLUMNS, "mamba.norm.weight")
"""Name suffixes of the vectors that files store with two axes."""


def with_mamba(
    attention: Architecture,
    name: str,
    keys: Mapping[str, Key] = _KEYS,
    settings: Callable[[GgufFile], dict[str, Any]] | None = None,
    smallest_step: float = 0.0,
) -> Architecture:
    """Return the layout of a family's models with Mamba-2 layers, given the layout of the other layers.

    Args:
        attention: the layout of models without Mamba-2 layers.
        name: `general.architecture` of models with Mamba-2 layers.
        keys: keys of config.json with the sizes of Mamba-2 -> metadata keys; default: the keys of models/mamba_config.
        settings: function that derives the other keys of Mamba-2 in config.json; None: the keys of models/mamba_config.
        smallest_step: smallest step size of the models.
    """

    def split(tensors: Mapping[str, LazyTensor], config: Any) -> dict[str, LazyTensor]:
        shared = tensors if attention.split is None else attention.split(tensors, config)
        return _with_two_axes(shared, _mamba_shape(config).num_groups)

    return dataclasses.replace(
        attention,
        name=name,
        in_block={**attention.in_block, **_IN_BLOCK},
        keys={**attention.keys, **keys},
        settings=lambda file: {**attention.settings(file), **(settings or _settings)(file)},
        reads=lambda file: True,
        writes=lambda config: bool(config.other_mixers) and attention.writes(config),
        logarithms=(".A_log",),
        has_layers_without_attention=True,
        squeezed={"mamba.conv1d.weight": 1},
        restore=lambda source: attention.restore(_FlatTensors(source)),
        split=split,
        metadata=lambda config: {**attention.metadata(config), **_metadata(config, smallest_step)},
        variants=(),
    )


def head_channels(file: GgufFile) -> int:
    """Return the number of channels of a head.

    Raises:
        ValueError: the channels of all heads are not a multiple of the number of heads.
    """
    inner, heads = count(file, "ssm.inner_size"), count(file, "ssm.time_step_rank")
    if inner % heads:
        raise ValueError(
            f"{file.path}: {file.architecture_key('ssm.inner_size')} {inner} is not a multiple of the {heads} heads; "
            "the file is damaged"
        )
    return inner // heads


def _settings(file: GgufFile) -> dict[str, Any]:
    """Return the keys of config.json that depend on several metadata keys.

    Raises:
        ValueError: the number of channels of all heads is not a multiple of the hidden size and of the number of heads.
    """
    inner, hidden = count(file, "ssm.inner_size"), count(file, "embedding_length")
    if inner % hidden:
        raise ValueError(
            f"{file.path}: {file.architecture_key('ssm.inner_size')} {inner} is not a multiple of the hidden size "
            f"{hidden}; the file is damaged"
        )
    types = ["attention" if heads else "mamba" for heads in kv_heads_by_layer(file)]
    return {
        "layer_types": types,
        "mamba_d_head": head_channels(file),
        "mamba_expand": inner // hidden,
    }


def _mamba_shape(config: Any) -> Any:
    """Return the sizes of the Mamba-2 layers.

    Raises:
        ValueError: the model has no Mamba-2 layers.
    """
    shapes = [mixer for mixer in config.other_mixers if mixer.kind == MAMBA]
    if not shapes:
        raise ValueError(f"a GGUF file of {config.model_type} cannot express a model without {MAMBA} layers")
    return shapes[0]


def _metadata(config: Any, smallest_step: float) -> dict[str, Any]:
    """Return the metadata that has no counterpart among the keys of config.json.

    Raises:
        ValueError: llama.cpp does not support an option of the layers.
    """
    shape = _mamba_shape(config)
    if shape.bias or not shape.conv_bias or shape.step_limits != (smallest_step, math.inf):
        raise ValueError(
            "a GGUF file cannot express biases of the linear layers of Mamba-2 (mamba_proj_bias, use_bias), "
            "convolutions without a bias (mamba_conv_bias, use_conv_bias), and limits of the step size "
            f"(time_step_limit, time_step_min) other than [{smallest_step}, inf]"
        )
    return {"ssm.inner_size": shape.inner_size}


def _with_two_axes(tensors: Mapping[str, LazyTensor], num_groups: int) -> dict[str, LazyTensor]:
    """Return the tensors with the shapes of files; the inverse of `_FlatTensors`."""
    result = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(_FLAT):
            rows = tensor.shape[0] if name.endswith(_COLUMNS) else num_groups
            shape = (rows, tensor.shape[0] // rows)
            result[name] = LazyTensor(shape, tensor.dtype, partial(_reshaped, tensor, shape))
    return result


def _reshaped(tensor: LazyTensor, shape: tuple[int, ...]) -> np.ndarray:
    return tensor.read().reshape(shape)


class _FlatTensors(WeightSource):
    """Tensors of a GGUF file, with the vectors of the checkpoint flattened to one axis."""

    def __init__(self, source: WeightSource) -> None:
        self.path, self._source = source.path, source

    def names(self) -> list[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._source.shape(name)
        return (math.prod(shape),) if name.endswith(_FLAT) else shape

    def dtype(self, name: str) -> str:
        return self._source.dtype(name)

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        if not name.endswith(_FLAT):
            return self._source.read(name, dtype, shard)
        values = self._source.read(name, dtype).reshape(-1)
        return values if shard is None else values[shard.index]
