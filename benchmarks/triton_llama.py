"""Llama of transformers with LoRA of PEFT, and this project's Triton kernels in place of its layers.

Each group of `KERNELS` can be used alone. PyTorch computes attention and the large matmuls. To use the
kernels, the class of a module is changed to a subclass in this file; transformers and PEFT are not patched.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as PeftLinear
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama

from benchmarks.triton_packed import PackedWeight
from benchmarks.triton_torch import AdamW, Dense, LinearCrossEntropy, LoraLinear, RmsNorm, Rope, recomputable_gate

KERNELS = {
    "norms": "RMS norms, with the residual addition before the feed-forward layer",
    "rotation": "rotation of queries and keys in one launch",
    "gates": "SwiGLU whose gradients overwrite its inputs",
    "loss": "lm_head and loss by chunks",
    "lora": "LoRA linear",
    "adamw": "AdamW in one launch",
}
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RATE = 2e-4


class Shape(NamedTuple):
    """Sizes of a Llama."""

    hidden: int = 4096
    intermediate: int = 14336
    layers: int = 32
    heads: int = 32
    key_heads: int = 8
    vocabulary: int = 128256


class Training(NamedTuple):
    """A model in training.

    Attributes:
        model: transformers' Llama with LoRA.
        loss: function of token ids [B, S] that returns the mean loss of all tokens but the first.
        optimizer: object with a method `step`.
    """

    model: Any
    loss: Callable[[torch.Tensor], torch.Tensor]
    optimizer: Any

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters that train."""
        return [each for each in self.model.parameters() if each.requires_grad]

    def step(self, ids_BS: torch.Tensor) -> torch.Tensor:
        """Train on token ids; return the loss."""
        loss = self.loss(ids_BS)
        loss.backward()
        self.optimizer.step()
        for each in self.parameters():
            each.grad = None
        return loss.detach()


def make_model(
    shape: Shape,
    dtype: torch.dtype,
    device: str,
    *,
    rank: int,
    recompute: bool,
    zero_b: bool = True,
    prepare: Iterable[Callable[[Any], object]] = (),
) -> Any:
    """Return a Llama of random weights and LoRA on all linear layers, equal in every call.

    Args:
        shape: sizes.
        dtype: dtype of the frozen weights; the factors of LoRA are float32.
        device: device of the model.
        rank: rank of LoRA.
        recompute: whether layers compute their forward pass again in the backward pass.
        zero_b: whether the factors B start at zero, as in PEFT, or at random numbers.
        prepare: functions that change the model before LoRA is added.
    """
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        rms_norm_eps=1e-5,
        use_cache=False,
        attn_implementation="sdpa",
    )
    default = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    for change in prepare:
        change(model)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=LINEARS, init_lora_weights=zero_b)
    torch.manual_seed(1)  # the functions in `prepare` may have drawn random numbers
    return get_peft_model(model, lora).train()


