"""Words of `tensor_parallel_config`, `pipeline_parallel_config` and `sharding_parallel_config`, and what each asks for.

Most of them choose between ways to compute the same numbers; PaddleNLP's files set them, so all are taken, and a note
says what becomes of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Flag:
    """One word.

    Attributes:
        outcome: "always": what it asks for is so in any case; "no effect": it is not done, and the numbers are the
            same; "not here": refused.
        reason: a half sentence for the message.
    """

    outcome: Literal["always", "no effect", "not here"]
    reason: str

    def message(self, key: str, word: str) -> str:
        """What the user is told."""
        if self.outcome == "not here":
            return f"{key}: {word} is not available: {self.reason}; leave it out"
        return f"{key}: {word} {'has no effect' if self.outcome == 'no effect' else 'is so in any case'}: {self.reason}"


_ONE_BY_ONE = "processes wait for each transfer where it stands"
_SUMMED_AFTERWARDS = "gradients are summed behind the last micro-batch"
_SAME_ON_ALL = "what tensor ranks hold alike gets the same gradient on all of them"
_DIVIDED_ONCE = "losses are divided by the learned tokens of the whole step"
_BUCKETS = "gradients and values travel in buckets"

TENSOR_FLAGS = {
    "enable_mp_async_allreduce": Flag("no effect", _ONE_BY_ONE),
    "enable_mp_skip_c_identity": Flag("always", "one sum serves all layers that read the same input"),
    "enable_mp_fused_linear_param_grad_add": Flag("no effect", "Paddle's own engine adds gradients up"),
    "enable_sp_async_reduce_scatter": Flag("no effect", _ONE_BY_ONE),
    "enable_delay_scale_loss": Flag("always", _DIVIDED_ONCE),
    "sync_param": Flag("no effect", _SAME_ON_ALL),
    "sync_grad": Flag("no effect", _SAME_ON_ALL),
    "sync_moment": Flag("no effect", _SAME_ON_ALL),
    "replace_with_c_embedding": Flag("always", "the embedding is cut along the vocabulary"),
    "replace_with_parallel_cross_entropy": Flag("always", "the loss is computed over a cut head"),
}
PIPELINE_FLAGS = {
    "disable_p2p_cache_shape": Flag("always", "shapes follow from the batch and are never sent"),
    "disable_partial_send_recv": Flag("always", "what is sent is sent whole"),
    "enable_delay_scale_loss": Flag("always", _DIVIDED_ONCE),
    "enable_dp_comm_overlap": Flag("no effect", _SUMMED_AFTERWARDS),
    "enable_sharding_comm_overlap": Flag("no effect", _SUMMED_AFTERWARDS),
    "enable_timer": Flag("no effect", "there is no timer to switch on"),
    "enable_release_grads": Flag("always", "gradients are freed after every step"),
    "enable_clear_every_step_cache": Flag("always", "nothing is kept from step to step"),
    "enable_overlap_p2p_comm": Flag("no effect", _ONE_BY_ONE),
    "disable_batch_p2p_comm": Flag("always", "transfers go one by one"),
    "best_unbalanced_scheduler": Flag("no effect", "there is one timetable, for any number of micro-batches"),
    "use_dualpipev": Flag("not here", "chunks of layers go round the processes and not there and back"),
}
SHARDING_FLAGS = {
    "enable_stage1_tensor_fusion": Flag("always", _BUCKETS),
    "enable_stage1_overlap": Flag("no effect", _SUMMED_AFTERWARDS),
    "disable_stage1_reduce_avg": Flag("always", "gradients are summed, never averaged"),
    "enable_stage2_overlap": Flag("no effect", _ONE_BY_ONE),
    "enable_stage1_broadcast_overlap": Flag("no effect", _ONE_BY_ONE),
    "enable_stage1_allgather_overlap": Flag("no effect", _ONE_BY_ONE),
    "split_param": Flag("no effect", "whole parameters are shared out, the largest first"),
    "enable_tensor_fusion": Flag("always", _BUCKETS),
    "enable_overlap": Flag("no effect", _SUMMED_AFTERWARDS),
}
FLAGS = {
    "tensor_parallel_config": ("tensor_parallel_degree", "tensor parallelism", TENSOR_FLAGS),
    "pipeline_parallel_config": ("pipeline_parallel_degree", "pipeline", PIPELINE_FLAGS),
    "sharding_parallel_config": ("sharding", "sharding", SHARDING_FLAGS),
}
"""A flag string's key: the key that switches on what it is about, what that is, and the words."""
