"""Files that store the rows of a tensor as several tensors."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.checkpoint.file_layouts.renamed_tensors import RenamedTensors
from paddlenlp_ext.checkpoint.file_layouts.split_rows import SplitRows
from paddlenlp_ext.checkpoint.safetensors import as_lazy
from paddlenlp_ext.sharding_spec import Shard
from tests.common.golden import ArrayWeights

LAYOUT = SplitRows(
    {"mixer.conv": {"mixer.q": 2, "mixer.k": 1}},
    read=RenamedTensors({"model.layers.*.norm": "model.layers.*.stored_norm"}),
    written=RenamedTensors({"model.layers.0.norm": "model.layers.0.stored_norm"}),
)
ROWS = np.arange(12, dtype=np.float32).reshape(6, 2)
FILES = {
    "model.layers.0.mixer.q.weight": ROWS[:4],
    "model.layers.0.mixer.k.weight": ROWS[4:],
    "model.layers.0.stored_norm.weight": ROWS[0],
    "model.layers.1.norm.weight": ROWS[1],
}
PARAMETERS = {
    "model.layers.0.mixer.conv.weight": ROWS,
    "model.layers.0.norm.weight": ROWS[0],
    "model.layers.1.norm.weight": ROWS[1],
}


def test_split_rows_to_files_divides_rows_by_their_shares():
    written = LAYOUT.to_files(PARAMETERS)
    assert set(written) == set(FILES)
    for name, expected in FILES.items():
        assert as_lazy(written[name]).shape == expected.shape
        np.testing.assert_array_equal(as_lazy(written[name]).read(), expected, err_msg=name)


def test_split_rows_open_joins_parts_of_any_size_and_reads_shards():
    other = {**FILES, "model.layers.0.mixer.q.weight": ROWS[:3], "model.layers.0.mixer.k.weight": ROWS[3:]}
    for files in (FILES, other):
        opened = LAYOUT.open(ArrayWeights(files))
        assert set(opened.names()) == set(PARAMETERS)
        for name, expected in PARAMETERS.items():
            assert opened.shape(name) == expected.shape
            np.testing.assert_array_equal(opened.read(name), expected, err_msg=name)
        part = opened.read("model.layers.0.mixer.conv.weight", shard=Shard(0, 2, 5, 6))
        np.testing.assert_array_equal(part, ROWS[2:5])


def test_split_rows_open_accepts_files_under_the_names_in_memory():
    opened = LAYOUT.open(ArrayWeights(PARAMETERS))
    for name, expected in PARAMETERS.items():
        np.testing.assert_array_equal(opened.read(name), expected, err_msg=name)


def test_split_rows_with_a_missing_part_raises():
    files = {name: values for name, values in FILES.items() if not name.endswith("k.weight")}
    with pytest.raises(ValueError, match=r"the tensor for model\.layers\.0\.mixer\.k\.weight is missing; copy or"):
        LAYOUT.open(ArrayWeights(files))
