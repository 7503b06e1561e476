"""Data, configurations and tables of benchmarks/triton_model.py, without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def token_batches(steps: int, batch: int, length: int, vocabulary: int) -> np.ndarray:
    """Return token ids [steps, batch, length], equal in every program, that a model can learn.

    Half of the tokens follow from the preceding token by a fixed permutation; the others are drawn from Zipf's law.
    """
    generator = np.random.default_rng(0)
    weights = 1 / (np.arange(vocabulary) + 3.0)
    ids = generator.choice(vocabulary, (steps, batch, length), p=weights / weights.sum())
    following, is_fixed = generator.permutation(vocabulary), generator.random(ids.shape) < 0.5
    for position in range(1, length):
        ids[..., position] = np.where(is_fixed[..., position], following[ids[..., position - 1]], ids[..., position])
    return ids


def configurations(kernels: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the groups of kernels in each row of a table: first one more group per row, then all groups but one."""
    rows: dict[str, tuple[str, ...]] = {"none": ()}
    for index, name in enumerate(kernels):
        rows[f"+ {name}"] = tuple(kernels[: index + 1])
    for name in kernels:
        rows[f"all without {name}"] = tuple(each for each in kernels if each != name)
    return rows


def largest_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest difference between two losses of the same step; NaN if a loss is NaN."""
    return float(np.max(np.abs(np.array(losses) - np.array(others))))


def markdown(heads: Sequence[str], rows: Mapping[str, Sequence[object]], names: str = "kernels") -> str:
    """Return a table with a name and the given values in each row; `names` is the head of the first column."""
    lines = [[names, *heads], ["---"] * (len(heads) + 1)]
    lines += [[name, *(_written(value) for value in values)] for name, values in rows.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _written(value: object) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.2g}" if isinstance(value, float) and abs(value) < 0.01 else f"{value:,}"
