"""Assignment of layers to pipeline stages.

The model is divided into chunks of consecutive layers with balanced costs. The first chunk contains the embedding, and
the last chunk contains the last norm and the lm_head. If the lm_head is tied to the embedding, both chunks hold the
tied weight. Every process keeps the names and shapes of all parameters, but only the values of its stage. A decision
that depends on all parameters is therefore the same on every stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn

from paddlenlp_ext.models.layer_shape import exchanged_tensors
from paddlenlp_ext.paddle_compat import free_storage, has_storage
from paddlenlp_ext.parallel.collectives import complete_gradient, sum_gradients
from paddlenlp_ext.parallel.mesh import ProcessAxis
from paddlenlp_ext.parallel.pipeline.cost_model import FlopEstimate
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.sharding_spec import is_on_stage, placement_of, set_placement

_LAYER = re.compile(r"(?:base_model\.)?model\.layers\.(\d+)\.")
_IN_TIED_HEAD = (  # suffixes of the names of embedding tensors that a tied lm_head also reads
    *("embed_tokens.weight", ".base.weight", ".trainable_tokens_delta", ".indices"),
    *(".lora_embedding_A", ".lora_embedding_B"),
)


@dataclass(frozen=True)
class StagePlan:
    """Assignment of layers to the processes of a pipeline.

    Attributes:
        degree: number of processes.
        bounds: chunk c has the layers bounds[c] to bounds[c + 1] - 1; process c % degree holds chunk c.
        loads: cost of each chunk in multiplications per token (cost_model.py); the last chunk includes the lm_head.
        is_tied: whether the lm_head is tied to the embedding.
    """

    degree: int
    bounds: tuple[int, ...]
    loads: tuple[float, ...]
    is_tied: bool

    @property
    def num_chunks(self) -> int:
        """Number of chunks on all processes together."""
        return len(self.bounds) - 1

    @property
    def last(self) -> int:
        """Index of the process that holds the lm_head."""
        return self.degree - 1

    def holders(self, name: str) -> tuple[int, ...]:
        """Return the processes that hold a parameter or buffer.

        All processes hold the tensors that are not in decoder layers, embedding, last norm or lm_head.
        """
        layer = _LAYER.match(name)
        if layer is not None:
            number = int(layer[1])
            chunk = next(c for c in range(self.num_chunks) if number < self.bounds[c + 1])
            return (chunk % self.degree,)
        if ".embed_tokens." in f".{name}":
            return (0, self.last) if self.is_tied and name.endswith(_IN_TIED_HEAD) else (0,)
        is_last = name.removeprefix("base_model.").startswith(("model.norm.", "lm_head.", "score."))
        return (self.last,) if is_last else tuple(range(self.degree))

    def table(self) -> str:
        """Return one line per process with its layers, and its cost as a multiple of the mean cost."""
        even = sum(self.loads) / self.degree
        lines = []
        for process in range(self.degree):
            own = range(process, self.num_chunks, self.degree)
            layers = ", ".join(f"{self.bounds[chunk]}-{self.bounds[chunk + 1] - 1}" for chunk in own)
            ends = "embedding, " * (process == 0) + f"layers {layers}" + ", norm and head" * (process == self.last)
            cost = sum(self.loads[chunk] for chunk in own) / even
            lines.append(f"stage {process}: {ends} ({cost:.2f} times the mean cost)")
        return "\n".join(lines)


def plan_stages(config: Any, degree: int, chunks_each: int = 1, work: FlopEstimate | None = None) -> StagePlan:
    """Assign the layers of a decoder to stages.

    Args:
        config: `DecoderConfig` of the model.
        degree: number of processes.
        chunks_each: number of chunks per process (`virtual_pp_degree`).
        work: estimate of the cost per token; by default all weights are trained and all tokens are target tokens.

    Raises:
        ValueError: there are fewer layers than chunks, or layers exchange tensors other than hidden states.
    """
    exchanged = exchanged_tensors(config)
    if degree > 1 and exchanged is not None:
        raise ValueError(
            f"pipeline_parallel_degree {degree} is not supported for models with {exchanged}, because "
            "stages exchange only hidden states; set pipeline_parallel_degree to 1"
        )
    work, num_layers, num_chunks = work or FlopEstimate(), config.num_hidden_layers, degree * chunks_each
    if num_chunks > num_layers:
        works = max(1, num_layers // degree)
        remedy = f"a virtual_pp_degree of at most {works}" if num_layers >= degree else f"at most {num_layers} stages"
        raise ValueError(
            f"pipeline_parallel_degree {degree} times virtual_pp_degree {chunks_each} gives {num_chunks} chunks, but "
            f"the model has only {num_layers} layers; choose {remedy}"
        )
    bounds = _even_bounds(num_layers, num_chunks, work.layer_cost(config), work.lm_head_cost(config))
    loads = [(bounds[c + 1] - bounds[c]) * work.layer_cost(config) for c in range(num_chunks)]
    loads[-1] += work.lm_head_cost(config)
    return StagePlan(degree, bounds, tuple(loads), config.tie_word_embeddings)


def assign_stages(model: nn.Layer, plan: StagePlan, own: int) -> None:
    """Record in the `Placement` of each tensor which stages hold it, and free the values that other stages hold.

    Args:
        model: the model.
        plan: assignment of layers to processes.
        own: index of this process in the pipeline.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        stages = plan.holders(name)
        set_placement(tensor, stages=stages, is_on_stage=own in stages)
        if own not in stages and has_storage(tensor):
            free_storage(tensor)
    for name, layer in adapter_layers(model):
        layer.is_on_stage = own in plan.holders(f"{name}.")


