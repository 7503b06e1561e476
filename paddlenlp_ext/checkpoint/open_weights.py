"""Open model weights in any supported format."""

from __future__ import annotations

import os
from pathlib import Path

from paddlenlp_ext.checkpoint.composite_folder import TextModelWeights, has_composite_names, is_composite, text_config
from paddlenlp_ext.checkpoint.gguf.read_weights import open_gguf_weights
from paddlenlp_ext.checkpoint.quantized_formats.float8 import is_float8, open_float8
from paddlenlp_ext.checkpoint.quantized_formats.registry import read_layout
from paddlenlp_ext.checkpoint.quantized_formats.repack import PackedWeights
from paddlenlp_ext.checkpoint.safetensors import SafetensorsFile, ShardedSafetensors
from paddlenlp_ext.checkpoint.symlinks import check_links
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.utils.files import read_json_object


def open_weights(path: str | os.PathLike[str]) -> WeightSource:
    """Open the weights of a Hugging Face folder, a `.safetensors` file or a `.gguf` file.

    FP8 weights are dequantized. Integer weights of GPTQ, AWQ, AutoRound and compressed-tensors are converted to this
    package's integer format. Only the text model of a composite model is read.

    Raises:
        ValueError: the folder has no weights or only pickles, a file is damaged, the index contradicts the shards, a
            symlink points outside the folder, or the quantization format is not supported.
    """
    path = Path(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return open_gguf_weights(path)
        if path.suffix == ".safetensors":
            return SafetensorsFile(path)
        raise ValueError(f"{path}: unknown file type; use a folder, a .safetensors file or a .gguf file")
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder")
    check_links(path)
    if (path / "model.safetensors").exists():
        source: WeightSource = SafetensorsFile(path / "model.safetensors")
    elif (path / "model.safetensors.index.json").exists():
        source = ShardedSafetensors(path / "model.safetensors.index.json")
    else:
        raise ValueError(_nothing_readable(path))
    config = read_json_object(path / "config.json") if (path / "config.json").is_file() else {}
    if is_composite(config) or has_composite_names(source.names()):
        source, config = TextModelWeights(source), text_config(config)
    quantization = config.get("quantization_config") or {}
    if is_float8(quantization):
        return open_float8(source, quantization)
    layout = read_layout(quantization)
    return source if layout is None else PackedWeights(source, layout)


def _nothing_readable(folder: Path) -> str:
    """Return the error message for a folder without model.safetensors."""
    found = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    pickles = [name for name in found if name.endswith((".bin", ".pt", ".pth", ".pdparams", ".ckpt"))]
    ggufs = [name for name in found if name.endswith(".gguf")]
    if pickles:
        return (
            f"{folder}: contains only pickled weights ({', '.join(pickles[:3])}). Loading a pickle can run arbitrary "
            "code, so pickles are not read; save the model as safetensors in the library it came from "
            "(model.save_pretrained(folder) in transformers)"
        )
    if ggufs:
        return f"{folder}: contains GGUF files ({', '.join(ggufs[:3])}); use the path of one of these files"
    return f"{folder}: neither model.safetensors nor model.safetensors.index.json exists; use the model's folder"
