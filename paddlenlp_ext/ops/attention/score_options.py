"""Options of the attention scores: soft-cap, linear biases and sinks.

    s = scale * q k^T
    s = softcap * tanh(s / softcap)              soft-cap (Gemma 2, arXiv:2408.00118)
    s = s - slope * distance                     linear biases (alibi.py)
    p = exp(s) / (exp(sink) + sum(exp(s)))       sink (arXiv:2309.17453; gpt-oss, arXiv:2508.10925)

A sink is a trained logit per head. The softmax includes the sink, but the sink has no value vector.

Shapes: B batch, N query heads, S query positions, T key positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import paddle
import paddle.nn.functional as F

from paddlenlp_ext.ops.soft_cap import soft_cap


@dataclass(frozen=True, eq=False)
class ScoreOptions:
    """Options of the scores; the defaults give plain attention.

    Attributes:
        softcap: bound of the scores, applied before mask and biases; None: no bound.
        slopes: ALiBi slopes, fp32 [N]; None: no linear biases.
        sinks: sink logits [N], any float dtype; None: no sinks.
    """

    softcap: float | None = None
    slopes: np.ndarray | None = None
    sinks: paddle.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """True if the scores are only scaled and masked."""
        return self.softcap is None and self.slopes is None and self.sinks is None

    @property
    def sink_tensors(self) -> tuple[paddle.Tensor, ...]:
        """Sinks as a tuple of one contiguous fp32 tensor; empty without sinks."""
        if self.sinks is None:
            return ()
        sinks_N = self.sinks if self.sinks.dtype == paddle.float32 else self.sinks.astype("float32")
        return (sinks_N.contiguous(),)


PLAIN = ScoreOptions()


def attention_weights(
    scores_BNST: paddle.Tensor, bias: paddle.Tensor, softcap: float | None, sinks_N: paddle.Tensor | None
) -> paddle.Tensor:
    """Return the probabilities of the keys, fp32 [B, N, S, T].

    Args:
        scores_BNST: scaled scores.
        bias: mask and linear biases, broadcast and added after the soft-cap.
        softcap, sinks_N: see `ScoreOptions`.
    """
    scores_BNST = soft_cap(scores_BNST.astype("float32"), softcap) + bias
    if sinks_N is None:
        return F.softmax(scores_BNST, axis=-1)
    sinks_BNS1 = sinks_N.astype("float32").reshape([-1, 1, 1]) + paddle.zeros_like(scores_BNST[..., :1])
    return F.softmax(paddle.concat([scores_BNST, sinks_BNS1], axis=-1), axis=-1)[..., :-1]