def allocate_own_parameters(model: nn.Layer) -> None:
    """Initialize the parameters of this stage in a model that was built without values."""
    for parameter in model.parameters():
        if is_on_stage(parameter) and not has_storage(parameter):
            parameter.initialize()


def is_counted_here(tensor: Any, axis: ProcessAxis) -> bool:
    """Return whether this stage counts a tensor in a sum over stages: True on the first stage that holds the tensor."""
    stages = placement_of(tensor).stages
    return not stages or stages[0] == axis.index


@paddle.no_grad()
def sum_shared_gradients(parameters: Iterable[paddle.Tensor], axis: ProcessAxis) -> None:
    """Sum, in place, the gradients of each parameter that several stages hold (tied weights) over these stages.

    Args:
        parameters: parameters of this stage, in the order of the model.
        axis: mesh axis of the pipeline.
    """
    shared = [parameter for parameter in parameters if len(placement_of(parameter).stages) > 1]
    on_all_stages = [parameter for parameter in shared if len(placement_of(parameter).stages) == axis.size]
    if on_all_stages:
        sum_gradients(on_all_stages, axis.group)
    for parameter in shared:
        if len(placement_of(parameter).stages) < axis.size:
            _sum_at_ends(parameter, axis)


def _sum_at_ends(parameter: paddle.Tensor, axis: ProcessAxis) -> None:
    """Add the gradient of the last stage to the gradient of the first stage, and send the sum to the last stage."""
    first, last = placement_of(parameter).stages
    complete_gradient(parameter)
    summed = parameter.grad
    assert summed is not None
    gradient, group = summed.contiguous(), axis.pairs[last if axis.index == first else first]
    if axis.index == first:
        other = paddle.empty_like(gradient)
        dist.recv(other, src=axis.ranks[last], group=group)
        gradient = gradient + other
        dist.send(gradient, dst=axis.ranks[last], group=group)
    else:
        dist.send(gradient, dst=axis.ranks[first], group=group)
        dist.recv(gradient, src=axis.ranks[first], group=group)
    summed.set_value(gradient)


def _even_bounds(num_layers: int, num_chunks: int, layer_cost: float, head_cost: float) -> tuple[int, ...]:
    """Return the bounds that minimize the cost of the most expensive chunk, found by dynamic programming.

    Among bounds with the same maximum, the function returns the bounds with the smallest sum of squared costs. Every
    chunk has at least one layer.
    """
    # number of assigned layers -> (largest cost, sum of squared costs, bounds)
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0, 0, (0,))}
    for chunk in range(num_chunks):
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for taken, (largest, squares, bounds) in best.items():
            for end in range(taken + 1, num_layers - (num_chunks - chunk - 1) + 1):
                load = (end - taken) * layer_cost + (head_cost if chunk == num_chunks - 1 else 0)
                candidate = (max(largest, load), squares + load**2, (*bounds, end))
                longer[end] = min(longer.get(end, candidate), candidate)
        best = longer
    return best[num_layers][2]
