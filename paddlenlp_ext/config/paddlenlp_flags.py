"""Flags of PaddleNLP's `*_parallel_config` keys, and their effect here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CompatFlags:
    """Flags of one of PaddleNLP's `*_parallel_config` keys.

    Attributes:
        owner: key that enables this kind of parallelism.
        what: name of this kind of parallelism, for messages.
        always: flags for behaviour that is always on.
        no_effect: flags that are ignored, because they do not change the results.
        unavailable: flag -> reason why the flag is rejected.
    """

    owner: str
    what: str
    always: frozenset[str]
    no_effect: frozenset[str]
    unavailable: dict[str, str]

    @property
    def words(self) -> tuple[str, ...]:
        """Return all known flags, sorted."""
        return tuple(sorted({*self.always, *self.no_effect, *self.unavailable}))

    def message(self, key: str, word: str) -> str:
        """Return the message about the flag `word` of `key`."""
        if word in self.unavailable:
            return f"{key}: {word} is not available: {self.unavailable[word]}; leave it out"
        return f"{key}: {word} {'is always on' if word in self.always else 'does not change the results'}"


def _flags(
    owner: str, what: str, always: str, no_effect: str, unavailable: dict[str, str] | None = None
) -> CompatFlags:
    return CompatFlags(owner, what, frozenset(always.split()), frozenset(no_effect.split()), unavailable or {})


COMPAT_FLAGS = {
    "tensor_parallel_config": _flags(
        "tensor_parallel_degree",
        "tensor parallelism",
        "enable_mp_skip_c_identity enable_delay_scale_loss replace_with_c_embedding "
        "replace_with_parallel_cross_entropy",
        "enable_mp_async_allreduce enable_mp_fused_linear_param_grad_add enable_sp_async_reduce_scatter "
        "sync_param sync_grad sync_moment",
    ),
    "pipeline_parallel_config": _flags(
        "pipeline_parallel_degree",
        "pipeline",
        "disable_p2p_cache_shape disable_partial_send_recv enable_delay_scale_loss enable_release_grads "
        "enable_clear_every_step_cache disable_batch_p2p_comm",
        "enable_dp_comm_overlap enable_sharding_comm_overlap enable_timer enable_overlap_p2p_comm "
        "best_unbalanced_scheduler",
        {"use_dualpipev": "the pipeline schedule is interleaved, not V-shaped"},
    ),
    "sharding_parallel_config": _flags(
        "sharding",
        "sharding",
        "enable_stage1_tensor_fusion disable_stage1_reduce_avg enable_tensor_fusion",
        "enable_stage1_overlap enable_stage2_overlap enable_stage1_broadcast_overlap enable_stage1_allgather_overlap "
        "split_param enable_overlap",
    ),
}
