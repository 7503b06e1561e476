"""Interface for converting between tensors in files and model parameters that have different names or shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from paddlenlp_ext.checkpoint.weight_source import WeightSource

Tensor = TypeVar("Tensor", bound=Any)


class FileLayout:
    """Layout of a model's files; in the base class, tensors in files and parameters have the same names and shapes.

    Attributes:
        renames_adapters: whether adapter layers have different names in files and in memory.
    """

    renames_adapters: bool = False

    def open(self, source: WeightSource) -> WeightSource:
        """Return the stored tensors with the names and shapes of the parameters."""
        return source

    def to_files(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters with the names and shapes of the files; tensors are converted when they are written."""
        return dict(tensors)

    def to_transformers(self, name: str, values: Tensor) -> Tensor:
        """Convert a parameter or an adapter tensor to the shape and row order of transformers.

        Hugging Face PEFT adapters have the tensor shapes of transformers, which stacks experts in memory.

        Args:
            name: name of the tensor in memory.
            values: NumPy array or Paddle tensor.
        """
        return values

    def from_transformers(self, name: str, values: Tensor) -> Tensor:
        """Convert a tensor from the shape and row order of transformers; the inverse of `to_transformers`."""
        return values

    def locate(self, name: str) -> ExpertPlace | None:
        """Return the in-memory location of a single expert's stored tensor; return None for other tensors."""
        return None

    def name_in_memory(self, name: str) -> str:
        """Return the in-memory name of a stored tensor that does not belong to a single expert."""
        return name

    def name_in_adapters(self, name: str) -> str:
        """Return the name of a tensor in adapter files, given the name in memory."""
        return name

    def name_from_adapters(self, name: str) -> str:
        """Return the name of a tensor in memory, given the name in adapter files."""
        return name

    def target_in_adapters(self, target: str) -> str:
        """Return an entry of `target_modules` for adapter files, given the entry in memory."""
        return target

    def target_from_adapters(self, target: str) -> str:
        """Return an entry of `target_modules` in memory, given the entry in adapter files."""
        return target


class ExpertPlace(NamedTuple):
    """In-memory location of a single expert's stored tensor."""

    stack: str
    """Name of the parameter that stacks the tensors of all experts."""
    expert: int
    """Index of the expert."""
    projection: int
    """Index of the projection within the slice of the expert, such as 0 for gate_proj and 1 for up_proj."""
    num_projections: int
    """Number of projections in the slice of an expert; all projections have the same number of rows."""
    suffix: str = ""
    """Name suffix of the scales or code table of a quantized projection, such as ".absmax"; empty for a weight."""


def matrix_name(stack: str, expert: int, projection: int) -> str:
    """Return the in-memory name of the layer that holds one quantized projection of one expert.

    Args:
        stack: name of the layer that stacks all experts.
        expert: index of the expert.
        projection: index of the projection within the slice of the expert.
    """
    return f"{stack}.{expert}.{projection}"


def locate_matrix(layer: str) -> tuple[str, int, int] | None:
    """Split a name from `matrix_name` into stack, expert and projection; return None for other names."""
    found = re.fullmatch(r"(.+\.experts\..+)\.(\d+)\.(\d+)", layer)
    return (found[1], int(found[2]), int(found[3])) if found else None


def split_layer(name: str) -> tuple[str, str]:
    """Split a name into "model.layers.N." and the rest; outside the layers, the first string is empty."""
    found = re.match(r"model\.layers\.\d+\.", name)
    return (found[0], name[found.end() :]) if found else ("", name)
