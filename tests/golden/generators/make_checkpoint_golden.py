"""Write checkpoint_*.{json,gguf,npz}, the golden files of tests/checkpoint.

Run where PyTorch, transformers, gguf, sentencepiece and protobuf are installed:

    python -m tests.golden.generators.make_checkpoint_golden

- checkpoint_sentencepiece.json: a small BPE model trained by sentencepiece, and its ids of some texts.
- checkpoint_rope.json: settings of Llama 3's rotary scaling, and the inverse frequencies that transformers computes.
- checkpoint_<architecture>.gguf and .npz: a small quantized model, and the weights that transformers reads from it.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import gguf
import numpy as np
import sentencepiece
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.golden import DATA

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCAB = 64, 96, 4, 2, 40
TEXTS = [
    "Hello world",
    "  two spaces  and three   inside ",
    "Zahlen 2024, 3.14 und 1000000!",
    "déjà vu, naïve, über, ćwierć",
    "日本語のテキスト и русский текст",
    "emoji 🙂 and tab\tnewline\nend",
    "the the the theatre then",
    "",
    " ",
    "x",
]
CORPUS = """The quick brown fox jumps over the lazy dog near the old theatre then goes home.
She sells sea shells by the sea shore, and the shells that she sells are sea shells for sure.
Numbers such as 1984, 2001 and 2024 are years; 3.14 is not. Weather and whether, there and their, then and than.
A model is trained on text, a tokenizer is trained on text too, and both forget what they were not shown.
El niño come manzanas. Der Hund läuft über die Straße. Une idée naïve, déjà vu."""


def train_sentencepiece() -> dict:
    """Train a BPE model with byte fallback and two user-defined symbols, as Llama's."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.splitlines()),
        model_writer=written,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<sep>"],
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1
        for i in range(model.get_piece_size())
    ]
    kinds[model.piece_to_id("<sep>")] = 4
    return {
        "tokens": [model.id_to_piece(i) for i in range(model.get_piece_size())],
        "scores": [model.get_score(i) for i in range(model.get_piece_size())],
        "types": kinds,
        "texts": TEXTS,
        "ids": [model.encode(text) for text in TEXTS],
        "decoded": [model.decode(model.encode(text)) for text in TEXTS],
    }


def write_gguf(path: Path, architecture: str) -> None:
    """Write one layer of random weights, in several quantization types, as llama.cpp's files have."""
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*(chr(33 + i) for i in range(VOCAB - 1)), "AB"])
    writer.add_token_merges(["A B"])
    writer.add_eos_token_id(3)
    head_dim = HIDDEN // HEADS
    if architecture == "qwen3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    kinds = gguf.GGMLQuantizationType
    tensors = {
        "token_embd.weight": ((VOCAB, HIDDEN), kinds.Q8_0),
        "output_norm.weight": ((HIDDEN,), kinds.F32),
        "blk.0.attn_norm.weight": ((HIDDEN,), kinds.F32),
        "blk.0.ffn_norm.weight": ((HIDDEN,), kinds.F32),
        "blk.0.attn_q.weight": ((HIDDEN, HIDDEN), kinds.Q4_1),
        "blk.0.attn_k.weight": ((KV_HEADS * head_dim, HIDDEN), kinds.Q5_0),
        "blk.0.attn_v.weight": ((KV_HEADS * head_dim, HIDDEN), kinds.F16),
        "blk.0.attn_output.weight": ((HIDDEN, HIDDEN), kinds.Q4_0),
        "blk.0.ffn_gate.weight": ((INTERMEDIATE, HIDDEN), kinds.Q5_1),
        "blk.0.ffn_up.weight": ((INTERMEDIATE, HIDDEN), kinds.Q8_0),
        "blk.0.ffn_down.weight": ((HIDDEN, INTERMEDIATE), kinds.BF16),
    }
    if architecture == "llama":
        tensors["output.weight"] = ((VOCAB, HIDDEN), kinds.Q8_0)
    if architecture == "qwen2":
        tensors["blk.0.attn_q.bias"] = ((HIDDEN,), kinds.F32)
        tensors["blk.0.attn_k.bias"] = ((KV_HEADS * head_dim,), kinds.F32)
        tensors["blk.0.attn_v.bias"] = ((KV_HEADS * head_dim,), kinds.F32)
    if architecture == "qwen3":
        tensors["blk.0.attn_q_norm.weight"] = ((head_dim,), kinds.F32)
        tensors["blk.0.attn_k_norm.weight"] = ((head_dim,), kinds.F32)
    for name, (shape, kind) in tensors.items():
        values = rng.standard_normal(shape).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


ROPE_SETTINGS = [  # head_dim, theta, factor, low, high, original context
    (64, 500000.0, 32.0, 1.0, 4.0, 8192),  # Llama 3.2 1B
    (128, 500000.0, 8.0, 1.0, 4.0, 8192),  # Llama 3.1 8B
    (128, 1000000.0, 16.0, 1.0, 32.0, 4096),
    (64, 500000.0, 8.0, 2.0, 5.0, 8192),
    (96, 10000.0, 3.7, 1.5, 2.5, 1000),
    (64, 1000000.0, 4.0, 1.0, 4.0, 131072),  # slow frequencies only
    (16, 10000.0, 2.0, 1.0, 4.0, 64),
    (8, 10000.0, 8.0, 1.0, 4.0, 256),  # no frequency between the bounds
    (8, 10000.0, 8.0, 1.0, 4.0, 128),  # one frequency between the bounds
    (32, 10000.0, 6.0, 1.0, 4.0, 4),  # no frequency above them
]


def rope_frequencies() -> list[dict]:
    """Return rotary settings and the inverse frequencies of transformers."""
    cases = []
    for head_dim, theta, factor, low, high, original in ROPE_SETTINGS:
        scaling = {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
        config = LlamaConfig(
            hidden_size=head_dim, num_attention_heads=1, max_position_embeddings=262144, rope_parameters=scaling
        )
        frequencies = LlamaRotaryEmbedding(config).inv_freq.tolist()
        cases.append({"head_dim": head_dim, "theta": theta, "scaling": scaling, "inverse_frequencies": frequencies})
    return cases


def main() -> None:
    (DATA / "checkpoint_rope.json").write_text(json.dumps(rope_frequencies()) + "\n")
    (DATA / "checkpoint_sentencepiece.json").write_text(json.dumps(train_sentencepiece()) + "\n")
    for architecture in ("llama", "qwen2", "qwen3"):
        path = DATA / f"checkpoint_{architecture}.gguf"
        write_gguf(path, architecture)
        # transformers does not read attention.key_length of qwen3 and would take 128.
        head_dim = {"head_dim": HIDDEN // HEADS} if architecture == "qwen3" else {}
        model = AutoModelForCausalLM.from_pretrained(DATA, gguf_file=path.name, dtype=torch.float32, **head_dim)
        expected = {name: value.numpy() for name, value in model.state_dict().items()}
        np.savez_compressed(DATA / f"checkpoint_{architecture}.npz", **expected)


if __name__ == "__main__":
    main()
