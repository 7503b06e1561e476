"""Write OUT/NAME.gguf with `export_gguf`: tiny models of every family in F32, SmolLM2 in F16, and what they compute.

F16 would change which experts tiny random models choose, because llama.cpp rounds activations to the type of weights.
OUT/types/TYPE.gguf are SmolLM2 in F16, BF16 and Q8_0, with the logits of a longer text.

`check_gguf_in_llama_cpp.py`, `check_gguf_text_in_llama_cpp.py`, `check_gguf_in_llama_cpp_python.py` and
`check_gguf_in_transformers.py` read them.

    python -m tests.golden.peer_checks.export_gguf_for_peers OUT
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_ext import configure_runtime

configure_runtime()  # before Paddle is imported

import paddle

from paddlenlp_ext.checkpoint.gguf.read_tokenizer import tokenizer_from_gguf
from paddlenlp_ext.checkpoint.gguf.write_tokenizer import PROBE
from paddlenlp_ext.checkpoint.safetensors import as_lazy
from paddlenlp_ext.checkpoint.tokenizer import load_tokenizer
from paddlenlp_ext.cli.export_gguf import export_arguments, run_export
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.gguf_export import architecture_for, export_gguf
from paddlenlp_ext.peft.formats.gguf import export_gguf_adapter
from paddlenlp_ext.peft.layers import adapter_layers
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from tests.checkpoint.gguf.llama_cpp_files import END, MODELS, make_model, write_model
from tests.checkpoint.gguf.test_read_tokenizer import sentencepiece_file
from tests.common.scripts import ROOT

SMOLLM2 = "smollm2-135m-instruct"
CHATS = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Which animal barks?"}],
)
NUM_TEXTS, NEW_TOKENS = 200, 40
TYPES = ("f16", "bf16", "q8_0")
TEXT_LENGTH = 128
ADAPTED = (
    *("llama", "phi3", "lfm2", "lfm2moe", "apertus", "afmoe", "qwen35", "qwen35moe"),
    *("granitehybrid", "granitemoe", "granitehybrid_experts", "nemotron_h", "nemotron_h_moe"),
    *("gemma4", "gemma4_experts", "minimax-m2", "falcon-h1"),
)
PLAIN: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128},
    "phi3": {"partial_rotary_factor": 1.0},
    "gemma2": {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {"head_dim": 256, "query_pre_attn_scalar": 256, "rope_scaling": None},
}
"""Models with the values that transformers supposes, because it does not read them from the metadata."""


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    export_families(out)
    export_merges(out / "merges.gguf")
    export_smollm2(out)
    export_types(out / "types")


@paddle.no_grad()
def export_families(out: Path) -> None:
    ids = np.random.default_rng(0).integers(5, 90, 24)
    reference = write_model(make_model("llama"), "llama", out / "tokenizer.gguf")
    tokenizer = load_tokenizer(reference)
    reference.unlink()
    models = {name: make_model(name) for name in MODELS}
    models |= {f"{name}_plain": make_model(name, **changes) for name, changes in PLAIN.items()}
    for name, model in models.items():
        path = out / f"{name}.gguf"
        tensors = model.config.to_files(dict(model.named_parameters()))
        tensors = {name: as_lazy(tensor) for name, tensor in tensors.items()}
        export_gguf(path, model.config, tensors, tokenizer, [END], "f32", "tiny")
        loaded = AutoModelForCausalLM.from_pretrained(str(path))
        np.savez(path.with_suffix(".npz"), ids=ids, logits=loaded(paddle.to_tensor(ids[None])).numpy()[0])
        if name in ADAPTED:
            export_adapter(out, path, ids)


def export_adapter(out: Path, base: Path, ids: np.ndarray) -> None:
    """Write OUT/BASE_adapted.gguf, a copy of the base, OUT/BASE_adapted.lora, and the logits of both together."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(str(base)), LoRAConfig(rank=4, alpha=6, rslora=True))
    paddle.seed(0)
    for _, layer in adapter_layers(model):
        layer.lora_B.weight.set_value(0.1 * paddle.randn(layer.lora_B.weight.shape))
    model.eval()
    path = out / f"{base.stem}_adapted.gguf"
    shutil.copy(base, path)
    export_gguf_adapter(path.with_suffix(".lora"), model, architecture_for(model.config), "tiny")
    np.savez(path.with_suffix(".npz"), ids=ids, logits=model(paddle.to_tensor(ids[None])).numpy()[0])