def in_training(model: Any, dtype: torch.dtype, kernels: Collection[str] = ()) -> Training:
    """Return the training of a model, in which the named kernels replace layers of PyTorch, transformers and PEFT."""
    use_kernels(model, kernels)
    device = next(model.parameters()).device.type
    options = {"lr": RATE, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    trained = [each for each in model.parameters() if each.requires_grad]
    fused = functools.partial(torch.optim.AdamW, fused=True)
    optimizer = (AdamW if "adamw" in kernels else fused)(trained, **options)
    mean_loss = _chunked_loss if "loss" in kernels else _transformers_loss

    def loss(ids_BS: torch.Tensor) -> torch.Tensor:
        # as in transformers' Trainer with bf16 or fp16: LoRA factors are float32, products are in half precision
        is_half = dtype != torch.float32
        with torch.autocast(device, dtype=dtype) if is_half else contextlib.nullcontext():
            return mean_loss(model, ids_BS)

    return Training(model, loss, optimizer)


def _transformers_loss(model: Any, ids_BS: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids_BS, labels=ids_BS).loss


def _chunked_loss(model: Any, ids_BS: torch.Tensor) -> torch.Tensor:
    causal = model.get_base_model()
    hidden_BSD = causal.model(input_ids=ids_BS).last_hidden_state
    targets = ids_BS[:, 1:].flatten()
    hidden = hidden_BSD[:, :-1].reshape(len(targets), -1)
    return LinearCrossEntropy.apply(hidden, causal.lm_head.weight, targets) / len(targets)


# -- kernels ----------------------------------------------------------------------------------------------------------
class Norm(llama.LlamaRMSNorm):
    """RMS norm by the Triton kernel."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map [..., D] to [..., D]."""
        return RmsNorm.apply(hidden_states, self.weight, self.variance_epsilon)


class Layer(llama.LlamaDecoderLayer):
    """Layer whose first residual addition is part of the second norm."""

    def forward(self, hidden_states: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Map [B, S, D] to [B, S, D]."""
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **inputs)
        norm = self.post_attention_layernorm
        normed, total = RmsNorm.apply(attended, norm.weight, norm.variance_epsilon, hidden_states)
        return total + self.mlp(normed)


class Rotary(llama.LlamaRotaryEmbedding):
    """Tables of angles in float32, one for each row of the batch."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return cos and sin [B, S, H]."""
        tables = super().forward(x[:0].float(), position_ids)
        return tuple(each.expand(len(x), -1, -1).contiguous() for each in tables)


class Attention(llama.LlamaAttention):
    """Attention whose queries and keys are rotated in one launch."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: object = None,
        **options: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Map [B, S, D] to [B, S, D]."""
        assert position_embeddings is not None and past_key_values is None, "generation is not supported"
        sizes = hidden_states.shape[:-1]
        q, k, v = (project(hidden_states).view(*sizes, -1, self.head_dim) for project in self._projections())
        q, k = Rope.apply(q, k, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        rows = (each.transpose(1, 2) for each in (q, k, v))
        out, weights = attend(self, *rows, attention_mask, dropout=0.0, scaling=self.scaling, **options)
        return self.o_proj(out.reshape(*sizes, -1)), weights

    def _projections(self) -> tuple[nn.Module, ...]:
        return self.q_proj, self.k_proj, self.v_proj


class Mlp(llama.LlamaMLP):
    """SwiGLU; if a LoRA linear reads the product, the backward pass recomputes the product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [B, S, D] to [B, S, D]."""
        return self.down_proj(recomputable_gate(self.gate_proj(x), self.up_proj(x), "silu"))


class Lora(PeftLinear):
    """LoRA linear layer with an unquantized or packed base."""

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Map [..., I] to [..., O]."""
        a, b = self.lora_A["default"].weight, self.lora_B["default"].weight
        packed = getattr(self.base_layer, "packed", None)
        base = Dense(self.base_layer.weight) if packed is None else packed
        return LoraLinear.apply(x, a, b, base, self.scaling["default"], *getattr(x, "recompute", ()))


SUBCLASSES = {
    "norms": {llama.LlamaRMSNorm: Norm, llama.LlamaDecoderLayer: Layer},
    "rotation": {llama.LlamaRotaryEmbedding: Rotary, llama.LlamaAttention: Attention},
    "gates": {llama.LlamaMLP: Mlp},
    "lora": {PeftLinear: Lora},
}


def use_kernels(model: nn.Module, kernels: Collection[str]) -> None:
    """Change the classes of a model's layers to classes with the named kernels."""
    subclasses = {old: new for name in kernels for old, new in SUBCLASSES.get(name, {}).items()}
    for module in model.modules():
        module.__class__ = subclasses.get(type(module), type(module))


# -- quantized base ---------------------------------------------------------------------------------------------------
class PackedLinear(nn.Linear):
    """Frozen linear layer with an nf4 weight, `packed`, which is dequantized in each pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., I] to [..., O]."""
        return _Frozen.apply(x, self.packed)


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, base):
        ctx.base = base
        return base.forward(x)

    @staticmethod
    def backward(ctx, gradient):
        rows = gradient.reshape(-1, gradient.shape[-1])
        return ctx.base.input_gradient(rows).reshape(*gradient.shape[:-1], -1), None


def quantize(model: nn.Module, dequantized: bool = False) -> None:
    """Replace the frozen weights under LoRA with nf4 (scales in 8 bits), or with their dequantized values."""
    for module in model.modules():
        if isinstance(module, PeftLinear):
            base = module.base_layer
            packed, device, dtype = PackedWeight.of(base.weight), base.weight.device, base.weight.dtype
            weight = packed.dequantize_in_torch(dtype) if dequantized else torch.empty(0, dtype=dtype, device=device)
            base.weight = nn.Parameter(weight, requires_grad=False)
            if not dequantized:
                base.packed, base.__class__ = packed, PackedLinear
