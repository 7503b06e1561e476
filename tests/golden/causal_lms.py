"""AutoModelForCausalLM of transformers with the model classes that it lacks."""

from __future__ import annotations

from transformers import AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)

__all__ = ["AutoModelForCausalLM"]
