"""Config files of adapter folders: `adapter_config.json` of Hugging Face PEFT, and PaddleNLP's file for each method."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from paddlenlp_ext.checkpoint.symlinks import check_links
from paddlenlp_ext.peft.formats.adapter_config_schema import check_fields
from paddlenlp_ext.peft.registry import FORMER_PEFT_TYPES, PEFT_METHODS
from paddlenlp_ext.utils.files import read_json_object, write_text

CONFIG_FILE = "adapter_config.json"
SPLIT_FIELD = "split_layers"
"""Field that this package adds to fused adapters, with the sizes and original fields of the separate projections."""
_PICKLES = (".bin", ".pt", ".pth", ".pdparams")


class PaddleNLPFiles(NamedTuple):
    """Names of the files in which PaddleNLP stores an adapter of one method.

    Attributes:
        config: config file.
        array: NumPy file with the entire adapter; None if tensors are stored by name (`.safetensors`, `.pdparams`).
    """

    config: str
    array: str | None = None


def find_config(folder: str | os.PathLike[str]) -> Path:
    """Return the config file of an adapter folder.

    Raises:
        ValueError: the folder has no adapter, has only pickled weights, or has a symbolic link to a file outside the
            folder.
    """
    folder = Path(folder).expanduser()
    paddlenlp = {method.paddlenlp_files.config: None for _, method in PEFT_METHODS.items() if method.paddlenlp_files}
    for name in (CONFIG_FILE, *paddlenlp):
        if (folder / name).is_file():
            check_links(folder)
            return folder / name
    if folder.is_dir() and any(entry.name.endswith(_PICKLES) for entry in folder.iterdir()):
        raise missing_weights(folder, CONFIG_FILE)
    found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) if folder.is_dir() else "no such folder"
    raise ValueError(
        f"{folder}: no adapter here: {CONFIG_FILE} is missing (found: {found or 'nothing'}); use an adapter folder"
    )


def read_config(file: Path) -> tuple[Any, dict[str, Any]]:
    """Read an adapter config file found by `find_config`; return the config and the file's fields.

    Raises:
        ValueError: the method or a field is not supported.
    """
    fields = read_json_object(file)
    with in_file(file):
        check_fields(fields)
    fields |= (fields.get(SPLIT_FIELD) or {}).get("fields") or {}
    if file.name != CONFIG_FILE:
        stored = [method for _, method in PEFT_METHODS.items() if method.paddlenlp_files]
        method = _reader([method for method in stored if method.paddlenlp_files.config == file.name], fields)
        with in_file(file):
            return method.from_paddlenlp(fields), fields
    peft_type = fields.get("peft_type")
    methods = [
        method for _, method in PEFT_METHODS.items() if method.peft_type == FORMER_PEFT_TYPES.get(peft_type, peft_type)
    ]
    if not methods:
        known = sorted({method.peft_type for _, method in PEFT_METHODS.items()})
        raise ValueError(f"{file}: peft_type {peft_type!r} is not available; known: {', '.join(known)}")
    with in_file(file):
        common, own = _split_common_fields(fields)
        return _reader(methods, own).from_adapter_config(own).replace(**common), fields


def write_config(folder: Path, fields: Mapping[str, Any]) -> None:
    """Write adapter_config.json atomically, with sorted fields."""
    write_text(folder / CONFIG_FILE, json.dumps(dict(sorted(fields.items())), indent=2) + "\n")


def _split_common_fields(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the fields of a config file into the options common to all methods, and the method's own fields."""
    own = dict(fields)
    common = {"bias": own.pop("bias", None) or "none"}
    common["modules_to_save"] = own.pop("modules_to_save", None)
    common["ensure_weight_tying"] = bool(own.pop("ensure_weight_tying", False))
    excluded = own.pop("exclude_modules", None)
    # In PEFT, `exclude_modules` is either one regular expression for the full name, or a list of name suffixes.
    common["exclude_modules"] = f"^(?:{excluded})" if isinstance(excluded, str) and excluded else excluded
    return common, own


def _reader(methods: list[type[Any]], fields: Mapping[str, Any]) -> type[Any]:
    """Return the variant that recognizes the file's fields; by default, the method that the variants refine."""
    plain = next((method for method in methods if not method.refines), methods[0])
    return next((method for method in methods if method.refines and method.claims(fields)), plain)


@contextmanager
def in_file(file: Path) -> Iterator[None]:
    """Context manager: prefix the message of a `ValueError` with the file's path."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def missing_weights(folder: Path, expected: str) -> ValueError:
    """Return the error for a folder without the file `expected`; the message lists pickled weights in the folder."""
    pickles = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(_PICKLES))
    if pickles:
        return ValueError(
            f"{folder}: the adapter's weights are pickled ({', '.join(pickles[:3])}). Pickles are rejected, because "
            "reading a pickle can run arbitrary code; save the adapter as safetensors in the library that trained it. "
            "With --allow_pickle, the merge commands read the arrays of a single .pdparams file of PaddleNLP, or of "
            "adapter_model.bin of Hugging Face PEFT."
        )
    return ValueError(f"{folder}: {expected} is missing")
