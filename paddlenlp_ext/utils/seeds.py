"""Derive random seeds from a position in a run, such as (seed, step, micro-batch), or from the name of a parameter."""

from __future__ import annotations

import hashlib

import numpy as np


def seed_of(*position: int) -> int:
    """Return a 32-bit seed derived from all components of a position."""
    return int(np.random.SeedSequence(position).generate_state(1)[0])


def generator_for(seed: int, name: str) -> np.random.Generator:
    """Return a random generator that depends only on `seed` and the parameter's `name`.

    Initial values therefore do not depend on the order of the layers or on the number of devices.
    """
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return np.random.default_rng([seed, key])
