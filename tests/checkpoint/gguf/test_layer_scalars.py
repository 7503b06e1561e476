"""Numbers of a layer in metadata lists: lists that do not belong to the layers of the file."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.checkpoint.open_weights import open_weights

LISTS = {f"xielu.{name}": [0.5, -0.25] for name in ("alpha_p", "alpha_n", "beta", "eps")}
NORM = {"blk.0.attn_norm.weight": np.ones(4, np.float32)}


def test_layer_scalars_are_tensors_of_their_layers(write_gguf):
    path = write_gguf({"apertus.block_count": 2, **LISTS, "xielu.beta": [0.125, 0.75]}, NORM, "apertus")
    source, name = open_weights(path), "model.layers.1.mlp.act_fn"
    assert len(source.names()) == 9 and source.shape("model.layers.0.attention_layernorm.weight") == (4,)
    assert source.shape(f"{name}.alpha_n") == (1,) and source.read(f"{name}.alpha_n").tolist() == [-0.25]
    assert source.shape(f"{name}.beta") == () and source.read(f"{name}.beta").item() == 0.75
    assert source.dtype(f"{name}.beta") == "float32"
    assert source.read(f"{name}.beta", "bfloat16").item() == 0x3F40  # bits of 0.75


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({}, r"the GGUF metadata has no xielu\.alpha_p, which is required"),
        ({**LISTS, "xielu.beta": [0.5]}, r"xielu\.beta has 1 items for 2 layers; the file is damaged"),
        ({**LISTS, "xielu.eps": 0.5}, r"xielu\.eps is 0\.5, not a list"),
    ],
)
def test_layer_scalars_of_damaged_lists_raise(lists, message, write_gguf):
    path = write_gguf({"apertus.block_count": 2, **lists}, NORM, "apertus")
    with pytest.raises(ValueError, match=message):
        open_weights(path)
