from __future__ import annotations

from types import SimpleNamespace

import pytest

from paddlenlp_ext.utils.lazy import Late


def test_only_what_is_not_known_makes_the_object():
    made = []

    def make():
        made.append(1)
        return SimpleNamespace(known="from the object", unknown=7)

    late = Late(make, known=None)
    assert late.known is None and not made
    assert (late.unknown, late.unknown, len(made)) == (7, 7, 1)
    with pytest.raises(AttributeError, match="absent"):
        _ = late.absent


def test_it_is_called_as_the_object():
    assert Late(lambda: divmod)(7, 2) == (3, 1)
