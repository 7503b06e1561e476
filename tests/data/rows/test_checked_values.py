"""Values of other types in the fields of rows, in every format."""

from __future__ import annotations

import json

import pytest

from paddlenlp_ext.data.readers.dataset_files import open_reader
from paddlenlp_ext.data.rows.checked_values import dotted, read_json
from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.data.rows.known_fields import EMPTY
from paddlenlp_ext.utils.json_reader import DUPLICATE
from tests.data.test_dataset import SAME_ROW
from tests.stress.fuzz_rows import tiny_encoder
from tests.stress.wrong_values import places, replaced, value_at

OF_OTHER_TYPE = {
    int: ("x", [], {"x": 1}, 1.5, -2, 10**12),
    str: (5, [], {"x": 1}, True, 1.5, None),
    list: (2, {"x": 1}, [{}], [None], [[]]),
    dict: (2, "x", [], True, None),
}
NOT_READ = ("id",)
MAY_BE_EMPTY = ("system", "context", "instruction", "input")
"""Fields of which null, or an empty list or object, means their absence."""


@pytest.mark.parametrize(
    ("path", "text"), [((), "the row"), (("messages", 2, "content"), "messages[2].content"), ((0, "x"), "[0].x")]
)
def test_dotted_names_every_path(path, text):
    assert dotted(path) == text


@pytest.mark.parametrize("name", SAME_ROW)
def test_row_with_a_value_of_another_type_is_dropped(name, tmp_path):
    row, file = SAME_ROW[name], tmp_path / "rows.jsonl"
    encoder = tiny_encoder(str(file))
    for path in places(row):
        for wrong in OF_OTHER_TYPE[type(value_at(row, path))]:
            no_parts = path[-1] in ("content", "value") and wrong == []  # a message of no parts has an empty text
            if path[-1] in NOT_READ or (path[-1] in MAY_BE_EMPTY and wrong in EMPTY) or no_parts:
                continue
            file.write_text(json.dumps(replaced(row, path, wrong)))
            _, stats = encoder.encode_and_count(open_reader(file).rows())
            assert sum(stats.dropped.values()) == 1, (path, wrong)
            assert all(str(file) in str(example) for example in stats.examples)


def test_read_json_of_a_key_twice_raises_with_the_key():
    with pytest.raises(InvalidRowError, match=r"^tools: duplicate key 'name' in one object") as raised:
        read_json('[{"name": "a", "name": "b"}]', ("tools",))
    assert raised.value.reason == DUPLICATE
