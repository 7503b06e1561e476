"""Registry of GGUF layouts by `model_type`; each model family registers its own."""

from __future__ import annotations

from paddlenlp_ext.checkpoint.gguf.architecture import Architecture, count
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.utils.registry import Registry

# The package of the families is imported by name on demand, because it belongs to a higher layer.
ARCHITECTURES: Registry[Architecture] = Registry("family with GGUF files", "paddlenlp_ext.models.families")


def architecture_of(file: GgufFile) -> Architecture:
    """Return the layout that a file has.

    Raises:
        ValueError: no model family reads this architecture.
    """
    return ARCHITECTURES.get(model_type_of(file))


def model_type_of(file: GgufFile) -> str:
    """Return the `model_type` of the family that reads a file.

    Raises:
        ValueError: no model family reads this architecture.
    """
    has_experts = bool(file.get(file.architecture_key("expert_count"), int, 0))
    for model_type, layout in ARCHITECTURES.items():
        if layout.name == file.architecture and layout.has_experts == has_experts and layout.reads(file):
            return model_type
    dense, sparse = (
        ", ".join(sorted({layout.name for _, layout in ARCHITECTURES.items() if layout.has_experts == kind}))
        for kind in (False, True)
    )
    raise ValueError(
        f"{file.path}: GGUF architecture {file.architecture!r} {'with' if has_experts else 'without'} experts is not "
        f"supported; known: {dense}; with experts: {sparse}"
    )


def num_layers(file: GgufFile) -> int:
    """Return the number of decoder layers, without multi-token-prediction (MTP) layers."""
    unread = count(file, "nextn_predict_layers", 0, minimum=0)
    return count(file, "block_count", minimum=unread + 1, maximum=unread + 1024) - unread
