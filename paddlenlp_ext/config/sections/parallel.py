"""How a run is cut over several devices."""

from __future__ import annotations

from dataclasses import dataclass

from paddlenlp_ext.config.flags import PIPELINE_FLAGS, SHARDING_FLAGS, TENSOR_FLAGS
from paddlenlp_ext.config.schema import option


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """`config.parallel`."""

    tensor_parallel_degree: int = option(-1, minimum=-1, help="devices that share each layer; -1: off")
    tensor_parallel_config: str = option("", flags=tuple(TENSOR_FLAGS), help="details of tensor parallelism")
    tensor_parallel_output: bool = option(False, help="keep the logits split")
    sequence_parallel: bool = option(False, help="split activations along the sequence between tensor-parallel parts")
    fuse_sequence_parallel_allreduce: bool = option(False, help="one gradient reduction for sequence parallelism")
    split_inputs_sequence_dim: bool = option(True, help="split the inputs along the sequence for sep and context")
    pipeline_parallel_degree: int = option(-1, minimum=-1, help="stages the layers are split into; -1: off")
    pipeline_parallel_config: str = option("", flags=tuple(PIPELINE_FLAGS), help="details of pipeline parallelism")
    virtual_pp_degree: int = option(1, minimum=1, help="parts of a stage that take turns")
    pp_recompute_interval: int = option(1, minimum=0, help="layers between recomputed ones in a pipeline")
    sharding: str = option(
        "", flags=("stage1", "stage2", "stage3", "offload"), help="split optimizer state, gradients, weights"
    )
    sharding_parallel_degree: int = option(-1, minimum=-1, help="devices that share a sharded state; -1: all")
    sharding_parallel_config: str = option("", flags=tuple(SHARDING_FLAGS), help="details of sharding")
    sep_parallel_degree: int = option(-1, minimum=-1, help="devices that share each sequence (all-to-all); -1: off")
    context_parallel_degree: int = option(-1, minimum=-1, help="devices that share each sequence (ring); -1: off")
    expert_parallel_degree: int = option(-1, minimum=-1, help="devices that share the experts; -1: off")
    hybrid_parallel_topo_order: str = option(
        "pp_first", choices=("pp_first", "sharding_first"), help="which axis of the devices is outer"
    )
