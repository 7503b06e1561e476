"""Seeds that follow from numbers that say where a run stands."""

from __future__ import annotations

import numpy as np


def seed_of(*position: int) -> int:
    """32 bits, well mixed from all of them."""
    return int(np.random.SeedSequence(position).generate_state(1)[0])
