"""Damaged safetensors files, indexes of them, and GGUF files."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from paddlenlp_ext.checkpoint.config_json import read_model_config
from paddlenlp_ext.checkpoint.gguf.gguf_file import open_gguf
from paddlenlp_ext.checkpoint.gguf.read_tokenizer import tokenizer_from_gguf
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.models.decoder_config import DecoderConfig
from tests.stress.wrong_values import damage, mutate

_GOLDEN = Path(__file__).parent.parent / "golden/data"
_TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.ones(5, np.uint8),
    "c": np.array(3, np.float16),
}
_MAX_TENSORS = 4


def attack_safetensors(rng: random.Random, folder: Path) -> None:
    """Open a folder of weights, and read some tensors."""
    shutil.rmtree(folder / "model", ignore_errors=True)
    model = folder / "model"
    model.mkdir()
    content = save(_TENSORS)
    length = int.from_bytes(content[:8], "little")
    if rng.random() < 0.5:  # a valid length of a header with wrong values
        header = json.dumps(mutate(json.loads(content[8 : 8 + length]), rng)).encode()
        content = len(header).to_bytes(8, "little") + header + content[8 + length :]
    else:
        content = damage(content, rng)
    name = "model.safetensors"
    if rng.random() < 0.5:
        name = "model-00001-of-00001.safetensors"
        index = {"metadata": {"total_size": 33}, "weight_map": dict.fromkeys(_TENSORS, name)}
        text = json.dumps(mutate(index, rng) if rng.random() < 0.5 else index)
        (model / "model.safetensors.index.json").write_text(text)
    (model / name).write_bytes(content)
    source = open_weights(model)
    for tensor in source.names()[:_MAX_TENSORS]:
        assert source.read(tensor).shape == source.shape(tensor)


def attack_gguf(rng: random.Random, folder: Path) -> None:
    """Read config, tokenizer and some weights of a GGUF file with a damaged header."""
    original = (_GOLDEN / f"checkpoint_{rng.choice(('llama', 'qwen2', 'qwen3'))}.gguf").read_bytes()
    end = rng.choice((64, 1024, 8192, len(original)))
    path = folder / "model.gguf"
    path.write_bytes(damage(original[:end], rng) + original[end:])
    DecoderConfig.from_dict(read_model_config(path))
    tokenizer_from_gguf(open_gguf(path)).encode("a b")
    source = open_weights(path)
    for tensor in source.names()[:_MAX_TENSORS]:
        assert source.read(tensor).shape == source.shape(tensor)
