"""Tiny model with a tokenizer of bytes, and adapters over it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_ext.generation.continuous_batching import Engine
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.methods.ia3 import IA3Config
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.serve.app import Limits, make_app
from paddlenlp_ext.serve.engine_thread import EngineThread
from paddlenlp_ext.serve.request_reader_processes import ReaderProcesses
from paddlenlp_ext.serve.served_models import ModelSet
from paddlenlp_ext.serve.tokenize_request import RequestReader
from tests.common.byte_tokenizer import byte_tokenizer
from tests.common.models import TINY_LLAMA
from tests.serve.asgi import running

END = "<|end|>"
TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}, called as "
    '<tool_call>{"name": ..., "arguments": ...}</tool_call>\n{% endif %}'
    "{% for m in messages %}<|role|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|role|>assistant\n{% endif %}"
)


def write_models(folder: Path) -> None:
    """Save a model of bytes with a chat template, a LoRA adapter `one`, and an IA3 adapter `two`."""
    tokenizer = byte_tokenizer(END, "<|role|>")
    tokenizer.chat_template = TEMPLATE
    config = {**TINY_LLAMA, "vocab_size": 260, "eos_token_id": tokenizer.eos_token_id, "initializer_range": 0.35}
    config["max_position_embeddings"] = 512
    tokenizer.save_pretrained(folder / "base")
    AutoModelForCausalLM.from_config(config, seed=1).save_pretrained(folder / "base")
    for seed, (name, method) in enumerate({"one": LoRAConfig(rank=3), "two": IA3Config()}.items()):
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "base"), method)
        rng = np.random.default_rng(seed)
        for tensor in model.adapter_state().values():
            tensor.set_value(tensor.numpy() + rng.normal(0, 0.5, tensor.shape).astype(np.float32))
        model.save_pretrained(folder / name)


_readers: dict[int, ReaderProcesses] = {}
"""Reader processes by the id of their models; they start slowly, and end with this process."""


def readers_of(models: ModelSet) -> ReaderProcesses:
    """Return the reader processes of the models; a request may have up to 64 choices."""
    if id(models) not in _readers:
        _readers[id(models)] = ReaderProcesses(RequestReader(models.catalog, max_choices=64))
    return _readers[id(models)]


def served(
    models: ModelSet,
    use: Callable[[Any], Awaitable[Any]],
    limits: Limits | None = None,
    api_key: str | None = None,
    max_waiting: int = 64,
) -> Any:
    """Run `use` with a running application over the models; return its result."""

    async def main() -> Any:
        engine = EngineThread(Engine(models.groups, max_rows=4, prompt_tokens_per_step=16), max_waiting)
        app = make_app(models.catalog, readers_of(models), engine, limits or Limits(), api_key)
        async with running(app):
            return await use(app)

    return asyncio.run(main())
