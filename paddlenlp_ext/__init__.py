"""Fine-tuning for PaddlePaddle.

The house has floors; imports go down only, and rooms on one floor do not import each other
(`tests/test_floors.py` holds the code to it):

    F6  train                                     the trainer and the order in which a run is assembled
    F5  parallel                                  how a model is cut over devices
    F4  models, peft                              decoders and their families; adapters
    F3  quant                                     weights in few bits: made, read, written, computed with
    F2  nn, data, checkpoint, generate            layers; rows to batches; files; sampling
    F1  ops, config, plan                         kernels; JSON to a tree of dataclasses; words for cutting
    F0  runtime, utils                            threads and logs, before Paddle is loaded
"""

from __future__ import annotations

import importlib
from typing import Any

from paddlenlp_ext import _runtime

__version__ = "0.1.0"

FLOORS: tuple[tuple[str, ...], ...] = (
    ("_runtime", "utils", "runtime"),
    ("ops", "config", "sharding_spec", "plan"),
    ("nn", "data", "checkpoint", "generation", "generate"),
    ("quantization", "quant"),
    ("models", "peft"),
    ("parallel",),
    ("trainer", "train"),
    ("cli",),
)

_PUBLIC = {
    "AutoModelForCausalLM": "paddlenlp_ext.models.auto",
    "AutoTokenizer": "paddlenlp_ext.checkpoint.tokenizer",
    "LoRAConfig": "paddlenlp_ext.peft.methods.lora",
    "PeftModel": "paddlenlp_ext.peft.peft_model",
    "get_peft_model": "paddlenlp_ext.peft.peft_model",
}
__all__ = [*_PUBLIC, "__version__"]

_runtime.configure()


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that importing the package stays cheap."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'paddlenlp_ext' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
