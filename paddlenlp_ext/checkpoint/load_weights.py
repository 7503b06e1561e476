"""Load stored tensors into the parameters of a layer, one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import numpy as np
import paddle

from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import full_shape, is_materialized, shard_of

_NOT_WEIGHTS = re.compile(r"\.rotary_emb\.inv_freq$")  # a buffer that older versions of transformers saved
_MOST_NAMED = 10
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}


def load_weights(layer: paddle.nn.Layer, source: WeightSource, ignored: Collection[str] = ()) -> None:
    """Load every parameter of `layer` from the stored tensor with the parameter's name.

    Each tensor is converted to the dtype of its parameter. At most one stored tensor is in memory at a time. For a
    sharded parameter, only the local shard is read. A model with tied embeddings accepts a stored lm_head that equals
    the embedding.

    Args:
        layer: layer whose parameters have the names and shapes of the stored tensors.
        source: the stored tensors.
        ignored: names of stored tensors that other processes load.

    Raises:
        ValueError: see `check_tensors`; no parameter is changed.
    """
    load_parameters(dict(layer.named_parameters()), source, ignored)


def load_parameters(
    parameters: Mapping[str, paddle.Tensor], source: WeightSource, ignored: Collection[str] = ()
) -> None:
    """Check and load parameters (name in files -> parameter); see `load_weights`."""
    check_tensors({name: full_shape(parameter) for name, parameter in parameters.items()}, source, ignored)
    read_into_parameters(parameters, source)


def read_into_parameters(parameters: Mapping[str, paddle.Tensor], source: WeightSource) -> None:
    """Load parameters (name in files -> parameter) without checking names and shapes."""
    for name, parameter in parameters.items():
        if not is_materialized(parameter):
            continue
        dtype = str(parameter.dtype).removeprefix("paddle.")
        parameter.set_value(source.read(name, dtype, shard_of(parameter)))


def check_tensors(expected: Mapping[str, tuple[int, ...]], source: WeightSource, ignored: Collection[str] = ()) -> None:
    """Check that the stored tensors have the expected names and shapes.

    Raises:
        ValueError: tensors are missing, unexpected or of the wrong shape, or an lm_head differs from the embedding that
            it is tied to. The message lists up to 10 tensors of each kind.
    """
    stored = [name for name in source.names() if not _NOT_WEIGHTS.search(name) and name not in ignored]
    missing = [name for name in expected if name not in set(stored)]
    unexpected = [name for name in stored if name not in expected and _TIED.get(name) not in expected]
    misshapen = [
        f"{name} (stored {list(source.shape(name))}, expected {list(expected[name])})"
        for name in stored
        if name in expected and source.shape(name) != tuple(expected[name])
    ]
    groups = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
    problems = [f"{len(names)} {kind}: {_shorten(names)}" for kind, names in groups.items() if names]
    problems += _untied(expected, stored, source)
    if problems:
        raise ValueError(f"{source.path}: the stored tensors do not match the model\n  " + "\n  ".join(problems))


def _shorten(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _untied(expected: Mapping, stored: list[str], source: WeightSource) -> list[str]:
    """Describe each stored lm_head that differs from the embedding although the model ties lm_head and embedding."""
    problems = []
    for name, other in _TIED.items():
        if name in stored and name not in expected and other in stored:
            same = source.shape(name) == source.shape(other)
            if not same or not np.array_equal(source.read(name, "float32"), source.read(other, "float32")):
                problems.append(
                    f"the values of {name} and {other} differ, although config.json ties the two tensors; "
                    'set "tie_word_embeddings": false in config.json'
                )
    return problems
