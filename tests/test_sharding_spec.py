"""Placement of tensors and the arithmetic of shards; plain objects stand in for Paddle's tensors."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from paddlenlp_ext.sharding_spec import (
    Placement,
    Shard,
    full_shape,
    is_materialized,
    is_on_stage,
    is_updated_here,
    placement_of,
    set_placement,
    shard_of,
)


def test_placement_of_a_tensor_that_was_never_placed_is_that_of_a_single_process():
    tensor = SimpleNamespace(shape=[4, 6])
    assert placement_of(tensor) == Placement()
    assert shard_of(tensor) is None and full_shape(tensor) == (4, 6)
    assert is_on_stage(tensor) and is_materialized(tensor) and is_updated_here(tensor)


def test_set_placement_changes_the_named_fields_and_keeps_the_others():
    tensor, other = SimpleNamespace(shape=[4, 6]), SimpleNamespace(shape=[4, 6])
    set_placement(tensor, stages=(0, 2), is_on_stage=False)
    set_placement(tensor, owner=1)
    assert placement_of(tensor) == Placement(stages=(0, 2), is_on_stage=False, owner=1)
    assert placement_of(other) == Placement()


@pytest.mark.parametrize("change", [{"is_on_stage": False}, {"is_gathered_copy": True}])
def test_is_materialized_of_values_that_another_process_holds_is_false(change):
    tensor = SimpleNamespace(shape=[4])
    set_placement(tensor, **change)
    assert not is_materialized(tensor)


def test_placement_with_a_misspelled_field_raises():
    tensor = SimpleNamespace(shape=[4])
    with pytest.raises(TypeError, match="is_on_stagee"):
        set_placement(tensor, is_on_stagee=False)
    with pytest.raises(AttributeError):
        print(placement_of(tensor).is_on_stagee)


def test_shard_selects_its_slice_of_the_full_tensor():
    full = np.arange(24).reshape(4, 6)
    shard = Shard(1, 2, 5, 6)
    part = full[shard.index]
    assert part.tolist() == full[:, 2:5].tolist()
    assert shard.full_shape(part.shape) == full.shape
    tensor = SimpleNamespace(shape=list(part.shape))
    set_placement(tensor, shard=shard)
    assert full_shape(tensor) == (4, 6)
