"""Conversion of adapters with one LoRA per expert to LoRA on stacked expert weights.

With transformers 4, Hugging Face PEFT writes one LoRA per expert and projection. gate_proj and up_proj are separate
layers in these files, but one weight in memory. The rank of this weight's update is the sum of the two ranks:

    in files, expert e                           in memory
    experts.e.gate_proj    A_g [g, in]           gate_up_proj   A[e] = [A_g]    B[e] = [B_g   0 ]
    experts.e.up_proj      A_u [u, in]                                 [A_u]           [ 0   B_u]
    experts.e.down_proj    A [r, in]             down_proj      A[e] = A        B[e] = B

Experts and projections missing from the file get zero factors. Factors of lower rank are padded with zeros. If the
scales of experts differ, B is multiplied by the ratio of the scales, so that the update of each expert is unchanged.
Routers, which are linear layers in these files, become entries of `target_parameters`.

Shapes: E experts, r rank, in/out features of a weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.file_layouts.base import ExpertPlace, split_layer
from paddlenlp_ext.utils.layer_name_patterns import has_suffix

_FACTOR = re.compile(r"(?P<layer>.+)\.(?P<factor>lora_[AB])\.weight")


@dataclass(frozen=True)
class StackedAdapter:
    """Result of `stack_single_experts`.

    Attributes:
        tensors: all tensors of the adapter, keyed by their names in memory.
        layers: names of the layers with stacked weights and of the routers.
        parameters: names of the stacked weights and router weights in `target_parameters`.
        ranks: `rank_pattern` for the stacked weights and routers.
        alphas: `alpha_pattern` for the stacked weights and routers.
    """

    tensors: dict[str, np.ndarray]
    layers: frozenset[str]
    parameters: tuple[str, ...]
    ranks: dict[str, int]
    alphas: dict[str, float]


@dataclass(frozen=True)
class _Single:
    """LoRA factors of one projection of one expert, with alpha and scale s."""

    name: str
    place: ExpertPlace
    a: np.ndarray
    b: np.ndarray
    alpha: float
    scaling: float


def stack_single_experts(
    tensors: Mapping[str, np.ndarray],
    base: Any,
    rank_and_alpha: Callable[[str], tuple[int, float]],
    rslora: bool,
    parameters: Iterable[str] = (),
) -> StackedAdapter | None:
    """Stack the expert factors of an adapter; return None if it adapts neither single experts nor a router.

    Args:
        tensors: name in the file -> tensor.
        base: config of the base (`DecoderConfig`).
        rank_and_alpha: function that returns rank and alpha of a layer, given its name in the file.
        rslora: whether the scale is alpha / sqrt(r) instead of alpha / r.
        parameters: `target_parameters` of the file.

    Raises:
        ValueError: a factor is missing, a rank differs from the config, or the base lacks an expert of the file.
    """
    stored: dict[str, np.ndarray] = {}
    factors: dict[str, dict[str, np.ndarray]] = {}
    places: dict[str, ExpertPlace] = {}
    routers: dict[str, str] = {}  # name in the file -> name in memory
    for name, value in tensors.items():
        found = _FACTOR.fullmatch(name)
        place = base.file_layout.locate(f"{found['layer']}.weight") if found else None
        if found and place:
            places[found["layer"]] = place
            factors.setdefault(found["layer"], {})[found["factor"]] = value
            continue
        router = _router_of(found["layer"], base) if found else None
        if found and router and not any(has_suffix(f"{router}.weight", entry) for entry in parameters):
            routers[found["layer"]] = router
            name = f"{router}.{found['factor']}.weight"
        stored[name] = value
    if not factors and not routers:
        return None
    groups: dict[str, list[_Single]] = {}
    for layer, pair in factors.items():
        single = _single(layer, places[layer], pair, rank_and_alpha(layer), rslora)
        groups.setdefault(single.place.stack.removesuffix(".weight"), []).append(single)
    patterns: dict[str, tuple[int, float]] = {}
    for stack, singles in groups.items():
        a, b = _stacked(singles, _num_experts(singles, base))
        stored |= {f"{stack}.lora_A.weight": a, f"{stack}.lora_B.weight": b}
        rank, first = a.shape[1], singles[0]
        ratio = rank / len(first.a)
        patterns[stack] = rank, first.alpha * (ratio**0.5 if rslora else ratio)
    named = (*groups, *(f"{router}.weight" for router in dict.fromkeys(routers.values())))
    patterns |= {f"{memory}.weight": rank_and_alpha(file) for file, memory in routers.items()}
    patterns = _shortened(patterns, rank_and_alpha)
    return StackedAdapter(
        tensors=stored,
        layers=frozenset((*groups, *routers.values())),
        parameters=named,
        ranks={name: rank for name, (rank, _) in patterns.items()},
        alphas={name: alpha for name, (_, alpha) in patterns.items()},
    )


def _router_of(layer: str, base: Any) -> str | None:
    """Return the name in memory of the router named `layer` in a file; None if `layer` is not a router."""
    memory = base.file_layout.name_in_memory(f"{layer}.weight").removesuffix(".weight")
    found = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.(\w+)", memory)
    if not found or int(found[1]) >= base.num_hidden_layers:
        return None
    shape = base.expert_shape(int(found[1]))
    return memory if shape is not None and shape.router_name == found[2] else None


def _single(
    name: str, place: ExpertPlace, factors: Mapping[str, np.ndarray], rank_and_alpha: tuple[int, float], rslora: bool
) -> _Single:
    missing = {"lora_A", "lora_B"} - factors.keys()
    if missing:
        raise ValueError(f"{name}.{missing.pop()}.weight is missing; save the adapter again")
    (rank, alpha), a, b = rank_and_alpha, factors["lora_A"], factors["lora_B"]
    if len(a) != rank or b.shape[1] != rank:
        raise ValueError(
            f"{name} has factors of shape {list(a.shape)} and {list(b.shape)}, but "
            f"adapter_config.json gives rank {rank}; correct r or rank_pattern"
        )
    return _Single(name, place, a, b, alpha, alpha / (rank**0.5 if rslora else rank))


def _num_experts(singles: Iterable[_Single], base: Any) -> int:
    """Return the number of experts in the layer that the factors adapt."""
    number = 0
    for single in singles:
        index = int(re.findall(r"\d+", split_layer(single.place.stack)[0])[0])
        shape = base.expert_shape(index) if index < base.num_hidden_layers else None
        number = 0 if shape is None else shape.num_experts
        if single.place.expert >= number:
            raise ValueError(
                f"{single.name}: the base has only {number} experts in this layer; load the model that the adapter "
                "was trained on"
            )
    return number


def _stacked(singles: list[_Single], num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Stack the factors of a layer's experts as A [E, r, in] and B [E, out, r].

    B is rescaled so that the scale s of the first expert applies to all experts.
    """
    first = singles[0]
    ranks = [0] * first.place.num_projections
    for single in singles:
        ranks[single.place.projection] = max(ranks[single.place.projection], len(single.a))
    rows, rank = len(first.b), sum(ranks)
    a = np.zeros((num_experts, rank, first.a.shape[1]), first.a.dtype)
    b = np.zeros((num_experts, rows * first.place.num_projections, rank), first.b.dtype)
    for single in singles:
        expert, part = single.place.expert, single.place.projection
        start = sum(ranks[:part])
        columns, outputs = slice(start, start + len(single.a)), slice(part * rows, (part + 1) * rows)
        a[expert, columns] = single.a
        b[expert, outputs, columns] = single.b * np.float32(single.scaling / first.scaling)
    return a, b


def _shortened(
    patterns: Mapping[str, tuple[int, float]], rank_and_alpha: Callable[[str], tuple[int, float]]
) -> dict[str, tuple[int, float]]:
    """Drop patterns whose values are the defaults; drop layer numbers if all decoder layers have the same values."""
    short = {name: split_layer(name)[1] for name in patterns}
    within: dict[str, set[tuple[int, float]]] = {}
    for name, values in patterns.items():
        within.setdefault(short[name], set()).add(values)
    return {
        (short[name] if len(within[short[name]]) == 1 else name): values
        for name, values in patterns.items()
        if rank_and_alpha(name) != values
    }
