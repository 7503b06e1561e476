"""Load balancing of experts: token counts per expert, and the auxiliary loss of the routers.

    loss = c E sum_e f_e P_e        f_e: choices of expert e per token        P_e: mean probability of expert e

f and P are means over all tokens of a micro-batch and all expert layers (Switch Transformer, arXiv:2101.03961,
equations 4 to 6). As in transformers, choices and probabilities come from the softmax of the logits, even if the router
uses another function. f has no gradient, so the gradient of the loss with respect to P is known after the forward pass.
The backward pass multiplies this gradient by the Jacobian of the softmax, and adds the product to the gradient of the
router logits. The loss is attached to the hidden states at the end of the decoder:

    forward    router 0 --> ... --> router N --> final norm --> [loss = c E sum f P]
    backward   router 0 <-- ... <-- router N <--------- gradient of the loss, for all routers

f and P are means over all layers, so pipeline stages exchange sums:

    forward    stage 0 --- sums of f and P over its layers ---> stage 1, adds its own ---> ... ---> last stage, loss
    backward   stage 0 <-------------- f times the gradient of the loss <------------------------- last stage

Shapes: T tokens, E experts, K chosen experts, B batch, S sequence, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from paddlenlp_ext.nn.recompute import value_of_first_run
from paddlenlp_ext.paddle_compat import is_symbolic


@dataclass
class RoutedPass:
    """Router statistics of one forward pass through all layers, or through the layers of a pipeline stage.

    Attributes:
        num_experts: E.
        token_mask: [T], 0 for padding; None: no padding.
        is_counted: whether the tokens count towards the expert load.
        choices, probabilities: sums over the tokens, [E], keyed by layer index.
        num_tokens: T without padding; 0 before the first router.
        earlier_sums: result of `sums` from the earlier pipeline stages; None on the first stage.
        slopes: f times the gradient of this loss, [E]; None until the backward pass of the loss.
    """

    num_experts: int
    token_mask: paddle.Tensor | None = None
    is_counted: bool = True
    choices: dict[int, paddle.Tensor] = field(default_factory=dict)
    probabilities: dict[int, paddle.Tensor] = field(default_factory=dict)
    num_tokens: float = 0.0
    earlier_sums: paddle.Tensor | None = None
    slopes: paddle.Tensor | None = None

    def sums(self) -> paddle.Tensor:
        """Return the sums of choices and of probabilities over all layers so far, and T, float32 [2E + 1]."""
        total = paddle.zeros([2 * self.num_experts + 1], "float32") if self.earlier_sums is None else self.earlier_sums
        if not self.choices:
            return total
        own = [paddle.add_n(list(each.values())) for each in (self.choices, self.probabilities)]
        tokens = paddle.full([1], self.num_tokens, "float32")
        return paddle.concat([total[:-1] + paddle.concat(own), tokens])

    def means(self, num_routers: int) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return f and P, each [E]: means over all tokens and all layers with routers."""
        sums = self.sums()
        f, p = paddle.split(sums[:-1] / (sums[-1] * num_routers), 2)
        return f, p


