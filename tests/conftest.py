"""Shared by all rooms' tests: the package is imported before Paddle, so that runtime.py sets the process up."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

import paddlenlp_ext

WORDS = ["red", "blue", "green", "white", "black", "apple", "pear", "plum", "fig", "lime"]
TINY_LLAMA = {
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


def pytest_collection_finish() -> None:
    """Thousands of collected tests stay to the end: without them the garbage collector has a tenth of the work."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # else libraries find their objects alive at the exit, and say so


@pytest.fixture
def run_folders(tmp_path: Path) -> Path:
    """`model/` with weights and a tokenizer, and `data/`, whose answers are the question's words in reverse."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", "=", *WORDS])}
    core = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    paddlenlp_ext.AutoModelForCausalLM.from_config(TINY_LLAMA, seed=1).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    rows = [{"src": f"{a} {b} =", "tgt": f" {b} {a}"} for a in WORDS[:4] for b in WORDS[5:8]]
    for split in ("train", "dev"):
        (tmp_path / "data" / f"{split}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path
