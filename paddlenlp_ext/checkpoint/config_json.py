"""Read and write config.json and generation_config.json; for GGUF files, derive both from the metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paddlenlp_ext.checkpoint.composite_folder import text_config
from paddlenlp_ext.checkpoint.config_json_schema import GENERATION_KEYS, check_config_values
from paddlenlp_ext.checkpoint.symlinks import check_links
from paddlenlp_ext.utils.files import read_json_object, write_text
from paddlenlp_ext.utils.json_schema import check_values


def read_model_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the contents of a model's config.json; for a GGUF file, derive the contents from the metadata.

    For a composite model, the result is the config of its text model (composite_folder.py).

    Args:
        path: a Hugging Face folder or a .gguf file, as returned by `resolve_model`.

    Raises:
        ValueError: config.json is missing or damaged, has no `model_type` or has an invalid value; or the architecture
            of the GGUF file is unknown.
    """
    path = Path(path)
    if path.suffix == ".gguf" and path.is_file():
        from paddlenlp_ext.checkpoint.gguf.gguf_file import open_gguf
        from paddlenlp_ext.checkpoint.gguf.read_config import config_from_gguf

        config = config_from_gguf(open_gguf(path))
    else:
        config = _read_folder(path)
    check_config_values(config, str(path))
    return config


def _read_folder(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such directory")
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder}: config.json is missing; expected a Hugging Face model folder")
    check_links(folder)
    config = text_config(read_json_object(file))
    if not isinstance(config.get("model_type"), str):
        raise ValueError(f'{file}: "model_type" is missing; copy config.json from the original model')
    return config


def write_model_config(folder: str | os.PathLike[str], config: Mapping[str, Any], dtype: str | None = None) -> None:
    """Write config.json with sorted keys.

    Args:
        folder: folder of the model, created if absent.
        config: contents of the file.
        dtype: dtype of the weights, which replaces the dtype in `config`; None: keep the dtype in `config`. The
            file's key is `dtype` (transformers 5) if `config` has this key, otherwise `torch_dtype` (older versions).
    """
    if dtype is not None:
        key = "dtype" if "dtype" in config else "torch_dtype"
        config = {**{name: value for name, value in config.items() if name != "torch_dtype"}, key: dtype}
    _write_json(Path(folder) / "config.json", config)


def write_generation_config(folder: str | os.PathLike[str], config: Mapping[str, Any]) -> None:
    """Write generation_config.json with sorted keys."""
    if config.get("eos_token_id") == []:  # null means no end token; transformers does not accept an empty list
        config = {**config, "eos_token_id": None}
    _write_json(Path(folder) / "generation_config.json", config)


def read_generation_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the special tokens and sampling options of a model.

    Special tokens that generation_config.json does not set come from config.json; as in transformers, null in
    generation_config.json means no token. For a GGUF file, the special tokens come from the metadata.

    Args:
        path: a Hugging Face folder or a .gguf file.

    Returns:
        The contents of generation_config.json, if the file exists, and always `eos_token_id` (a list, possibly empty),
        `bos_token_id` and `pad_token_id` (an id or None).

    Raises:
        ValueError: a file is damaged or has an invalid value.
    """
    path = Path(path)
    generation_file = path / "generation_config.json"
    config = read_model_config(path)
    generation = read_json_object(generation_file) if generation_file.is_file() else {}
    for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
        generation.setdefault(key, config.get(key))
    try:
        check_values(generation, GENERATION_KEYS, "generation_config.json")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    eos = generation["eos_token_id"]
    generation["eos_token_id"] = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return generation


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
