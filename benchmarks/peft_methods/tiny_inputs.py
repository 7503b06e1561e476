"""A tiny random model and a dozen rows for `run.py --quick`."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from paddlenlp_ext import AutoModelForCausalLM

_WORDS = ("red", "blue", "green", "white", "apple", "pear", "plum", "fig")
_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "=")
_SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def make_tiny_inputs(folder: Path) -> tuple[Path, Path]:
    """Write a model with a tokenizer, and train and dev rows; returns both folders. What stands already stays."""
    model, data = folder / "tiny_model", folder / "tiny_data"
    if not (model / "model.safetensors").is_file():
        vocabulary = {word: index for index, word in enumerate((*_SPECIAL, *_WORDS))}
        core = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
        core.pre_tokenizer = WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        )
        tokenizer.save_pretrained(model)
        AutoModelForCausalLM.from_config(_SHAPE, seed=1).save_pretrained(model)
    data.mkdir(exist_ok=True)
    rows = [{"src": f"{a} {b} =", "tgt": f" {b} {a}"} for a in _WORDS[:4] for b in _WORDS[4:7]]
    for split in ("train", "dev"):
        (data / f"{split}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model, data
