"""Convert a GGUF file to a Hugging Face folder."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from paddlenlp_ext.checkpoint.config_json import (
    read_generation_config,
    read_model_config,
    write_generation_config,
    write_model_config,
)
from paddlenlp_ext.checkpoint.gguf.gguf_file import open_gguf
from paddlenlp_ext.checkpoint.gguf.read_tokenizer import tokenizer_from_gguf
from paddlenlp_ext.checkpoint.gguf.read_weights import open_gguf_weights
from paddlenlp_ext.checkpoint.safetensors import LazyTensor, save_sharded


def unpack_gguf(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Write the weights, configs and tokenizer of a .gguf file to a Hugging Face folder.

    Tensors are saved without rounding: quantized tensors as float32, other tensors in the stored dtype.

    Args:
        path: the .gguf file.
        folder: output folder, created if absent.
    """
    folder = Path(folder)
    source = open_gguf_weights(path)
    tensors = {
        name: LazyTensor(source.shape(name), source.dtype(name), functools.partial(source.read, name))
        for name in source.names()
    }
    save_sharded(folder, tensors)
    write_model_config(folder, read_model_config(path))
    write_generation_config(folder, read_generation_config(path))
    tokenizer_from_gguf(open_gguf(path)).save_pretrained(str(folder))
