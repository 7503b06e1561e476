"""Copy a base model to a new folder, as the merge commands do if no adapter is given."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from paddlenlp_ext.checkpoint.dtypes import FLOATING
from paddlenlp_ext.checkpoint.hub import resolve_model
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.checkpoint.output_folder import check_output
from paddlenlp_ext.checkpoint.safetensors import LazyTensor, save_sharded
from paddlenlp_ext.peft.merge.write_merged import common_dtype, write_companions
from paddlenlp_ext.quantization.quantized_weight_source import QuantizedWeights
from paddlenlp_ext.utils.files import atomic_folder


def copy_model(
    base: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the dequantized weights of a model, its config and its tokenizer as a Hugging Face folder; return `output`.

    Only one tensor at a time is in memory.

    Args:
        base: model folder, .gguf file, built-in name or hub id.
        output: folder to create.
        dtype: dtype of floating-point tensors; None: the dtype of the base (`common_dtype`).
        overwrite: replace an existing model at `output`.

    Raises:
        ValueError: the base model does not exist, or `output` already exists.
    """
    base_path = resolve_model(base)
    folder = Path(output).expanduser()
    check_output(folder, overwrite, (base_path,))
    source = QuantizedWeights(open_weights(base_path))
    dtype = dtype or common_dtype(base_path, source)
    tensors: dict[str, LazyTensor] = {}
    for name in source.names():
        written = dtype if dtype and source.dtype(name) in FLOATING else source.dtype(name)
        tensors[name] = LazyTensor(source.shape(name), written, partial(source.read, name, written))
    with atomic_folder(folder) as draft:
        save_sharded(draft, tensors)
        write_companions(draft, base_path, base_path, dtype)
    return folder
