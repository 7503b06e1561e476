"""Derive a random seed from a position in a run, such as (seed, step, micro-batch)."""

from __future__ import annotations

import numpy as np


def seed_of(*position: int) -> int:
    """Return a 32-bit seed derived from all components of a position."""
    return int(np.random.SeedSequence(position).generate_state(1)[0])
