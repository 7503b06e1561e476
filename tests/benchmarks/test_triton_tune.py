"""Choice of the sizes of Triton kernels by compiled resources, and the tables that it writes."""

from __future__ import annotations

import json

import pytest

from paddlenlp_ext.ops.triton_utils import tile_sizes
from tests.ops.interpreter import interpreted, skip_without_triton

skip_without_triton()


@pytest.fixture(scope="module")
def tune():
    with interpreted("benchmarks.triton_tune") as module:
        yield module


@pytest.fixture
def table(tune, tmp_path, monkeypatch):
    """Return a table of the kernel `rope` alone, the only one in its folder."""
    path = tmp_path / "sm_80.json"
    monkeypatch.setattr(tile_sizes, "FOLDER", tmp_path)
    tile_sizes.table_path.cache_clear()
    path.write_text(json.dumps({"rope": {"source": "a test", "sizes": [{"ELEMENTS": 2048, "num_warps": 4}]}}))
    yield path
    tile_sizes.table_path.cache_clear()
    tile_sizes.read_table.cache_clear()


@pytest.mark.parametrize(
    ("capability", "resources", "share"),
    [  # registers, spilled bytes, shared memory, warps; the figures of CUDA's occupancy calculator
        (90, (32, 0, 0, 4), 1.0),
        (90, (64, 0, 0, 8), 0.5),
        (90, (65, 0, 0, 8), 24 / 64),
        (90, (32, 0, 0, 1), 0.5),
        (86, (32, 0, 0, 4), 1.0),
        (86, (32, 0, 40 << 10, 8), 16 / 48),
        (80, (128, 0, 100 << 10, 4), 4 / 64),
    ],
)
def test_occupancy_is_limited_by_registers_shared_memory_and_programs(tune, capability, resources, share):
    assert tune.Resources(*resources).occupancy(capability) == pytest.approx(share)


def choose(tune, monkeypatch, table, resources_of) -> dict[str, int]:
    """Return the choice for `rope` on 8.6, where candidates have these resources."""
    monkeypatch.setattr(
        tune, "compiled", lambda case, bounds, candidate, capability: tune.Resources(*resources_of(**candidate))
    )
    return tune.roomiest(tune.CASES["rope"], {}, 86, table)


def test_sizes_of_the_table_stay_if_a_multiprocessor_has_enough_warps(tune, table, monkeypatch):
    chosen = choose(tune, monkeypatch, table, lambda ELEMENTS, num_warps: (32 * num_warps // 2, 0, 0, num_warps))
    assert chosen == {"ELEMENTS": 2048, "num_warps": 4}


def test_sizes_that_spill_or_do_not_fit_are_replaced_by_similar_ones(tune, table, monkeypatch):
    def resources_of(ELEMENTS: int, num_warps: int) -> tuple[int, ...]:
        return 32, 8 * (num_warps == 4), (100 << 10) * (ELEMENTS == 2048), num_warps

    assert choose(tune, monkeypatch, table, resources_of) in (
        {"ELEMENTS": 1024, "num_warps": 2},
        {"ELEMENTS": 4096, "num_warps": 8},
    )


def test_sizes_with_the_fewest_spilled_registers_are_chosen_if_all_spill(tune, table, monkeypatch):
    chosen = choose(
        tune, monkeypatch, table, lambda ELEMENTS, num_warps: (32, ELEMENTS + 64 * (num_warps - 1), 0, num_warps)
    )
    assert chosen == {"ELEMENTS": 1024, "num_warps": 1}


def test_table_of_another_capability_starts_from_the_next_older_one(tune, table):
    path = table.with_name("sm_90.json")
    tune.write(path, "gate_forward", "a test", [{"COLUMNS": 2048, "num_warps": 4}], table)
    written = json.loads(path.read_text())
    assert [*written] == ["gate_forward", "rope"] and "gate_forward" not in json.loads(table.read_text())
    assert tile_sizes.table_path(90) == path
