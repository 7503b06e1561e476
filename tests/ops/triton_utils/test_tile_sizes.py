"""Tables of the sizes of Triton kernels: lookup, fallback to other capabilities, and errors of wrong tables."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from paddlenlp_ext.ops.triton_utils import tile_sizes
from paddlenlp_ext.ops.triton_utils.tile_sizes import TileSizes, fills_threads, shrunk
from tests.ops.interpreter import interpreted

ENTRIES = [
    {"rank": 16, "element_size": 2, "ROWS": 64, "num_warps": 8},
    {"rank": 16, "ROWS": 32, "num_warps": 4},
    {"ROWS": 16, "num_warps": 4},
]


SHIPPED = sorted(tile_sizes.FOLDER.glob("sm_*.json"))


@pytest.fixture
def sizes():
    return TileSizes(
        "product",
        ("rank", "element_size"),
        lambda entry: entry["ROWS"] < 64 or entry["num_warps"] == 8,
        ROWS=(16, 32, 64),
        num_warps=(4, 8),
    )


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Replace the shipped tables by `sm_80.json` alone, and return a function that writes further tables."""

    def write(name: str, entries: object) -> None:
        text = json.dumps({"product": {"source": "a test", "sizes": entries}})
        (tmp_path / name).write_text(text if isinstance(entries, list) else str(entries))

    monkeypatch.setattr(tile_sizes, "FOLDER", tmp_path)
    monkeypatch.setattr(tile_sizes, "device_capability", lambda x: x)  # in place of a tensor
    tile_sizes.table_path.cache_clear()
    write("sm_80.json", ENTRIES)
    yield write
    tile_sizes.table_path.cache_clear()


@pytest.mark.parametrize(("per_thread", "is_allowed"), [(4, False), (8, True), (32, True), (64, False)])
def test_fills_threads_allows_8_to_32_elements_per_thread(per_thread, is_allowed):
    rows = 4 * per_thread
    assert fills_threads("ROWS", "COLUMNS")({"ROWS": rows, "COLUMNS": 16, "num_warps": 2}) is is_allowed
    assert fills_threads("ROWS", columns=999)({"ROWS": rows, "columns": 16, "num_warps": 2}) is is_allowed
    assert fills_threads("ROWS", columns=16)({"ROWS": rows, "num_warps": 2}) is is_allowed


@pytest.mark.parametrize(
    ("rank", "element_size", "rows"), [(1, 1, 64), (16, 2, 64), (16, 4, 32), (17, 2, 16), (1000, 4, 16)]
)
def test_tile_sizes_are_those_of_the_first_entry_with_large_enough_bounds(tables, sizes, rank, element_size, rows):
    found = sizes(None, rank=rank, element_size=element_size)
    assert found == {"ROWS": rows, "num_warps": 8 if rows == 64 else 4}
    found["ROWS"] = 0  # the caller's own
    assert sizes(None, rank=rank, element_size=element_size)["ROWS"] == rows


def test_tile_sizes_that_are_fixed_replace_those_of_the_table(tables, sizes):
    sizes.fixed = {"ROWS": 8}
    assert sizes(None, rank=1, element_size=2) == {"ROWS": 8}


@pytest.mark.parametrize(
    ("capability", "name"),
    [(None, 80), (75, 80), (80, 80), (86, 80), (89, 89), (90, 90), (99, 90), (100, 100), (121, 100)],
)
def test_table_of_an_unknown_capability_is_the_next_older_one(tables, sizes, capability, name):
    for own in (89, 90, 100):
        tables(f"sm_{own}.json", [{"ROWS": 16 if own == name else 32, "num_warps": 4}])
    assert tile_sizes.table_path(capability).name == f"sm_{name}.json"
    assert sizes(capability, rank=16, element_size=2)["ROWS"] == (64 if name == 80 else 16)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "expected a JSON object"),
        ('{"product": {"sizes": []}}', "expected a JSON object with source and sizes of each kernel"),
        ([{"ROWS": "16", "num_warps": 4}], "expected a JSON object with source and sizes of each kernel"),
        ('{"other": {"source": "", "sizes": []}}', "product is missing"),
        ([{"ROWS": 24, "num_warps": 4}], "product: the tile sizes {'ROWS': 24, 'num_warps': 4} are not allowed"),
        ([{"ROWS": 64, "num_warps": 4}], "are not allowed"),
        ([{"ROWS": 16}], "are not allowed"),
        ([{"ROWS": 16, "num_warps": 4, "columns": 8}], "are not allowed"),
        ([{"rank": 4, "ROWS": 16, "num_warps": 4}], "product has no sizes for {'rank': 8, 'element_size': 2}"),
    ],
)
def test_wrong_table_is_refused_by_name(tables, sizes, entries, message):
    tables("sm_80.json", entries)
    with pytest.raises(ValueError, match="regenerate the table with") as error:
        sizes(None, rank=8, element_size=2)
    assert "sm_80.json: " in str(error.value) and message in str(error.value)


def test_candidates_are_all_allowed_combinations(sizes):
    pairs = [(each["ROWS"], each["num_warps"]) for each in sizes.candidates(rank=16)]
    assert pairs == [(16, 4), (16, 8), (32, 4), (32, 8), (64, 8)]


@pytest.mark.parametrize(("count", "columns", "warps"), [(5000, 1024, 8), (1000, 1024, 8), (300, 512, 4), (3, 4, 1)])
def test_shrunk_sizes_cover_the_count_with_fewer_warps(count, columns, warps):
    assert shrunk({"COLUMNS": 1024, "num_warps": 8}, "COLUMNS", count) == {"COLUMNS": columns, "num_warps": warps}


@pytest.fixture(scope="module")
def cases():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed (pip install -e '.[triton]')")
    with interpreted("benchmarks.triton_tune_cases") as module:
        yield module.CASES


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_table_has_candidates_for_every_kernel_and_launch(cases, path):
    """`compile_fused --all` compiles them for the capability."""
    assert cases.keys() <= tile_sizes.read_table(path).keys() == tile_sizes.read_table(SHIPPED[0]).keys()
    for case in cases.values():
        assert len(case.sizes.entries(path)) <= len(case.bounds)
        for bounds in case.bounds:
            case.sizes.lookup(path, {name: bounds.get(name, sys.maxsize) for name in case.sizes.bounds})


def test_entry_without_bounds_is_one_for_the_largest_numbers(cases):
    for case in cases.values():
        candidates = case.sizes.candidates()
        assert candidates and all(map(case.sizes.is_entry, candidates)), case.sizes.kernel


def test_shipped_tables_are_for_gpus_with_little_and_much_shared_memory():
    assert [path.stem for path in SHIPPED] == ["sm_100", "sm_120", "sm_80", "sm_86", "sm_89", "sm_90"]
