"""Assembly of a run from its data: model, adapter, sharding, trainer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import paddle

from paddlenlp_ext._runtime import release_freed_memory
from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.data.streaming.token_stream import TokenStream
from paddlenlp_ext.data.training_rows import TrainingRows
from paddlenlp_ext.models.auto import build_skeleton, load_values
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.init_weights import initialize_weights
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.ops.cpp import bf16
from paddlenlp_ext.parallel.expert_parallel import ExpertShards, check_experts
from paddlenlp_ext.parallel.load_weights import load_shards
from paddlenlp_ext.parallel.mesh import Mesh
from paddlenlp_ext.parallel.pipeline.cost_model import FlopEstimate
from paddlenlp_ext.parallel.pipeline.runtime import Pipeline
from paddlenlp_ext.parallel.pipeline.stages import allocate_own_parameters, assign_stages, plan_stages
from paddlenlp_ext.parallel.process_group import DistributedProcesses
from paddlenlp_ext.parallel.sequence_parallel import SequenceShards
from paddlenlp_ext.parallel.tensor_parallel import apply_tensor_plan, check_tensor_plan
from paddlenlp_ext.parallel.zero import Sharding, build_sharding
from paddlenlp_ext.peft.formats.fused_projections import with_parts
from paddlenlp_ext.peft.modules_to_save import drop_base_values
from paddlenlp_ext.peft.parameter_count import describe_experts, describe_kinds
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.quantization.quantize_model import quantization_report, quantize_linears, quantized_layers
from paddlenlp_ext.trainer.added_tokens import with_trained_tokens
from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.forward_backward import ForwardBackward, build_forward_backward
from paddlenlp_ext.trainer.objectives.dpo_objective import PreferenceObjective
from paddlenlp_ext.trainer.objectives.objective import Objective
from paddlenlp_ext.trainer.objectives.reward_objective import RewardObjective
from paddlenlp_ext.trainer.process_group_protocol import ProcessGroup, SingleProcess
from paddlenlp_ext.trainer.run_data import RunData
from paddlenlp_ext.trainer.trainer import Trainer
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.trainer")
_SAMPLED_ROWS = 512
"""Rows of a stream from which a pipeline estimates the cost of a layer."""


@dataclass(frozen=True)
class BuiltModel:
    """Model that is ready to train, and how it is distributed.

    Attributes:
        model: the model, with the parameters of this process.
        sharding: ZeRO sharding over the mesh; None without ZeRO.
        pipeline: stage of this process; None if every process has all layers.
        experts: experts that the replicas divide; None without expert parallelism.
    """

    model: CausalLM | PeftModel
    sharding: Sharding | None = None
    pipeline: Pipeline | None = None
    experts: ExpertShards | None = None


def build_model(
    source: ModelSource, config: RunConfig, mesh: Mesh | None = None, rows: TrainingRows | None = None
) -> BuiltModel:
    """Build the model of a run: load, quantize, adapt and shard it.

    If each rank can read its own slices, the model is sharded as a skeleton and filled last, so that no rank ever holds
    the full model. Otherwise every rank fills the full model (in a pipeline, its stage) and then keeps only its shards.

    Args:
        source: the base model.
        config: the run's configuration.
        mesh: processes that share the model; None: a single process.
        rows: training rows, from which a pipeline estimates the cost of a layer.

    Raises:
        ValueError: the weights cannot be trained or belong to another model, or the mesh cannot split the model. In the
            last case no weight has been read.
    """
    mesh = mesh or Mesh()
    model = build_skeleton(source, weight_dtype(config), config.model.use_flash_attention)
    if mesh.tensor.size > 1:
        check_tensor_plan(model, mesh.tensor.size, source.quantization)
    check_experts(model.config, mesh.experts.size, mesh.tensor.size)
    pipeline = _build_pipeline(model, config, mesh, rows)
    _place_stage(model, pipeline)

    fills_slices = _can_fill_slices(source, config, mesh)
    if not fills_slices:
        _fill(model, source, config)
    adapted = adapt_model(model, config)
    _place_stage(adapted, pipeline)  # the adapter's parameters too

    sequence = None
    if mesh.tensor.size > 1:
        sequence = SequenceShards(mesh.tensor) if config.parallel.sequence_parallel else None
        apply_tensor_plan(adapted, mesh.tensor, sequence)
        _place_stage(adapted, pipeline, sequence)  # sharding replaced parameters
    experts = None
    if mesh.experts.size > 1:
        experts = ExpertShards(adapted, mesh.experts)
        _place_stage(adapted, pipeline, sequence)
    sharding = build_sharding(adapted, mesh, config.parallel.sharding)
    if fills_slices:
        load_shards(adapted, source.open_weights())
    release_freed_memory()
    described = describe_experts(adapted)
    if described is not None:
        logger.info("%s", described)
        logger.info("trained parameters: %s", describe_kinds(adapted))
    return BuiltModel(adapted, sharding, pipeline, experts)


def _build_pipeline(model: CausalLM, config: RunConfig, mesh: Mesh, rows: TrainingRows | None) -> Pipeline | None:
    """Assign the layers to the stages of the pipeline, and set the decoder's stage.

    Raises:
        ValueError: the model has fewer layers than the pipeline has chunks.
    """
    if mesh.pipeline.size == 1:
        return None
    sample = rows.head(_SAMPLED_ROWS) if isinstance(rows, TokenStream) else rows
    work = FlopEstimate.from_rows(sample, config.peft is None, RecomputePlan.from_config(config.train))
    plan = plan_stages(model.config, mesh.pipeline.size, config.parallel.virtual_pp_degree, work)
    logger.info("pipeline:\n%s", plan.table())
    pipeline = Pipeline(model, plan, mesh.pipeline)
    model.model.stage = pipeline
    return pipeline


def _place_stage(
    model: CausalLM | PeftModel, pipeline: Pipeline | None, sequence: SequenceShards | None = None
) -> None:
    """Drop the values of other stages; repeat when parameters are added or replaced."""
    if pipeline is not None:
        pipeline.sequence = sequence
        assign_stages(model, pipeline.plan, pipeline.axis.index)


def _can_fill_slices(source: ModelSource, config: RunConfig, mesh: Mesh) -> bool:
    """Return whether ranks can read only their slices: floating-point weights, and no adapter computed from them."""
    if mesh.pipeline.size > 1 or not config.model.continue_training:
        return False
    if mesh.tensor.size * mesh.sharding.size * mesh.experts.size == 1:
        return False
    starts_from_weights = config.peft is not None and config.peft.starts_from_weights
    return source.quantization is None and not starts_from_weights


def _fill(model: CausalLM, source: ModelSource, config: RunConfig) -> None:
    """Read or initialize the parameters that this process holds, and quantize them if requested.

    Raises:
        ValueError: see `load_values`; or the weights are stored quantized and no adapter trains.
    """
    before = None if config.peft is None else with_parts(config.peft, model.config.fused_layers).before_quantizing
    if config.model.continue_training:
        load_values(model, source, before)
    else:
        allocate_own_parameters(model)
        initialize_weights(model, config.train.seed, model.config.initializer_range)
        if source.requested_quantization is not None:
            quantize_linears(model, source.requested_quantization, before)
    if model.quantization is not None and config.peft is None and config.train.do_train:
        raise ValueError(
            f"{source.name} is stored quantized, and quantized weights cannot be trained; choose an adapter (lora: "
            "true), or start from the original model"
        )
    if quantized_layers(model):
        logger.info("%s", quantization_report(model))


def weight_dtype(config: RunConfig) -> str:
    """Return the format in which the model's matrices are stored.

    | device | format |
    |---|---|
    | CPU | compute format with O2, or if the matrices are frozen (adapters), else float32 |
    | accelerator | compute format with O2, else float32 |

    On a CPU without the C++ library's bf16 products, `fp16: true` has no effect.

    Raises:
        ValueError: bf16 on such a CPU.
    """
    precision = config.precision
    on_cpu = precision.device == "cpu"
    reason = bf16.unavailable_reason() if on_cpu and precision.compute_dtype == "bfloat16" else None
    if reason is not None and precision.bf16:
        raise ValueError(
            f"bf16: true needs the C++ library on the CPU, and {reason}; install what is missing, or set bf16: "
            "false to compute in float32"
        )
    if reason is not None:
        logger.warning("fp16 has no effect, the run computes in float32: %s", reason)
        return "float32"
    is_half = precision.fp16_opt_level == "O2" or (on_cpu and config.peft is not None)
    return precision.compute_dtype if is_half else "float32"


def adapt_model(model: CausalLM, config: RunConfig) -> CausalLM | PeftModel:
    """Enable recomputation and inject the adapter; only methods that start from the weights read them."""
    plan = RecomputePlan.from_config(config.train)
    if plan is not None:
        model.enable_recompute(plan)
    if config.peft is None:
        return model
    adapted = get_peft_model(model, config.peft, seed=config.train.seed)
    drop_base_values(model)
    return adapted


def build_trainer(config: RunConfig, data: RunData, callbacks: Iterable[Callback] = ()) -> Trainer:
    """Build the model on the configured device and mesh, and the trainer around it."""
    paddle.set_device(config.precision.device)
    config = with_trained_tokens(config, data.source)
    mesh = Mesh.from_config(config.parallel)
    built = build_model(data.source, config, mesh, data.any_rows)
    built.model.add_eos_token_ids({*data.template.stop_token_ids, data.tokenizer.eos_token_id} - {None})
    process_group: ProcessGroup = SingleProcess()
    if mesh.world.size > 1:
        process_group = DistributedProcesses(mesh, built.sharding, built.experts)
    forward_backward = build_forward_backward(built.model, built.pipeline)
    objective = _build_objective(config, built.model, forward_backward, process_group)
    rows = (data.train_rows, data.eval_rows)
    return Trainer(
        built.model,
        config,
        *rows,
        data.tokenizer,
        compute_metrics=data.compute_metrics,
        callbacks=callbacks,
        process_group=process_group,
        forward_backward=forward_backward,
        objective=objective,
    )


def _build_objective(
    config: RunConfig, model: CausalLM | PeftModel, forward_backward: ForwardBackward, process_group: ProcessGroup
) -> Objective | None:
    """Build the objective of preference training or of a reward model; None: that of fine-tuning."""
    if config.reward is not None:
        return RewardObjective(config, model)
    if config.preference is not None:
        return PreferenceObjective(config, model, forward_backward, process_group)
    return None
