"""Build the model of a run: load or initialize the weights, quantize them, inject the adapter, and shard the result."""

from __future__ import annotations

from dataclasses import dataclass

from paddlenlp_ext._runtime import release_freed_memory
from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.data.training_rows import TrainingRows
from paddlenlp_ext.devices import capabilities
from paddlenlp_ext.models.auto import build_skeleton, load_values
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.init_weights import initialize_weights
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.ops.cpp import bf16
from paddlenlp_ext.parallel.expert_parallel import ExpertShards
from paddlenlp_ext.parallel.load_weight_slices import load_shards
from paddlenlp_ext.parallel.mesh import Mesh
from paddlenlp_ext.parallel.pipeline.runtime import Pipeline
from paddlenlp_ext.parallel.pipeline.stages import allocate_own_parameters
from paddlenlp_ext.parallel.zero import Sharding
from paddlenlp_ext.peft.formats.renamed_layers import with_names_in_memory
from paddlenlp_ext.peft.parameter_count import describe_experts, describe_kinds
from paddlenlp_ext.peft.peft_model import PeftModel, get_peft_model
from paddlenlp_ext.quantization.int8_training import multiply_in_int8
from paddlenlp_ext.quantization.quantize_model import quantization_report, quantize_linears, quantized_layers
from paddlenlp_ext.trainer.shard_model import build_pipeline, can_read_slices, check_mesh, place_stage, shard_model
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.trainer")


@dataclass(frozen=True)
class BuiltModel:
    """Model that is ready to train, with its ZeRO shards, pipeline stage and expert shards.

    Attributes:
        model: the model, with the parameters of this process.
        sharding: ZeRO sharding over the mesh; None without ZeRO.
        pipeline: stage of this process; None if every process has all layers.
        experts: expert shards of this process; None without expert parallelism.
        source: files of the base model; None: the model was in memory.
    """

    model: CausalLM | PeftModel
    sharding: Sharding | None = None
    pipeline: Pipeline | None = None
    experts: ExpertShards | None = None
    source: ModelSource | None = None


def build_model(
    source: ModelSource, config: RunConfig, mesh: Mesh | None = None, rows: TrainingRows | None = None
) -> BuiltModel:
    """Build the model of a run: load, quantize, adapt and shard it.

    If each rank can read slices of the weight files, the model is sharded before its weights are read, and a rank never
    holds the full model. If ranks cannot read slices, every rank loads the full model (in a pipeline, its stage) and
    then shards it.

    Args:
        source: the base model.
        config: the run's configuration.
        mesh: processes of the run; None: a single process.
        rows: training rows, from which a pipeline estimates the costs of a layer and of the lm_head.

    Raises:
        ValueError: the weights cannot be trained or do not fit the model, or the mesh cannot split the model. The mesh
            is checked before weights are read.
    """
    mesh = mesh or Mesh()
    model = build_skeleton(source, weight_dtype(config), config.model.use_flash_attention)
    precision = config.precision
    in_bf16_on_cpu = precision.compute_dtype == "bfloat16" and capabilities(precision.device).cpp
    if in_bf16_on_cpu and (reason := bf16.conversion_reason()) is not None:
        logger.info("bf16 saves memory, but matmuls convert their inputs to float32: %s", reason)
    check_float16(model, config)
    check_mesh(model, mesh, source.quantization)
    pipeline = build_pipeline(model, config, mesh, rows)
    place_stage(model, pipeline)
    reads_slices = can_read_slices(source, config, mesh)
    if not reads_slices:
        _load_or_initialize(model, source, config)
    adapted = adapt_model(model, config)
    place_stage(adapted, pipeline)  # also assign the adapter's parameters to stages
    sharding, experts = shard_model(adapted, config, mesh, pipeline)
    if reads_slices:
        load_shards(adapted, source.open_weights())
    release_freed_memory()
    described = describe_experts(adapted)
    if described is not None:
        logger.info("%s", described)
        logger.info("trained parameters: %s", describe_kinds(adapted))
    return BuiltModel(adapted, sharding, pipeline, experts, source)


def _load_or_initialize(model: CausalLM, source: ModelSource, config: RunConfig) -> None:
    """Load or initialize the parameters that this process holds, and quantize them if requested.

    Raises:
        ValueError: weights are missing, damaged or have a wrong shape; or quantized weights would be trained.
    """
    before = None if config.peft is None else with_names_in_memory(config.peft, model.config).before_quantizing
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
    if config.model.int8_training:
        multiply_in_int8(model)


def check_float16(model: CausalLM, config: RunConfig) -> None:
    """Check that the token mixers of a model support the compute dtype of a run.

    Raises:
        ValueError: the run trains in float16, and a token mixer does not support it.
    """
    unsupported = sorted({mixer.kind for mixer in model.config.other_mixers if not mixer.supports_float16})
    if unsupported and config.train.do_train and config.precision.compute_dtype == "float16":
        raise ValueError(
            f"fp16: layers of the kind {', '.join(unsupported)} overflow in float16 training; set bf16: true in place "
            "of fp16"
        )


def weight_dtype(config: RunConfig) -> str:
    """Return the dtype in which the model's matrices are stored.

    | device | dtype |
    |---|---|
    | CPU | compute dtype if `fp16_opt_level` is O2 or the matrices are frozen (adapters), else float32 |
    | accelerator | compute dtype if `fp16_opt_level` is O2, else float32 |

    On a CPU without the C++ library's matmuls, `fp16: true` has no effect.

    Raises:
        ValueError: `bf16: true` on a CPU without the C++ library's matmuls.
    """
    precision = config.precision
    on_cpu = capabilities(precision.device).cpp
    reason = bf16.unavailable_reason() if on_cpu and precision.compute_dtype == "bfloat16" else None
    if reason is not None and precision.bf16:
        raise ValueError(
            f"bf16: true needs the C++ library's bfloat16 matmuls on the CPU, but {reason}; to compute in float32, set "
            "bf16: false"
        )
    if reason is not None:
        logger.warning("fp16 has no effect, and the run computes in float32: %s", reason)
        return "float32"
    is_half = precision.fp16_opt_level == "O2" or (on_cpu and config.peft is not None)
    return precision.compute_dtype if is_half else "float32"


def adapt_model(model: CausalLM, config: RunConfig) -> CausalLM | PeftModel:
    """Enable recomputation and inject the adapter if the configuration requests them; return the model.

    Raises:
        ValueError: `share_prefix` is set, and the model does not support it.
    """
    plan = RecomputePlan.from_config(config.train)
    if plan is not None:
        model.enable_recompute(plan)
    adapted: CausalLM | PeftModel = model
    if config.peft is not None:
        adapted = get_peft_model(model, config.peft, seed=config.train.seed)
        adapted.adapter.replaced.drop_base_values()
    reason = unshareable(adapted) if config.data.share_prefix else None
    if reason is not None:
        raise ValueError(f"share_prefix: {reason}; set share_prefix: false")
    return adapted


def unshareable(model: TrainableModel) -> str | None:
    """Return the reason why sharing prefixes between rows would change the gradient; None if it would not."""
    if model.reads_prompts:
        return "the adapter changes positions that it counts from the end of each row's prompt (reft)"
    balance = model.load_balance
    if balance is not None and balance.coefficient:
        return "the auxiliary loss of the experts is a mean over all positions (router_aux_loss_coef)"
    return None