@paddle.no_grad()
def export_merges(path: Path) -> None:
    """Write a model whose tokenizer is a SentencePiece BPE tokenizer with merges, and the tokens of texts."""
    pieces = json.loads((ROOT / "tests/golden/data/checkpoint_sentencepiece.json").read_text(encoding="utf-8"))
    extra = {"tokenizer.ggml.add_space_prefix": False, "llama.context_length": 64}
    tokenizer = tokenizer_from_gguf(sentencepiece_file(pieces, **extra))
    model = make_model("gemma4", vocab_size=len(pieces["tokens"]))
    tensors = {name: as_lazy(each) for name, each in model.config.to_files(dict(model.named_parameters())).items()}
    export_gguf(path, model.config, tensors, tokenizer, [END], "f32", "tiny")
    ids = np.random.default_rng(0).integers(5, 90, 24)
    np.savez(path.with_suffix(".npz"), ids=ids, logits=model(paddle.to_tensor(ids[None])).numpy()[0])
    texts = [*pieces["texts"], *varied_texts()]
    tokens = [tokenizer.encode(each, add_special_tokens=False) for each in texts]
    path.with_suffix(".json").write_text(json.dumps({"texts": texts, "tokens": tokens, "chats": []}), encoding="utf-8")


@paddle.no_grad()
def export_smollm2(out: Path) -> None:
    path, tokenizer, texts = out / "smollm2.gguf", load_tokenizer(SMOLLM2), varied_texts()
    model = export_type(path, "f16", 24)
    chats = []
    for chat in CHATS:
        text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        prompt = tokenizer.encode(text, add_special_tokens=False)
        (answer,) = model.generate(
            [prompt], max_new_tokens=NEW_TOKENS, decode_strategy="greedy_search", eos_token_id=model.eos_token_ids
        )
        answered = tokenizer.decode(answer, skip_special_tokens=True)
        reason = "stop" if len(answer) < NEW_TOKENS else "length"
        asked = {"messages": chat, "prompt": text, "prompt_ids": prompt, "max_tokens": NEW_TOKENS}
        chats.append({**asked, "answer": answered, "reason": reason})
    tokens = [tokenizer.encode(each, add_special_tokens=False) for each in texts]
    stored = {"texts": texts, "tokens": tokens, "chats": chats}
    path.with_suffix(".json").write_text(json.dumps(stored), encoding="utf-8")


@paddle.no_grad()
def export_types(out: Path) -> None:
    out.mkdir(exist_ok=True)
    for outtype in TYPES:
        export_type(out / f"{outtype}.gguf", outtype, TEXT_LENGTH)


def export_type(path: Path, outtype: str, length: int) -> Any:
    """Write SmolLM2 as GGUF, and the logits of a text of `length` tokens; return the model that the file holds."""
    names = ["--model_name_or_path", SMOLLM2, "--output_file", str(path), "--outtype", outtype, "--overwrite", "1"]
    print(run_export(export_arguments(names)))
    model = AutoModelForCausalLM.from_pretrained(str(path))
    text = varied_texts()[0] + (ROOT / "README.md").read_text(encoding="utf-8")
    ids = np.array(load_tokenizer(SMOLLM2).encode(text)[:length])
    np.savez(path.with_suffix(".npz"), ids=ids, logits=model(paddle.to_tensor(ids[None])).numpy()[0])
    return model


def varied_texts() -> list[str]:
    """Return spans of a text of many kinds of characters and of a page, of 1 to 80 characters."""
    rng = np.random.default_rng(0)
    text = PROBE * 8 + (ROOT / "README.md").read_text(encoding="utf-8")
    starts, lengths = rng.integers(0, len(text) - 80, NUM_TEXTS), rng.integers(1, 80, NUM_TEXTS)
    return [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]


if __name__ == "__main__":
    main()
