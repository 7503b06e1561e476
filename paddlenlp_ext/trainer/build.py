"""The order in which a run is assembled: rows, model, adapter, recomputation, trainer. Data first: it fails fastest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import paddle

from paddlenlp_ext.checkpoint.hub import resolve_model
from paddlenlp_ext.checkpoint.open_weights import open_weights
from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.sections import ModelConfig
from paddlenlp_ext.data.dataset import TokenizedDataset, load_dataset
from paddlenlp_ext.models.auto import AutoModelForCausalLM, read_values, stored_quantization
from paddlenlp_ext.models.decoder import CausalLM
from paddlenlp_ext.models.init_weights import initialize_weights
from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.ops.cpu import bf16
from paddlenlp_ext.parallel.load import read_own_part
from paddlenlp_ext.parallel.mesh import Mesh
from paddlenlp_ext.parallel.pipeline.cost_model import FlopEstimate
from paddlenlp_ext.parallel.pipeline.runtime import Pipeline
from paddlenlp_ext.parallel.pipeline.stages import make_own, mark_stages, plan_stages
from paddlenlp_ext.parallel.process_group import DistributedProcesses
from paddlenlp_ext.parallel.sequence_parallel import SequenceShards
from paddlenlp_ext.parallel.tensor_parallel import apply_tensor_plan, check_tensor_plan
from paddlenlp_ext.parallel.zero import Sharding, sharding_of
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.quantization.model import quantization_report, quantize_linears, quantized_linears
from paddlenlp_ext.quantization.options import QuantizationConfig
from paddlenlp_ext.trainer.callbacks.base import Callback
from paddlenlp_ext.trainer.forward_backward import build_forward_backward
from paddlenlp_ext.trainer.process_group import SingleProcess
from paddlenlp_ext.trainer.tokenizer import load_text
from paddlenlp_ext.trainer.trainer import Trainer
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.trainer")


@dataclass(frozen=True)
class RunData:
    """What a run reads before it touches any weight; a split that the run does not use is None.

    Tokenizer and template may be `utils.late.Late`.
    """

    tokenizer: Any
    template: Any
    train_rows: TokenizedDataset | None
    dev_rows: TokenizedDataset | None


def load_data(config: RunConfig) -> RunData:
    """Tokenizer, template and the tokenized rows of the splits that the run uses.

    Raises:
        ValueError: no such model or dataset, or bad rows in it.
    """
    text = load_text(config)
    parts = (text.tokenizer, text.template, text.fingerprint)
    train_rows = load_dataset(config.data, "train", *parts) if config.train.do_train else None
    dev_rows = load_dataset(config.data, "dev", *parts) if config.train.do_eval else None
    return RunData(text.tokenizer, text.template, train_rows, dev_rows)


def build_model(config: RunConfig) -> Any:
    """The decoder with its weights, quantized and adapted as the configuration says.

    Raises:
        ValueError: no such model, or one that is stored quantized and no adapter to train over it.
    """
    model = _skeleton(config)
    _fill(model, config)
    return adapt_model(model, config)


def build_cut_model(config: RunConfig, mesh: Mesh) -> tuple[Any, Sharding | None]:
    """This rank's part of the same model, and how the rest is shared.

    Where nothing is quantized and the adapter does not start from the base's values, the model is built for its
    shapes, cut and shared out, and only then read: each rank reads what it keeps. Else every rank builds the whole
    and keeps its part.

    Raises:
        ValueError: as `build_model`, or the model can't be cut so; in the latter case no weight has been read.
    """
    model, source = _skeleton(config), config.model
    quantization = quant_options(source) or stored_quantization(source.model_name_or_path)
    check_tensor_plan(model, mesh.tensor.size, quantization)
    starts_from_weights = config.peft is not None and config.peft.starts_from_weights
    reads_later = source.continue_training and quantization is None and not starts_from_weights
    if not reads_later:
        _fill(model, config)
    model = adapt_model(model, config)
    if mesh.tensor.size > 1:
        apply_tensor_plan(model, mesh.tensor, _divided_sequence(config, mesh))
    sharding = sharding_of(model, mesh, config.parallel.sharding)
    if reads_later:
        read_own_part(model, open_weights(resolve_model(source.model_name_or_path)))
    return model, sharding


def build_staged_model(config: RunConfig, mesh: Mesh, rows: TokenizedDataset | None) -> tuple[Any, Pipeline]:
    """This stage's layers of the same model, read alone, and its part of the pipeline; `rows` tell what a layer costs.

    Raises:
        ValueError: the model has fewer layers than the pipeline has chunks, or can't be cut as the tensor plan says;
            nothing has been read then.
    """
    own, model = mesh.pipeline.index, _skeleton(config)
    if mesh.tensor.size > 1:
        quantization = quant_options(config.model) or stored_quantization(config.model.model_name_or_path)
        check_tensor_plan(model, mesh.tensor.size, quantization)
    work = FlopEstimate.on_rows(rows, config.peft is None, RecomputePlan.from_config(config.train))
    plan = plan_stages(model.config, mesh.pipeline.size, config.parallel.virtual_pp_degree, work)
    logger.info("pipeline:\n%s", plan.table())
    mark_stages(model, plan, own)
    _fill(model, config)
    pipeline = Pipeline(plan, mesh.pipeline)
    pipeline.install(model)
    model = adapt_model(model, config)
    mark_stages(model, plan, own)
    sequence = _divided_sequence(config, mesh)
    if mesh.tensor.size > 1:
        apply_tensor_plan(model, mesh.tensor, sequence)
        mark_stages(model, plan, own)
    pipeline.install(model, sequence)
    return model, pipeline


def _divided_sequence(config: RunConfig, mesh: Mesh) -> SequenceShards | None:
    """How tensor ranks share positions; None where each has all of them."""
    return SequenceShards(mesh.tensor) if config.parallel.sequence_parallel and mesh.tensor.size > 1 else None


def _skeleton(config: RunConfig) -> CausalLM:
    """The decoder without values."""
    source = config.model
    return AutoModelForCausalLM.without_values(
        source.model_name_or_path, weight_dtype(config), source.use_flash_attention
    )


def _fill(model: CausalLM, config: RunConfig) -> None:
    """Give the parameters that this process holds their values, read or drawn, and quantize them where wished.

    Raises:
        ValueError: as `build_model`.
    """
    name, quantization = config.model.model_name_or_path, quant_options(config.model)
    before = None if config.peft is None else config.peft.before_quantizing
    if config.model.continue_training:
        read_values(model, name, quantization, before)
    else:
        make_own(model)
        initialize_weights(model, config.train.seed, model.config.initializer_range)
        if quantization is not None:
            quantize_linears(model, quantization, before)
    if model.quantization is not None and config.peft is None and config.train.do_train:
        raise ValueError(
            f"{name} is stored quantized, so that its weights do not train: choose an adapter (lora: true), or start "
            "from the original model."
        )
    if quantized_linears(model):
        logger.info("%s", quantization_report(model))


def quant_options(config: ModelConfig) -> QuantizationConfig | None:
    """How the base's linear layers are to be quantized, None where they are not.

    Raises:
        ValueError: a value out of its range.
    """
    if config.weight_quantize_algo is None:
        return None
    return QuantizationConfig(
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
        if bf16.unavailable_reason() is not None:
            raise ValueError(
                f"bf16: true needs the native library on the CPU, and {bf16.unavailable_reason()}; "
                "mend that, or set bf16: false to compute in float32"
            )
        return "float32" if config.peft is None else "bfloat16"
    return precision.compute_dtype if precision.fp16_opt_level == "O2" else "float32"


def adapt_model(model: Any, config: RunConfig) -> Any:
    """Switch recomputation on and inject the adapter. Reads no weights unless the method starts from them."""
    plan = RecomputePlan.from_config(config.train)
    if plan is not None:
        model.enable_recompute(plan)
    return model if config.peft is None else get_peft_model(model, config.peft, seed=config.train.seed)


def build_trainer(config: RunConfig, data: RunData, callbacks: Iterable[Callback] = ()) -> Trainer:
    """Everything, ready to train or evaluate, on the device that the configuration names."""
    paddle.set_device(config.precision.device)
    mesh = Mesh.from_config(config.parallel)
    pipeline = None
    if mesh.pipeline.size > 1:
        model, pipeline = build_staged_model(config, mesh, data.train_rows or data.dev_rows)
        sharding = sharding_of(model, mesh, config.parallel.sharding)
    elif mesh.tensor.size > 1 or mesh.sharding.size > 1:
        model, sharding = build_cut_model(config, mesh)
    else:
        model, sharding = build_model(config), None
    model.add_eos_token_ids({*data.template.stop_token_ids, data.tokenizer.eos_token_id} - {None})
    ranks = SingleProcess() if mesh.world.size == 1 else DistributedProcesses(mesh, sharding)
    rows, passes = (data.train_rows, data.dev_rows), build_forward_backward(model, pipeline)
    return Trainer(model, config, *rows, data.tokenizer, callbacks=callbacks, ranks=ranks, passes=passes)
