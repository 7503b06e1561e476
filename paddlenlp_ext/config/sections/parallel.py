"""Configuration section for the parallel layout: tensor, pipeline, sequence, expert and sharded (ZeRO) parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from paddlenlp_ext.config.dataclass_options import OptionGroup, option
from paddlenlp_ext.config.paddlenlp_flags import COMPAT_FLAGS

_FLAGS = {key: flags.words for key, flags in COMPAT_FLAGS.items()}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(OptionGroup):
    """`config.parallel`: the parallel layout of the run."""

    tensor_parallel_degree: int = option(
        -1, minimum=-1, help="number of devices that each layer is sharded over; -1: off"
    )
    tensor_parallel_config: str = option(
        "", flags=_FLAGS["tensor_parallel_config"], help="PaddleNLP's flags for tensor parallelism"
    )
    tensor_parallel_output: bool = option(False, help="leave the logits sharded")
    sequence_parallel: bool = option(
        False, help="shard activations along the sequence over the tensor-parallel devices"
    )
    fuse_sequence_parallel_allreduce: bool = option(False, help="fuse the gradient all-reduces of sequence parallelism")
    split_inputs_sequence_dim: bool = option(
        True, help="shard the inputs along the sequence for sep and context parallelism"
    )
    pipeline_parallel_degree: int = option(-1, minimum=-1, help="number of pipeline stages; -1: off")
    pipeline_parallel_config: str = option(
        "", flags=_FLAGS["pipeline_parallel_config"], help="PaddleNLP's flags for pipeline parallelism"
    )
    virtual_pp_degree: int = option(
        1, minimum=1, help="number of layer chunks per pipeline stage (interleaved schedule)"
    )
    pp_recompute_interval: int = option(1, minimum=0, help="recompute every n-th layer of a pipeline")
    sharding: str = option(
        "",
        flags=("stage1", "stage2", "stage3", "offload"),
        help="ZeRO: stage1 shards the optimizer state, stage2 also the gradients, stage3 also the weights; "
        "offload (experimental) keeps optimizer state in host memory",
    )
    sharding_parallel_degree: int = option(
        -1,
        minimum=-1,
        winning_aliases=("sharding_degree",),
        help="number of devices that ZeRO shards the state over; -1: all remaining devices; 1: no sharding",
    )
    sharding_parallel_config: str = option(
        "", flags=_FLAGS["sharding_parallel_config"], help="PaddleNLP's flags for sharding"
    )
    sep_parallel_degree: int = option(
        -1, minimum=-1, help="number of devices that each sequence is sharded over (all-to-all); -1: off"
    )
    context_parallel_degree: int = option(
        -1, minimum=-1, help="number of devices that each sequence is sharded over (ring); -1: off"
    )
    expert_parallel_degree: int = option(
        -1,
        minimum=-1,
        help="number of replicas (data x sharding) over which the experts of a layer are distributed; -1: off",
    )
    hybrid_parallel_topo_order: str = option(
        "pp_first",
        choices=("pp_first", "sharding_first"),
        help="second axis of the device mesh, after the data axis: pipeline or sharding",
    )
