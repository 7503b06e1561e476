"""Values that GGUF files store in another form: logarithms."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.checkpoint.open_weights import open_weights

LAYOUT, NAME = ARCHITECTURES.get("qwen3_5_text"), "model.layers.0.linear_attn.A_log"


def test_architecture_stores_logarithms_as_negative_rates_and_restores_them():
    values = np.linspace(-9, 4, 10_001, dtype=np.float32)
    stored = LAYOUT.to_stored(NAME, values)
    assert stored.dtype == np.float32
    np.testing.assert_allclose(stored, -np.exp(values.astype(np.float64)), rtol=2.0**-24)
    restored = LAYOUT.from_stored(NAME, stored)
    assert (np.abs(restored - values) <= 2.0**-24 + np.spacing(np.abs(values))).all()
    assert np.array_equal(LAYOUT.to_stored(NAME, restored), stored)


def test_architecture_adds_the_offset_to_norms_except_plain_norms():
    values = np.float32([0.25, -0.5])
    assert LAYOUT.to_stored("model.norm.weight", values).tolist() == [1.25, 0.5]
    assert LAYOUT.to_stored("model.layers.0.linear_attn.norm.weight", values).tolist() == [0.25, -0.5]


def test_gguf_weights_rates_that_are_not_negative_raise(write_gguf):
    sizes = {"ssm.group_count": 1, "ssm.time_step_rank": 2, "ssm.state_size": 1, "ssm.inner_size": 2}
    metadata = {f"qwen35.{key}": value for key, value in sizes.items()}
    path = write_gguf(metadata, {"blk.0.ssm_a": np.float32([-1.0, 0.0])}, "qwen35")
    with pytest.raises(ValueError, match=r"the stored values of .*A_log are not all negative; the file is damaged"):
        open_weights(path).read(NAME)