class LoadBalance:
    """Load balancing of the experts of a decoder.

    Args:
        num_experts: E.
        top_k: K.
        num_layers: number of layers of the decoder, including dense layers.
        num_routers: number of layers with experts.
        coefficient: coefficient c of the auxiliary loss; 0: no loss.

    Attributes:
        loss: auxiliary loss of the last forward pass, a scalar with a gradient; None without an auxiliary loss.
        share: factor of the loss's gradients; 1 / R if R processes compute the same gradients and sum them.
        current: statistics of the last forward pass.
    """

    def __init__(
        self, num_experts: int, top_k: int, num_layers: int, num_routers: int, coefficient: float = 0.0
    ) -> None:
        self.num_experts, self.top_k, self.num_routers, self.coefficient = num_experts, top_k, num_routers, coefficient
        self.loss: paddle.Tensor | None = None
        self.share = 1.0
        self._token_mask: np.ndarray | None = None
        self._is_counted = True
        self._counts = np.zeros((num_layers, num_experts))
        self.current = RoutedPass(num_experts)

    @contextmanager
    def without_padding(self, token_mask: np.ndarray | None, is_counted: bool = True) -> Iterator[None]:
        """Exclude padding from the statistics of forward passes within a `with` block.

        Args:
            token_mask: [B, S], 0 for padding; None: no padding.
            is_counted: whether the tokens count towards the expert load.
        """
        self._token_mask = None if token_mask is None or token_mask.all() else token_mask
        self._is_counted = is_counted
        try:
            yield
        finally:
            self._token_mask, self._is_counted = None, True

    def begin(self) -> None:
        """Reset the statistics for a new forward pass."""
        mask = None if self._token_mask is None else paddle.to_tensor(self._token_mask.reshape(-1).astype(np.float32))
        self.current, self.loss = RoutedPass(self.num_experts, mask, self._is_counted), None

    def observe(self, layer: int, logits_TE: paddle.Tensor) -> paddle.Tensor:
        """Record the router logits of a layer; return the logits with the gradient of the auxiliary loss attached.

        Raises:
            ValueError: the number of tokens differs from the length of the token mask.
        """
        if is_symbolic(logits_TE):
            return logits_TE
        current: RoutedPass = value_of_first_run("load_balance", self.current)
        with paddle.no_grad():
            probabilities_TE = F.softmax(logits_TE.detach(), axis=-1)
            chosen_TE = F.one_hot(paddle.topk(probabilities_TE, self.top_k, axis=-1)[1], self.num_experts).sum(1)
            if current.token_mask is not None:
                if current.token_mask.shape[0] != logits_TE.shape[0]:
                    raise ValueError(
                        f"an expert layer has {logits_TE.shape[0]} tokens, but the attention mask has "
                        f"{current.token_mask.shape[0]}; an adapter with virtual tokens requires batches without "
                        "padding (pad_to_multiple_of: null)"
                    )
                mask_T1 = current.token_mask.unsqueeze(-1)
                chosen_TE, probabilities_TE = chosen_TE * mask_T1, probabilities_TE * mask_T1
            current.choices[layer], current.probabilities[layer] = chosen_TE.sum(0), probabilities_TE.sum(0)
            current.num_tokens = float(logits_TE.shape[0] if current.token_mask is None else current.token_mask.sum())
        if not paddle.is_grad_enabled():  # in evaluation and in the first pass of a recomputed layer
            return logits_TE
        if current.is_counted:
            self._counts[layer] += current.choices[layer].numpy()
        if not self.coefficient or logits_TE.stop_gradient:
            return logits_TE
        return _Observe.apply(logits_TE, self, current)

    def attach_loss(self, hidden_BSD: paddle.Tensor) -> paddle.Tensor:
        """Set `loss`; return the hidden states of the last layer with the loss attached to their autograd graph.

        A decoding step in C++ does not record the logits of its routers, and has no loss.
        """
        is_recorded = bool(self.current.choices) or self.current.earlier_sums is not None
        if not self.coefficient or not is_recorded or is_symbolic(hidden_BSD):
            return hidden_BSD
        hidden_BSD, self.loss = _AttachLoss.apply(hidden_BSD, self, self.current)
        return hidden_BSD

    def pop_counts(self) -> np.ndarray:
        """Return the token counts of the training passes since the last call, per layer and expert, float64 [L, E]."""
        counts, self._counts = self._counts, np.zeros_like(self._counts)
        return counts


def imbalance(counts_LE: np.ndarray) -> float:
    """Return the highest load of an expert divided by the mean load, averaged over layers; 0 without tokens."""
    used_LE = counts_LE[counts_LE.sum(axis=1) > 0]
    return float((used_LE.max(axis=1) / used_LE.mean(axis=1)).mean()) if len(used_LE) else 0.0


class _Observe(PyLayer):
    """Identity function of router logits. The backward pass adds the gradient of the auxiliary loss."""

    @staticmethod
    def forward(ctx, logits_TE, balance, current):
        ctx.balance, ctx.current = balance, current
        ctx.save_for_backward(logits_TE)
        return logits_TE.clone()

    @staticmethod
    def backward(ctx, gradient_TE):
        balance, current = ctx.balance, ctx.current
        if current.slopes is None:
            return gradient_TE
        (logits_TE,) = ctx.saved_tensor()
        p_TE = F.softmax(logits_TE, axis=-1)
        scale = balance.coefficient * balance.num_experts * balance.share / (current.num_tokens * balance.num_routers)
        toward_E = current.slopes * scale
        added_TE = p_TE * (toward_E - (p_TE * toward_E).sum(-1, keepdim=True))
        return gradient_TE + (added_TE if current.token_mask is None else added_TE * current.token_mask.unsqueeze(-1))


class _AttachLoss(PyLayer):
    """Identity function of hidden states that also returns the loss.

    The backward pass of this function runs before the backward pass of every layer.
    """

    @staticmethod
    def forward(ctx, hidden_BSD, balance, current):
        f_E, p_E = current.means(balance.num_routers)
        ctx.current, ctx.f_E = current, f_E
        return hidden_BSD.clone(), balance.coefficient * balance.num_experts * (f_E * p_E).sum()

    @staticmethod
    def backward(ctx, hidden_gradient, loss_gradient):
        ctx.current.slopes = ctx.f_E * loss_gradient
        return hidden_gradient
