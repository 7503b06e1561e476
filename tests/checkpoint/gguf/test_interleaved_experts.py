"""Experts of gpt-oss in GGUF files."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.sharding_spec import Shard

NAME = "model.layers.1.mlp.experts.gate_up_proj"
METADATA = {"gpt-oss.expert_count": 3}


def test_gguf_weights_of_gpt_oss_interleave_quantized_gates(write_gguf):
    values = np.random.default_rng(0).integers(-3, 4, (2, 3, 5, 64)).astype(np.float32)  # all of them MXFP4 numbers
    kind = GGMLQuantizationType.MXFP4
    names = ["blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.weight"]
    tensors = {name: (quants.quantize(part, kind), "MXFP4") for name, part in zip(names, values, strict=True)}
    source = open_weights(write_gguf(METADATA, tensors, "gpt-oss"))
    got = source.read(NAME)
    assert source.names() == [NAME] and source.shape(NAME) == got.shape == (3, 64, 10)
    assert np.array_equal(got[..., 0::2], np.swapaxes(values[0], 1, 2))
    assert np.array_equal(got[..., 1::2], np.swapaxes(values[1], 1, 2))
    assert np.array_equal(source.read(NAME, shard=Shard(0, 1, 3, 3)), got[1:])


def test_gguf_weights_of_gpt_oss_without_a_part_name_it(write_gguf):
    path = write_gguf(METADATA, {"blk.1.ffn_gate_exps.weight": np.zeros((3, 5, 64), np.float32)}, "gpt-oss")
    with pytest.raises(ValueError, match=r"the tensor for model\.layers\.1\.mlp\.experts\.up_proj is missing; copy"):
        open_weights(path)
