"""Download models from Hugging Face, ModelScope or AI Studio with the hub's own package.

The packages show progress, continue an interrupted download and keep a cache for later runs. The hub is selected by a
prefix of the hub id or, as in PaddleNLP, by the environment variable DOWNLOAD_SOURCE:

    Qwen/Qwen3-0.6B                 DOWNLOAD_SOURCE, by default huggingface
    modelscope:Qwen/Qwen3-0.6B      ModelScope, independently of DOWNLOAD_SOURCE
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddlenlp_ext.utils.optional_packages import import_extra
from paddlenlp_ext.utils.suggest import did_you_mean

SOURCE_VARIABLE = "DOWNLOAD_SOURCE"
_DUPLICATES = ["*/*", "consolidated*"]  # copies of the weights in other layouts
_WEIGHTS = "*.safetensors"  # excludes pickles
_SMALL_FILES = ["*.json", "*.model", "*.tiktoken", "*.jinja", "tokenizer*", "merges.txt", "vocab.*"]
_Snapshot = tuple[Callable[..., Any], tuple[type[Exception], ...]]


@dataclass(frozen=True)
class ModelHub:
    """Hub from which models are downloaded.

    Attributes:
        title: name for messages.
        snapshot: function that imports the hub's package, given a model name for error messages, and returns the
            package's download function and exceptions. The download function takes a hub id and patterns of file names
            (`allow_patterns`, `ignore_patterns`), and returns the folder.
    """

    title: str
    snapshot: Callable[[str], _Snapshot]


def _huggingface(name: str) -> _Snapshot:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    return huggingface_hub.snapshot_download, (HfHubHTTPError, LocalEntryNotFoundError)


def _modelscope(name: str) -> _Snapshot:
    package = import_extra("modelscope", "modelscope", name)
    errors = import_extra("modelscope_hub.errors", "modelscope", name)
    return package.snapshot_download, (errors.HubError,)


def _aistudio(name: str) -> _Snapshot:
    package = import_extra("aistudio_sdk.snapshot_download", "aistudio", name)
    errors = import_extra("aistudio_sdk.errors", "aistudio", name)
    return lambda hub_id, **patterns: package.snapshot_download(repo_id=hub_id, **patterns), (
        errors.InvalidParameter,
        errors.NotExistError,
        errors.FileIntegrityError,
        errors.RequestError,
    )


MODEL_HUBS = {
    "huggingface": ModelHub("the Hugging Face hub", _huggingface),
    "modelscope": ModelHub("ModelScope", _modelscope),
    "aistudio": ModelHub("AI Studio", _aistudio),
}
"""Prefix of a hub id, or value of DOWNLOAD_SOURCE -> hub."""


def download_model(name: str, hint: str = "", weights: bool = True) -> Path:
    """Return the cached folder of a hub model; download missing files, except pickles and files that are not used.

    Args:
        name: `organisation/name`, or `hub:organisation/name` with a key of `MODEL_HUBS`.
        hint: end of the error message after a failed download.
        weights: whether the weights are downloaded; False: download only configuration, tokenizer and chat template.

    Raises:
        ValueError: the hub is unknown, its package is not installed, the download failed, or the model has no weights
            in safetensors.
    """
    prefix, _, hub_id = name.rpartition(":")
    hub = (
        _hub(prefix, f"{name!r}") if prefix else _hub(os.environ.get(SOURCE_VARIABLE) or "huggingface", SOURCE_VARIABLE)
    )
    snapshot, errors = hub.snapshot(name)
    patterns = [*_SMALL_FILES, _WEIGHTS] if weights else _SMALL_FILES
    try:
        folder = Path(snapshot(hub_id, allow_patterns=patterns, ignore_patterns=_DUPLICATES))
    except (*errors, OSError) as error:
        raise ValueError(
            f"{name!r} is not a folder, and it could not be fetched from {hub.title} ({_first_line(error)}); "
            f"without a network, pass the path of a local model folder{hint}"
        ) from error
    if weights and not any(folder.glob(_WEIGHTS)):
        raise ValueError(
            f"{name!r}: no {_WEIGHTS} in {folder}, the copy of the model from {hub.title}; connect to the network if "
            "the weights were not downloaded before, or use a model with safetensors"
        )
    return folder


def _hub(key: str, where: str) -> ModelHub:
    if key not in MODEL_HUBS:
        raise ValueError(f"{where}: unknown hub {key!r}{did_you_mean(key, MODEL_HUBS)} Hubs: {', '.join(MODEL_HUBS)}")
    return MODEL_HUBS[key]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
