"""Seeds derived from positions in a run."""

from __future__ import annotations

import paddle

from paddlenlp_ext.utils.seeds import seed_of


def test_seed_of_differs_by_position_and_fits_paddle():
    seeds = {seed_of(s, a, b) for s in (1, 2) for a in range(5) for b in range(10)}
    assert len(seeds) == 100
    paddle.seed(max(seeds))
