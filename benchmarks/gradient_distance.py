"""Distances between two sets of gradients, computed without Paddle and PyTorch, for scripts of both."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def distance(one: np.ndarray, reference: np.ndarray) -> float:
    """Return the norm of the difference over the norm of the reference, summed in float64."""
    exact = reference.astype(np.float64)
    return float(np.linalg.norm(one - exact) / np.linalg.norm(exact))


def distances(rounded: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray]) -> dict[str, float | str]:
    """Return the distance of all gradients as one vector, and the median and largest distance over parameters."""
    single = {name: distance(rounded[name], exact[name]) for name in exact}
    vectors = [np.concatenate([one[name].ravel() for name in exact]) for one in (rounded, exact)]
    return {
        "distance_of_all": distance(*vectors),
        "median_distance": float(np.median(list(single.values()))),
        "largest_distance": max(single.values()),
        "farthest": max(single, key=single.__getitem__),
    }
