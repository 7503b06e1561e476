"""Interface of the differences between a model's tensors in files and its parameters in memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from paddlenlp_ext.checkpoint.weight_source import WeightSource

Tensor = TypeVar("Tensor", bound=Any)


class FileLayout:
    """Layout of a model's files. The base class is for files whose tensors equal the parameters in name and shape."""

    def open(self, source: WeightSource) -> WeightSource:
        """Return the stored tensors under the names and in the shapes of the parameters."""
        return source

    def to_files(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return a model's tensors in the layout they are saved in; each is converted when it is written."""
        return dict(tensors)

    def to_transformers(self, name: str, values: Tensor) -> Tensor:
        """Convert a parameter, or an adapter's tensor for it, to the shape and row order of transformers.

        Hugging Face PEFT adapters follow transformers, which stacks experts in memory as this package does.

        Args:
            name: name in memory.
            values: NumPy array or Paddle tensor.
        """
        return values

    def from_transformers(self, name: str, values: Tensor) -> Tensor:
        """Convert a tensor from the shape and row order of transformers; the inverse of `to_transformers`."""
        return values

    def locate(self, name: str) -> ExpertPart | None:
        """Return where a stored tensor of a single expert belongs in memory; None for other tensors."""
        return None

    def name_in_memory(self, name: str) -> str:
        """Return the name in memory of a stored tensor that does not belong to a single expert."""
        return name


class ExpertPart(NamedTuple):
    """Place in memory of a stored tensor of a single expert."""

    stack: str
    """Name of the parameter that stacks the tensors of all experts."""
    expert: int
    """Index of the expert."""
    part: int
    """Index of the projection within the expert's slice, such as 0 for gate_proj and 1 for up_proj."""
    num_parts: int
    """Number of projections in an expert's slice; all have the same number of rows."""
    rest: str = ""
    """Name suffix of a quantized projection's scales or code table, such as ".absmax"; empty for a weight."""


def matrix_name(stack: str, expert: int, part: int) -> str:
    """Return the name in memory of one quantized projection of an expert, which is stored like a linear layer.

    Args:
        stack: name of the layer that stacks all experts.
        expert: index of the expert.
        part: index of the projection within the expert's slice.
    """
    return f"{stack}.{expert}.{part}"


def locate_matrix(layer: str) -> tuple[str, int, int] | None:
    """Split a name made by `matrix_name` into stack, expert and part; return None for other names."""
    found = re.fullmatch(r"(.+\.experts\..+)\.(\d+)\.(\d+)", layer)
    return (found[1], int(found[2]), int(found[3])) if found else None


def split_layer(name: str) -> tuple[str, str]:
    """Split a name after "model.layers.N."; the first part is empty for tensors outside the layers."""
    found = re.match(r"model\.layers\.\d+\.", name)
    return (found[0], name[found.end() :]) if found else ("", name)
