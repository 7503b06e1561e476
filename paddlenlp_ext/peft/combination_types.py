"""Weighted combinations of low-rank adapters, with the `combination_type` values of Hugging Face PEFT.

| `combination_type` | update of adapters s_i B_i A_i with scales s_i and weights w_i | rank |
| --- | --- | --- |
| "cat" | sum_i w_i s_i B_i A_i = [w_1 s_1 B_1, w_2 s_2 B_2, ...] [A_1; A_2; ...] | sum of the ranks |
| "linear" | (sum_i sqrt(w_i s_i) B_i) (sum_i sqrt(w_i s_i) A_i) | the common rank |

"cat" computes the exact weighted sum of the updates. "linear" adds the factors, so its product also has cross terms of
different adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import paddle

from paddlenlp_ext.peft.low_rank_factors import Factors

COMBINATIONS = ("cat", "linear")


def combined_factors(
    parts: Sequence[Mapping[str, Factors]], weights: Sequence[float], combination: str = "cat"
) -> dict[str, Factors]:
    """Return a dict from layer names to the factors of the weighted combination of several adapters.

    Args:
        parts: for each adapter, the result of `factors_of`.
        weights: weight of each adapter; with "cat", a negative weight subtracts the adapter.
        combination: "cat" or "linear".

    Raises:
        ValueError: `parts` is empty, `parts` and `weights` differ in length, the combination is unknown, or "linear"
            cannot combine the adapters.
    """
    if not parts or len(parts) != len(weights):
        raise ValueError(
            f"adapters, weights: got {len(parts)} adapters and {len(weights)} weights; pass at least one adapter, and "
            "one weight per adapter"
        )
    if combination not in COMBINATIONS:
        raise ValueError(f"combination_type={combination!r} is not supported; use one of {', '.join(COMBINATIONS)}")
    pairs: dict[str, list[tuple[Factors, float]]] = {}
    for part, weight in zip(parts, weights, strict=True):
        for name, factors in part.items():
            pairs.setdefault(name, []).append((factors, weight))
    combine = _concatenated if combination == "cat" else _summed
    return {name: combine(name, layer) for name, layer in pairs.items()}


def _concatenated(name: str, layer: Sequence[tuple[Factors, float]]) -> Factors:
    a = paddle.concat([factors.a for factors, _ in layer])
    return Factors(a, paddle.concat([factors.b * weight for factors, weight in layer], axis=1))


def _summed(name: str, layer: Sequence[tuple[Factors, float]]) -> Factors:
    """Return the factors of PEFT's "linear" combination (see the module)."""
    if len({factors.a.shape[0] for factors, _ in layer}) != 1:
        raise ValueError(f"{name}: the adapters differ in rank; use combination_type='cat', which accepts any ranks")
    if any(weight < 0 for _, weight in layer):
        raise ValueError("weights: a weight is negative; use combination_type='cat', which accepts negative weights")
    scaled = [(factors, weight, factors.scaling) for factors, weight in layer if factors.scaling is not None]
    if len(scaled) < len(layer):
        raise ValueError(f"{name}: an adapter is not a plain LoRA; use combination_type='cat' for other methods")
    a = paddle.add_n([factors.a * (weight * scaling) ** 0.5 for factors, weight, scaling in scaled])
    return Factors(a, paddle.add_n([factors.b * (weight / scaling) ** 0.5 for factors, weight, scaling in scaled]))
