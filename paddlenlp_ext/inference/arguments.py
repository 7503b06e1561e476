"""Command-line arguments of programs that load a model. Paddle is not imported."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any

from paddlenlp_ext.config.dataclass_options import OptionGroup, option

NO_VALUE = ("None", "none", "")
"""Values that leave an argument unset on PaddleNLP's command lines."""
QUANT_TYPES = ("weight_only_int8", "weight_only_int4", *NO_VALUE)
"""Values of `quant_type`."""


@dataclass(frozen=True, kw_only=True)
class LoadArguments(OptionGroup):
    """Arguments of programs that load a model, with or without an adapter."""

    model_name_or_path: str = option(
        MISSING, aliases=("model",), help="model folder, .gguf file, built-in name, hub id or adapter folder"
    )
    lora_path: str | None = option(None, aliases=("adapter",), help="folder of an adapter of any method")
    device: str | None = option(None, help="a device (docs/devices.md); unset: a GPU if there is one")
    dtype: str | None = option(
        None,
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the weights; unset: float32 on the CPU, bfloat16 on devices that compute in it",
    )
    use_flash_attention: bool = option(True, help="use fused attention kernels where available")

    @property
    def adapter_path(self) -> str | None:
        """Folder of the adapter."""
        return self.lora_path


@dataclass(frozen=True, kw_only=True)
class ModelArguments(LoadArguments):
    """Arguments of programs that load a model and encode prompts for it."""

    chat_template: str | None = option(
        None,
        help="Jinja or JSON file with the chat template; none: no template; unset: the template of the training run, "
        "else the tokenizer's template",
    )
    chat_template_kwargs: dict[str, Any] | None = option(  # noqa: RUF009 (the default is null)
        None,
        help='variables of the chat template, such as {"enable_thinking": false}; unset: values of the training run',
    )
