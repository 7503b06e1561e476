"""The measure of allocated bytes does not depend on the tensors of earlier tests."""

from __future__ import annotations

from paddlenlp_ext.ops.cpp import library
from tests.common.marks import needs_cpp
from tests.trainer.memory.allocated import allocated_bytes

VALUES = 4 << 14
"""Number of float32 values of a tensor of four steps of the pool's sizes."""


@needs_cpp
def test_allocated_bytes_of_a_tensor_do_not_depend_on_a_larger_unused_block():
    library.library().buffers_release()
    larger = library.empty([VALUES * 5 // 4])
    del larger
    before = allocated_bytes()
    tensor = library.empty([VALUES])
    assert allocated_bytes() - before == 4 * VALUES
    del tensor
    assert allocated_bytes() == before
