"""Distribute the model of a run: pipeline stages, then tensor and expert parallelism, then ZeRO.

In a pipeline, call `place_stage` whenever parameters are added or replaced, to drop the parameter values of other
stages.
"""

from __future__ import annotations

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.data.streaming.shuffle_buffer import TokenStream
from paddlenlp_ext.data.training_rows import TrainingRows
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.nn.recompute import RecomputePlan
from paddlenlp_ext.parallel.expert_parallel import ExpertShards, check_experts
from paddlenlp_ext.parallel.mesh import Mesh
from paddlenlp_ext.parallel.pipeline.cost_model import FlopEstimate
from paddlenlp_ext.parallel.pipeline.runtime import Pipeline
from paddlenlp_ext.parallel.pipeline.stages import assign_stages, plan_stages
from paddlenlp_ext.parallel.sequence_parallel import SequenceShards
from paddlenlp_ext.parallel.tensor_parallel import apply_tensor_plan, check_tensor_plan
from paddlenlp_ext.parallel.zero import Sharding
from paddlenlp_ext.peft.peft_model import PeftModel
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.trainer")
_SAMPLED_ROWS = 512
"""Number of rows of a stream from which a pipeline estimates the cost of a layer."""


def check_mesh(model: CausalLM, mesh: Mesh, quantization: QuantizationConfig | None) -> None:
    """Check that the mesh can split the model.

    Raises:
        ValueError: heads, features or experts cannot be divided among the processes.
    """
    if mesh.tensor.size > 1:
        check_tensor_plan(model, mesh.tensor.size, quantization)
    check_experts(model.config, mesh.experts.size, mesh.tensor.size)


def build_pipeline(model: CausalLM, config: RunConfig, mesh: Mesh, rows: TrainingRows | None) -> Pipeline | None:
    """Assign the layers to pipeline stages, and set the stage of the decoder; return None without a pipeline.

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


def place_stage(model: CausalLM | PeftModel, pipeline: Pipeline | None, sequence: SequenceShards | None = None) -> None:
    """Drop the parameter values of other stages; call this function again after parameters are added or replaced."""
    if pipeline is not None:
        pipeline.sequence = sequence
        assign_stages(model, pipeline.plan, pipeline.axis.index)


def can_read_slices(source: ModelSource, config: RunConfig, mesh: Mesh) -> bool:
    """Return whether a rank can read its slices of the weight files without reading the rest.

    Pipelines, quantization and adapters that are initialized from weights need full weights.
    """
    if mesh.pipeline.size > 1 or not config.model.continue_training:
        return False
    if mesh.tensor.size * mesh.sharding.size * mesh.experts.size == 1:
        return False
    starts_from_weights = config.peft is not None and config.peft.starts_from_weights
    return source.quantization is None and not starts_from_weights


def shard_model(
    model: CausalLM | PeftModel, config: RunConfig, mesh: Mesh, pipeline: Pipeline | None
) -> tuple[Sharding | None, ExpertShards | None]:
    """Shard the parameters by tensor parallelism, expert parallelism and ZeRO; return the ZeRO and expert shards."""
    sequence, experts = None, None
    if mesh.tensor.size > 1:
        sequence = SequenceShards(mesh.tensor) if config.parallel.sequence_parallel else None
        apply_tensor_plan(model, mesh.tensor, sequence)
        place_stage(model, pipeline, sequence)  # sharding replaced parameters
    if mesh.experts.size > 1:
        experts = ExpertShards(model, mesh.experts)
        place_stage(model, pipeline, sequence)
    return build_sharding(model, mesh, config.parallel.sharding), experts


def build_sharding(model: CausalLM | PeftModel, mesh: Mesh, name: str) -> Sharding | None:
    """Return the `Sharding` of a run, or None if there is a single sharding rank.

    Args:
        model: `CausalLM` or `PeftModel`, equal on all sharding ranks.
        mesh: device mesh of the run.
        name: value of `config.parallel.sharding`, which contains "stage1", "stage2" or "stage3".
    """
    if mesh.sharding.size == 1:
        return None
    stages = {"stage1": 1, "stage2": 2, "stage3": 3}
    (stage,) = (stages[word] for word in name.split() if word in stages)
    return Sharding(model, mesh, stage)
