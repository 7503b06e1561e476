"""The order in which a run is assembled: rows, model, adapter, recomputation, trainer. Data first: it fails fastest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import paddle

from paddlenlp_ext.checkpoint.model_config import read_model_config
from paddlenlp_ext.checkpoint.resolve import resolve_model
from paddlenlp_ext.checkpoint.tokenizer import AutoTokenizer
from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.sections.model import ModelConfig
from paddlenlp_ext.data.dataset import TokenizedDataset, load_dataset
from paddlenlp_ext.data.template import ChatTemplate, load_template
from paddlenlp_ext.models.auto import AutoModelForCausalLM, decline_flash_attention
from paddlenlp_ext.ops import half
from paddlenlp_ext.peft.base import get_peft_model
from paddlenlp_ext.quant.model import quantization_report, quantize_linears
from paddlenlp_ext.quant.options import QuantOptions
from paddlenlp_ext.train.callbacks import Callback
from paddlenlp_ext.train.trainer import Trainer
from paddlenlp_ext.utils.log import get_logger

logger = get_logger("paddlenlp_ext.train")


@dataclass(frozen=True)
class RunData:
    """What a run reads before it touches any weight; a split that the run does not use is None."""

    tokenizer: Any
    template: ChatTemplate
    train_rows: TokenizedDataset | None
    dev_rows: TokenizedDataset | None


def load_data(config: RunConfig) -> RunData:
    """Tokenizer, template and the tokenized rows of the splits that the run uses.

    Raises:
        ValueError: no such model or dataset, or bad rows in it.
    """
    tokenizer = AutoTokenizer.from_pretrained(config.model.tokenizer_name_or_path or config.model.model_name_or_path)
    template = load_template(config.data.chat_template, tokenizer)
    train_rows = load_dataset(config.data, "train", tokenizer, template) if config.train.do_train else None
    dev_rows = load_dataset(config.data, "dev", tokenizer, template) if config.train.do_eval else None
    return RunData(tokenizer, template, train_rows, dev_rows)


def build_model(config: RunConfig) -> Any:
    """The decoder with its weights, quantized and adapted as the configuration says.

    Raises:
        ValueError: no such model, or one that is stored quantized and no adapter to train over it.
    """
    name, dtype, quantization = config.model.model_name_or_path, weight_dtype(config), quant_options(config.model)
    before = None if config.peft is None else config.peft.before_quantizing
    if config.model.continue_training:
        model = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype,
            use_flash_attention=config.model.use_flash_attention,
            quantization=quantization,
            before_quantizing=before,
        )
    else:
        model_config = read_model_config(resolve_model(name))
        model = AutoModelForCausalLM.from_config(model_config, seed=config.train.seed, dtype=dtype, name_or_path=name)
        if quantization is not None:
            quantize_linears(model, quantization, before)
        if not config.model.use_flash_attention:
            decline_flash_attention(model)
    if model.quantization is not None and config.peft is None and config.train.do_train:
        raise ValueError(
            f"{name} is stored quantized, so that its weights do not train: choose an adapter (lora: true), or start "
            "from the original model."
        )
    if model.quantization is not None:
        logger.info("%s", quantization_report(model))
    return adapt_model(model, config)


def quant_options(config: ModelConfig) -> QuantOptions | None:
    """How the base's linear layers are to be quantized, None where they are not.

    Raises:
        ValueError: a value out of its range.
    """
    if config.weight_quantize_algo is None:
        return None
    return QuantOptions(
        algo=config.weight_quantize_algo,
        block_size=config.weight_blocksize,
        double_quant=config.weight_double_quant,
        double_quant_block_size=config.weight_double_quant_block_size,
    )


def weight_dtype(config: RunConfig) -> str:
    """The format in which the model's matrices are stored.

    That of the matrix products for O2 on an accelerator, and on the CPU where they are frozen; else float32.

    Raises:
        ValueError: bf16 on a CPU for which there are no such products.
    """
    precision = config.precision
    if precision.device == "cpu" and precision.compute_dtype == "bfloat16":
        if half.obstacle() is not None:
            raise ValueError(
                f"bf16: true needs the native library on the CPU, and {half.obstacle()}; "
                "mend that, or set bf16: false to compute in float32"
            )
        return "float32" if config.peft is None else "bfloat16"
    return precision.compute_dtype if precision.fp16_opt_level == "O2" else "float32"


def adapt_model(model: Any, config: RunConfig) -> Any:
    """Switch recomputation on and inject the adapter. Reads no weights unless the method starts from them."""
    if config.train.recompute:
        model.enable_recompute()
    return model if config.peft is None else get_peft_model(model, config.peft, seed=config.train.seed)


def build_trainer(config: RunConfig, data: RunData, callbacks: Iterable[Callback] = ()) -> Trainer:
    """Everything, ready to train or evaluate, on the device that the configuration names."""
    paddle.set_device(config.precision.device)
    model = build_model(config)
    model.end_at({*data.template.stop_token_ids, data.tokenizer.eos_token_id} - {None})
    return Trainer(model, config, data.train_rows, data.dev_rows, data.tokenizer, callbacks=callbacks)
