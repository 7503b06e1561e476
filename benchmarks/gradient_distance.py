"""How far two sets of gradients are apart. No Paddle, no PyTorch: both programs' scripts use it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def distance(one: np.ndarray, reference: np.ndarray) -> float:
    """The norm of the difference over the norm of the reference, summed in float64."""
    exact = reference.astype(np.float64)
    return float(np.linalg.norm(one - exact) / np.linalg.norm(exact))


def distances(rounded: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray]) -> dict[str, float | str]:
    """Of all gradients taken as one vector, and the median and the largest of the single ones; by parameter's name."""
    single = {name: distance(rounded[name], exact[name]) for name in exact}
    whole = [np.concatenate([one[name].ravel() for name in exact]) for one in (rounded, exact)]
    return {
        "distance_of_all": distance(*whole),
        "median_distance": float(np.median(list(single.values()))),
        "largest_distance": max(single.values()),
        "farthest": max(single, key=single.__getitem__),
    }
