"""Fixtures of the checkpoint tests: golden files and small GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.golden import DATA

LLAMA = {
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.block_count": 1,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.eos_token_id": 2,
}


@pytest.fixture
def golden() -> Path:
    """Return the folder of the golden files."""
    return DATA


@pytest.fixture
def llama_metadata() -> dict[str, Any]:
    """Return the metadata of a one-layer model that config_from_gguf requires."""
    return dict(LLAMA)


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes tmp_path/model.gguf: `write_gguf(metadata, tensors, architecture)`.

    Tensors are arrays, stored in their own dtype, or pairs (raw uint8 blocks [rows, bytes], quantization type's name).
    """

    def write(metadata: Mapping[str, Any], tensors: Mapping[str, Any], architecture: str = "llama") -> Path:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in metadata.items():
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add.get(type(value), writer.add_array)(key, value)
        for name, tensor in tensors.items():
            if isinstance(tensor, tuple):
                writer.add_tensor(name, tensor[0], raw_dtype=gguf.GGMLQuantizationType[tensor[1]])
            else:
                writer.add_tensor(name, np.ascontiguousarray(tensor))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
