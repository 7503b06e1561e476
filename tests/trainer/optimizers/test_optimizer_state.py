"""Optimizer state of sharded parameters: it is saved as shards of full tensors, and read back from them."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.sharding_spec import Shard, full_shape, set_placement, shard_of
from paddlenlp_ext.trainer.optimizers.fused_adamw import FusedAdamW
from paddlenlp_ext.trainer.optimizers.optimizer_state import optimizer_state, restore_optimizer_state


class Sharded(paddle.nn.Layer):
    """Rows 2 to 3 of a weight [6, 4] and a full weight [5], as on the second of three tensor-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.part = self.create_parameter([2, 4])
        self.full = self.create_parameter([5])
        set_placement(self.part, shard=Shard(0, 2, 4, 6))


def stepped():
    model = Sharded()
    optimizer = FusedAdamW(parameters=[{"params": model.parameters(), "weight_decay": 0.0}])
    for parameter in model.parameters():
        parameter.grad = paddle.rand(parameter.shape)
    optimizer.step()
    return optimizer, dict(model.named_parameters())


def test_optimizer_state_of_a_shard_has_its_place_in_the_full_tensor():
    state = optimizer_state(*stepped())
    moments = {name: tensor for name, tensor in state.items() if "moment" in name}
    assert {name: full_shape(tensor) for name, tensor in moments.items()} == {
        "part.moment1": (6, 4), "part.moment2": (6, 4), "full.moment1": (5,), "full.moment2": (5,),
    }  # fmt: skip
    assert shard_of(state["part.moment1"]) == Shard(0, 2, 4, 6)
    assert all(shard_of(tensor) is None for name, tensor in state.items() if "moment" not in name)


def test_restore_optimizer_state_of_a_shard_reads_its_rows_of_the_full_tensor():
    optimizer, parameters = stepped()
    generator = np.random.default_rng(0)
    saved = {
        name: generator.standard_normal(full_shape(tensor)).astype(np.float32)
        for name, tensor in optimizer_state(optimizer, parameters).items()
    }
    restore_optimizer_state(optimizer, parameters, saved)
    for name, tensor in optimizer_state(optimizer, parameters).items():
        expected = saved[name][2:4] if name.startswith("part.moment") else saved[name]
        assert np.array_equal(tensor.numpy(), expected), name
    saved["part.moment1"] = saved["part.moment1"][:3]
    with pytest.raises(ValueError, match=r"part.moment1 has shape \[1, 4\] in the checkpoint, and \[2, 4\] in this"):
        restore_optimizer_state(optimizer, parameters, saved)
