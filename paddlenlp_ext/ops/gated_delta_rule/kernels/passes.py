"""Forward and backward pass of a recurrence: the order of the launches and their tensors.

Names: T positions, R documents, G key heads, N heads, H key dimension, E value dimension, M chunks, C positions of a
chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from paddlenlp_ext.ops.gated_delta_rule.kernels.backward import (
    launch_key_gradients,
    launch_state_gradients,
    launch_value_gradients,
    num_parts,
)
from paddlenlp_ext.ops.gated_delta_rule.kernels.forward import launch_outputs, launch_states
from paddlenlp_ext.ops.gated_delta_rule.kernels.inputs import Problem
from paddlenlp_ext.ops.gated_delta_rule.kernels.updates import launch_updates


class Library(NamedTuple):
    """Functions on tensors of Paddle or PyTorch.

    Attributes:
        launch: function that takes a kernel, its grid, its arguments and its constants.
        empty: function that returns an uninitialized tensor beside a tensor, of a shape, in float32 or in the dtype of
            the given tensor.
    """

    launch: Callable[..., None]
    empty: Callable[[Any, Sequence[int], bool], Any]

    def like(self, x: Any) -> Any:
        """Return an uninitialized tensor with the shape and dtype of x."""
        return self.empty(x, x.shape, False)


class States(NamedTuple):
    """Results of a pass over the states.

    Attributes:
        states: states before the chunks, [M, N, H, E].
        final: states after the documents, float32 [R, N, H, E].
        u: U [T, N, E].
        w: W [T, N, H]; None without beta.
        inverse: T [M, N, C, C]; None without beta.
    """

    states: Any
    final: Any
    u: Any
    w: Any
    inverse: Any


def forward(library: Library, problem: Problem) -> tuple[Any, Any]:
    """Return the outputs [T, N, E] and the final states, float32 [R, N, H, E]."""
    o, found = library.like(problem.v), _states(library, problem)
    launch_outputs(library.launch, problem, found.u, found.states, o)
    return o, found.final


def backward(library: Library, problem: Problem, of_o: Any, of_final: Any) -> list[Any]:
    """Return the gradients of q, k, v, the decays, beta (None without beta) and the initial states.

    The gradients of q and k are [parts, T, G, H], to be summed over the parts.

    Args:
        of_o, of_final: gradients of the results of `forward`.
    """
    found, q, v, (launch, empty) = _states(library, problem), problem.q, problem.v, library
    of_states, of_initial = library.like(found.states), library.like(found.final)
    of_v, of_decay = library.like(v), library.like(problem.decay)
    of_qk = empty(q, _squares(problem), False)
    of_u = of_beta = of_kk = None
    if problem.beta is not None:
        of_u, of_beta, of_kk = library.like(found.u), library.like(problem.beta), library.like(of_qk)
    launch_state_gradients(launch, problem, found.w, of_o, of_final, of_states, of_u, of_initial)
    saved = found.states, of_states, of_o
    of_values = of_v, of_decay, of_beta, of_qk, of_kk
    launch_value_gradients(launch, problem, (found.u, found.inverse, *saved, of_u), of_values)
    parts = num_parts(problem)
    of_q, of_k = (empty(q, [parts, *q.shape], parts > 1) for _ in range(2))
    launch_key_gradients(launch, problem, (found.u, *saved, of_v, of_qk, of_kk), (of_q, of_k))
    return [of_q, of_k, of_v, of_decay, of_beta, of_initial]


def _states(library: Library, problem: Problem) -> States:
    (launch, empty), k, v = library, problem.k, problem.v
    u, w, inverse = v, None, None
    if problem.beta is not None:
        u, inverse = empty(k, v.shape, False), empty(k, _squares(problem), False)
        w = empty(k, [*v.shape[:2], k.shape[2]], False)
        launch_updates(launch, problem, inverse, w, u)
    states = empty(k, [problem.num_chunks, *problem.state], False)
    final = empty(k, [problem.num_documents, *problem.state], True)
    launch_states(launch, problem, u, w, states, final)
    return States(states, final, u, w, inverse)


def _squares(problem: Problem) -> list[int]:
    """Return the shape [M, N, C, C]."""
    return [problem.num_chunks, problem.heads[1], problem.lists.size, problem.lists.size]
