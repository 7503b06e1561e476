"""Resolve a model name to a local path: a folder, a .gguf file, a built-in model, or a model on a hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from paddlenlp_ext.checkpoint.builtin_models import BUILTIN_MODELS, unpack_builtin
from paddlenlp_ext.checkpoint.model_hubs import download_model
from paddlenlp_ext.utils.suggest import did_you_mean

_HUB_ID = re.compile(r"([a-z]+:)?[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(name_or_path: str | os.PathLike[str], weights: bool = True) -> Path:
    """Return the local path of a model, which is unpacked or downloaded if necessary.

    The name is resolved, in this order, as a folder, a .gguf file, a built-in model or a hub id.

    Args:
        name_or_path: for example `./my-model`, `model.gguf`, `smollm2-135m-instruct`, `Qwen/Qwen3-0.6B` (on the hub
            that the environment variable DOWNLOAD_SOURCE selects, by default Hugging Face) or
            `modelscope:Qwen/Qwen3-0.6B`.
        weights: whether to download the weights of a hub model; if false, the folder may lack weights.

    Returns:
        The path of a Hugging Face folder or of a .gguf file.

    Raises:
        ValueError: the name cannot be resolved, the hub is unknown, or the download failed.
        ModuleNotFoundError: the package of a built-in model is not installed.
    """
    name = os.fspath(name_or_path)
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise ValueError(f"{path}: expected a model folder or a .gguf file")
    if name in BUILTIN_MODELS:
        return unpack_builtin(name)
    if _HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        return download_model(name, _builtin_hint(name), weights)
    known = ", ".join(BUILTIN_MODELS)
    raise ValueError(
        f"no model {name!r}{did_you_mean(name, BUILTIN_MODELS)} The name is neither a folder, a .gguf file, a built-in "
        f"model ({known}) nor a hub id (organisation/name, or with the name of the hub: "
        "modelscope:organisation/name)"
    )


def resolve_base(name: str | os.PathLike[str], adapter: str | os.PathLike[str], remedy: str) -> Path:
    """Return the local path of the base model of an adapter.

    Args:
        name: name or path of the base model in the adapter config.
        adapter: folder of the adapter, for the error message.
        remedy: end of the error message, which says how to specify another base model.

    Raises:
        ValueError: the base model cannot be found.
    """
    try:
        return resolve_model(name)
    except ValueError as error:
        raise ValueError(
            f"{os.fspath(adapter)} names its base model as {os.fspath(name)!r} (a relative path is resolved from the "
            f"current folder): {error}. If the base model is elsewhere: {remedy}"
        ) from error


def _builtin_hint(hub_id: str) -> str:
    """Return the end of a message that suggests a built-in model of the same name; empty if there is none."""
    name = hub_id.rpartition("/")[2].lower()
    return f", or {name!r}, the quantized copy in a PyPI package" if name in BUILTIN_MODELS else ""
