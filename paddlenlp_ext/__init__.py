"""Fine-tuning for PaddlePaddle.

Imports go down the layers, and packages of one layer do not import each other (`tests/test_layers.py`):

    L7  cli                                        command-line programs behind the scripts in llm/
    L6  trainer                                    the training loop, and the order in which a run is assembled
    L5  parallel                                   data, tensor, sequence, pipeline and sharded parallelism
    L4  models, peft                               decoders and their families; adapter methods
    L3  quantization                               weights in 4 and 8 bits: quantize, store, compute
    L2  nn, data, checkpoint, generation           layers; rows to batches; files; sampling
    L1  ops, config, sharding_spec                 kernels; JSON to a tree of dataclasses; words of sharding plans
    L0  _runtime, utils                            threads and logging, before Paddle is loaded
"""

from __future__ import annotations

import importlib
from typing import Any

from paddlenlp_ext import _runtime

__version__ = "0.1.0"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("_runtime", "utils"),
    ("ops", "config", "sharding_spec"),
    ("nn", "data", "checkpoint", "generation"),
    ("quantization",),
    ("models", "peft"),
    ("parallel",),
    ("trainer",),
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
