"""Tiny Llama with a tokenizer of bytes and a few merges, in memory and as a folder."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from tests.common.models import TINY_LLAMA

MAX_LENGTH = 48
CONFIG = {
    **TINY_LLAMA,
    "vocab_size": 261,
    "max_position_embeddings": MAX_LENGTH,
    "bos_token_id": 259,
    "eos_token_id": 260,
}
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGED = [("a", "b"), ("Ġ", "y"), ("o", "k")]
CHATML = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def byte_tokenizer():
    """Return a tokenizer of bytes and a few merges, with ChatML."""
    vocabulary = {text: number for number, text in enumerate([*LETTERS, *("".join(pair) for pair in MERGED)])}
    core = Tokenizer(BPE(vocabulary, MERGED))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = CHATML
    return tokenizer


def write_model(folder: Path) -> None:
    """Save model and tokenizer."""
    AutoModelForCausalLM.from_config(CONFIG, seed=1).save_pretrained(folder)
    byte_tokenizer().save_pretrained(str(folder))
