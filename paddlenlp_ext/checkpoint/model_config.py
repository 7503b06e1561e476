"""config.json and generation_config.json of a model, or what a GGUF file says instead of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paddlenlp_ext.utils.files import read_json_object, write_text


def read_model_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The model's config, as the dict that stands in a Hugging Face config.json.

    Args:
        path: a Hugging Face folder or a .gguf file (`resolve_model` gives either).

    Raises:
        ValueError: no config.json, a damaged one, one without `model_type`, or a GGUF architecture that is not known.
    """
    path = Path(path)
    if path.suffix == ".gguf" and path.is_file():
        from paddlenlp_ext.checkpoint.gguf import open_gguf
        from paddlenlp_ext.checkpoint.gguf.config import config_from_gguf

        return config_from_gguf(open_gguf(path))
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder")
    if not (path / "config.json").is_file():
        raise ValueError(f"{path}: no config.json there; expected a Hugging Face model folder")
    config = read_json_object(path / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ValueError(f'{path / "config.json"}: no "model_type", so the architecture is not known')
    return config


def write_model_config(folder: str | os.PathLike[str], config: Mapping[str, Any], dtype: str | None = None) -> None:
    """Write config.json, keys sorted.

    Args:
        folder: made if absent.
        config: what stands in it.
        dtype: the weights' format, if `config` may say another. It is named once, under the key that the config has:
            transformers 5 writes `dtype` and believes it rather than the older `torch_dtype`.
    """
    if dtype is not None:
        key = "dtype" if "dtype" in config else "torch_dtype"
        config = {**{name: value for name, value in config.items() if name != "torch_dtype"}, key: dtype}
    _write_json(Path(folder) / "config.json", config)


def write_generation_config(folder: str | os.PathLike[str], config: Mapping[str, Any]) -> None:
    """Write generation_config.json, keys sorted."""
    if config.get("eos_token_id") == []:  # transformers asks for the first of a list, and takes null for no end
        config = {**config, "eos_token_id": None}
    _write_json(Path(folder) / "generation_config.json", config)


def read_generation_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Where generation ends and what it is sampled with.

    generation_config.json wins over config.json, also with a null, as in transformers; a GGUF file's metadata stands
    for both.

    Args:
        path: a Hugging Face folder or a .gguf file.

    Returns:
        The keys of generation_config.json, if there is one, and always `eos_token_id` (a list, maybe empty),
        `bos_token_id` and `pad_token_id` (an id or None).

    Raises:
        ValueError: a damaged file, or ids that are not integers.
    """
    path = Path(path)
    generation_file = path / "generation_config.json"
    config = read_model_config(path)
    generation = read_json_object(generation_file) if generation_file.is_file() else {}
    for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
        generation.setdefault(key, config.get(key))
    eos = generation["eos_token_id"]
    generation["eos_token_id"] = eos if isinstance(eos, list) else [] if eos is None else [eos]
    ids = [*generation["eos_token_id"], generation["bos_token_id"], generation["pad_token_id"]]
    if not all(token_id is None or isinstance(token_id, int) for token_id in ids):
        raise ValueError(f"{path}: eos_token_id, bos_token_id and pad_token_id must be token ids, found {ids}")
    return generation


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
