"""How a run is cut over several devices."""

from __future__ import annotations

from dataclasses import dataclass

from paddlenlp_ext.config.schema import option

_TENSOR_FLAGS = (
    "enable_mp_async_allreduce",
    "enable_mp_skip_c_identity",
    "enable_mp_fused_linear_param_grad_add",
    "enable_sp_async_reduce_scatter",
    "enable_delay_scale_loss",
    "sync_param",
    "sync_grad",
    "sync_moment",
    "replace_with_c_embedding",
    "replace_with_parallel_cross_entropy",
)
_PIPELINE_FLAGS = (
    "disable_p2p_cache_shape",
    "disable_partial_send_recv",
    "enable_delay_scale_loss",
    "enable_dp_comm_overlap",
    "enable_sharding_comm_overlap",
    "enable_timer",
    "enable_release_grads",
    "enable_clear_every_step_cache",
    "enable_overlap_p2p_comm",
    "disable_batch_p2p_comm",
    "best_unbalanced_scheduler",
    "use_dualpipev",
)
_SHARDING_FLAGS = (
    "enable_stage1_tensor_fusion",
    "enable_stage1_overlap",
    "disable_stage1_reduce_avg",
    "enable_stage2_overlap",
    "enable_stage1_broadcast_overlap",
    "enable_stage1_allgather_overlap",
    "split_param",
    "enable_tensor_fusion",
    "enable_overlap",
)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """`config.parallel`."""

    tensor_parallel_degree: int = option(-1, minimum=-1, help="devices that share each layer; -1: off")
    tensor_parallel_config: str = option("", flags=_TENSOR_FLAGS, help="details of tensor parallelism")
    tensor_parallel_output: bool = option(False, help="keep the logits split")
    sequence_parallel: bool = option(False, help="split activations along the sequence between tensor-parallel parts")
    fuse_sequence_parallel_allreduce: bool = option(False, help="one gradient reduction for sequence parallelism")
    split_inputs_sequence_dim: bool = option(True, help="split the inputs along the sequence for sep and context")
    pipeline_parallel_degree: int = option(-1, minimum=-1, help="stages the layers are split into; -1: off")
    pipeline_parallel_config: str = option("", flags=_PIPELINE_FLAGS, help="details of pipeline parallelism")
    virtual_pp_degree: int = option(1, minimum=1, help="parts of a stage that take turns")
    pp_recompute_interval: int = option(1, minimum=0, help="layers between recomputed ones in a pipeline")
    sharding: str = option(
        "", flags=("stage1", "stage2", "stage3", "offload"), help="split optimizer state, gradients, weights"
    )
    sharding_parallel_degree: int = option(-1, minimum=-1, help="devices that share a sharded state; -1: all")
    sharding_parallel_config: str = option("", flags=_SHARDING_FLAGS, help="details of sharding")
    sep_parallel_degree: int = option(-1, minimum=-1, help="devices that share each sequence (all-to-all); -1: off")
    context_parallel_degree: int = option(-1, minimum=-1, help="devices that share each sequence (ring); -1: off")
    expert_parallel_degree: int = option(-1, minimum=-1, help="devices that share the experts; -1: off")
    hybrid_parallel_topo_order: str = option(
        "pp_first", choices=("pp_first", "sharding_first"), help="which axis of the devices is outer"
    )
