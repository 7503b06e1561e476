"""Registry of the GGUF layouts of the model families, by `model_type`."""

from __future__ import annotations

from paddlenlp_ext.checkpoint.gguf.architecture import Architecture, count
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.utils.registry import Registry

# The registry imports the package of the families by name on demand, because `checkpoint` must not import `models`.
ARCHITECTURES: Registry[Architecture] = Registry("family with GGUF files", "paddlenlp_ext.models.families")


def architecture_of(file: GgufFile) -> Architecture:
    """Return the layout of a file.

    Raises:
        ValueError: the architecture of the file is not supported.
    """
    return _entry_of(file)[1]


def model_type_of(file: GgufFile) -> str:
    """Return the `model_type` of the model family of a file.

    Raises:
        ValueError: the architecture of the file is not supported.
    """
    return _entry_of(file)[0]


def layouts() -> list[tuple[str, Architecture]]:
    """Return the `model_type` and the layout of each kind of GGUF file."""
    return [(kind, each) for kind, layout in ARCHITECTURES.items() for each in (layout, *layout.variants)]


def _entry_of(file: GgufFile) -> tuple[str, Architecture]:
    has_experts = bool(file.get(file.architecture_key("expert_count"), int, 0))
    for model_type, layout in layouts():
        if layout.name == file.architecture and layout.has_experts == has_experts and layout.reads(file):
            return model_type, layout
    dense, sparse = (
        ", ".join(sorted({layout.name for _, layout in layouts() if layout.has_experts == kind}))
        for kind in (False, True)
    )
    raise ValueError(
        f"{file.path}: GGUF architecture {file.architecture!r} {'with' if has_experts else 'without'} experts is not "
        f"supported; known: {dense}; known with experts: {sparse}"
    )


def num_layers(file: GgufFile) -> int:
    """Return the number of decoder layers, without multi-token-prediction (MTP) layers."""
    unread = count(file, "nextn_predict_layers", 0, minimum=0)
    return count(file, "block_count", minimum=unread + 1, maximum=unread + 1024) - unread
