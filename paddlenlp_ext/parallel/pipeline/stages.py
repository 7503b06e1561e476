"""Which layers each process of a pipeline has, and marks at the parameters that say so.

The embedding is the first chunk's, the last norm and the head are the last one's; where head and embedding are tied
both have them. Chunks of neighbouring layers cost as evenly as they can, the head counted. Processes keep the shapes of
what others hold, without values: names, and all that is decided over the whole model, are the same everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn

from paddlenlp_ext.paddle_compat import free_storage, has_storage
from paddlenlp_ext.parallel.collectives import sum_gradients
from paddlenlp_ext.parallel.mesh import ProcessAxis
from paddlenlp_ext.parallel.pipeline.cost_model import FlopEstimate
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.sharding_spec import is_on_stage, placement_of, set_placement

_LAYER = re.compile(r"(?:base_model\.)?model\.layers\.(\d+)\.")
_Cut = tuple[float, float, tuple[int, ...]]  # the costliest chunk's cost, the sum of their squares, bounds


@dataclass(frozen=True)
class StagePlan:
    """How the layers are shared out.

    Attributes:
        degree: processes of the pipeline.
        bounds: chunk c has the layers from bounds[c] to bounds[c + 1]; it is process c % degree's.
        loads: what each chunk costs, as multiplications a token (work.py); the head's with the last one.
        is_tied: whether the head is the embedding.
    """

    degree: int
    bounds: tuple[int, ...]
    loads: tuple[float, ...]
    is_tied: bool

    @property
    def num_chunks(self) -> int:
        """Of all processes together."""
        return len(self.bounds) - 1

    @property
    def last(self) -> int:
        """The process that has the head."""
        return self.degree - 1

    def holders(self, name: str) -> tuple[int, ...]:
        """The processes that hold a parameter of that name; all of them where it is no layer's and at neither end."""
        layer = _LAYER.match(name)
        if layer is not None:
            number = int(layer[1])
            chunk = next(c for c in range(self.num_chunks) if number < self.bounds[c + 1])
            return (chunk % self.degree,)
        if ".embed_tokens." in f".{name}":
            return (0, self.last) if self.is_tied and name.endswith(".weight") else (0,)
        plain = name.removeprefix("base_model.")
        return (self.last,) if plain.startswith(("model.norm.", "lm_head.")) else tuple(range(self.degree))

    def table(self) -> str:
        """A line for each process: its layers, and its share of the work beside an even one."""
        even = sum(self.loads) / self.degree
        lines = []
        for process in range(self.degree):
            own = range(process, self.num_chunks, self.degree)
            layers = ", ".join(f"{self.bounds[chunk]}-{self.bounds[chunk + 1] - 1}" for chunk in own)
            ends = "embedding, " * (process == 0) + f"layers {layers}" + ", norm and head" * (process == self.last)
            lines.append(f"stage {process}: {ends} ({sum(self.loads[chunk] for chunk in own) / even:.2f} of even)")
        return "\n".join(lines)


def plan_stages(config: Any, degree: int, chunks_each: int = 1, work: FlopEstimate | None = None) -> StagePlan:
    """Share a decoder's layers out; needs no weights.

    Args:
        config: the `DecoderConfig`.
        degree: processes of the pipeline.
        chunks_each: chunks of layers a process has (`virtual_pp_degree`).
        work: what the run does with a token; by default all weights train and all tokens are learned.

    Raises:
        ValueError: there are fewer layers than chunks; names what would work.
    """
    work, num_layers, num_chunks = work or FlopEstimate(), config.num_hidden_layers, degree * chunks_each
    if num_chunks > num_layers:
        works = max(1, num_layers // degree)
        remedy = f"virtual_pp_degree of at most {works}" if num_layers >= degree else f"at most {num_layers} stages"
        raise ValueError(
            f"pipeline_parallel_degree {degree} times virtual_pp_degree {chunks_each} are {num_chunks} chunks, and the "
            f"model has {num_layers} layers; choose {remedy}"
        )
    bounds = _even_bounds(num_layers, num_chunks, work.layer_cost(config), work.lm_head_cost(config))
    loads = [(bounds[c + 1] - bounds[c]) * work.layer_cost(config) for c in range(num_chunks)]
    loads[-1] += work.lm_head_cost(config)
    return StagePlan(degree, bounds, tuple(loads), config.tie_word_embeddings)


def assign_stages(model: nn.Layer, plan: StagePlan, own: int) -> None:
    """Say at each tensor which processes hold it, and give up the values of those that process `own` does not hold.

    `Placement.stages` are the holders, `Placement.is_on_stage` says that this process is one of them.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        stages = plan.holders(name)
        set_placement(tensor, stages=stages, is_on_stage=own in stages)
        if own not in stages and has_storage(tensor):
            free_storage(tensor)
    for name, layer in adapter_layers(model):
        layer.is_materialized = own in plan.holders(f"{name}.")


def allocate_own_parameters(model: nn.Layer) -> None:
    """Give the parameters of a skeleton that belong here their values' memory."""
    for parameter in model.parameters():
        if is_on_stage(parameter) and not has_storage(parameter):
            parameter.initialize()


def is_counted_here(tensor: Any, axis: ProcessAxis) -> bool:
    """Whether this process is the one, of those that hold a tensor, that counts it."""
    stages = placement_of(tensor).stages
    return not stages or stages[0] == axis.index


@paddle.no_grad()
def sum_shared_gradients(parameters: Iterable[paddle.Tensor], axis: ProcessAxis) -> None:
    """Gradients of parameters that several stages hold, summed over these, in place.

    Args:
        parameters: this stage's, in the model's order.
        axis: the pipeline's processes.
    """
    shared = [parameter for parameter in parameters if len(placement_of(parameter).stages) > 1]
    of_all = [parameter for parameter in shared if len(placement_of(parameter).stages) == axis.size]
    if of_all:
        sum_gradients(of_all, axis.group)
    for parameter in shared:
        if len(placement_of(parameter).stages) < axis.size:
            _sum_at_ends(parameter, axis)


def _sum_at_ends(parameter: paddle.Tensor, axis: ProcessAxis) -> None:
    """The sum of two stages' gradients, made by the first."""
    first, last = placement_of(parameter).stages
    if parameter.grad is None:
        parameter.grad = paddle.zeros_like(parameter)
    gradient, group = parameter.grad.contiguous(), axis.pairs[last if axis.index == first else first]
    if axis.index == first:
        other = paddle.empty_like(gradient)
        dist.recv(other, src=axis.ranks[last], group=group)
        gradient = gradient + other
        dist.send(gradient, dst=axis.ranks[last], group=group)
    else:
        dist.send(gradient, dst=axis.ranks[first], group=group)
        dist.recv(gradient, src=axis.ranks[first], group=group)
    parameter.grad.set_value(gradient)


def _even_bounds(num_layers: int, num_chunks: int, layer_cost: float, head_cost: float) -> tuple[int, ...]:
    """Bounds whose costliest chunk costs least, and of these the most even ones; each chunk has a layer at least."""
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {
        0: (0, 0, (0,))
    }  # layers taken -> largest, squares, bounds
    for chunk in range(num_chunks):
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for taken, (largest, squares, bounds) in best.items():
            for end in range(taken + 1, num_layers - (num_chunks - chunk - 1) + 1):
                load = (end - taken) * layer_cost + (head_cost if chunk == num_chunks - 1 else 0)
                candidate = (max(largest, load), squares + load**2, (*bounds, end))
                longer[end] = min(longer.get(end, candidate), candidate)
        best = longer
    return best[num_layers][2]
