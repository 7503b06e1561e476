"""Scale of queries that grows with their position, for attention over long contexts (Llama 4, Ministral 3).

    scale = 1 + beta log(1 + floor(position / context))

Within the pretraining context, the scale is 1.

Shapes: B batch, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import paddle

from paddlenlp_ext.paddle_compat import is_symbolic


@dataclass(frozen=True)
class QueryScale:
    """Scale of queries that depends on the position.

    Attributes:
        beta: growth of the scale.
        context: number of positions with scale 1.
    """

    beta: float
    context: int

    def __call__(self, position_ids_BS: paddle.Tensor) -> paddle.Tensor | None:
        """Return the scales [B, S, 1, 1], fp32; None if all scales are 1."""
        if not is_symbolic(position_ids_BS) and int(position_ids_BS.max()) < self.context:
            return None
        contexts_BS = paddle.floor(position_ids_BS.astype("float32") / self.context)
        return (1.0 + self.beta * paddle.log(1.0 + contexts_BS)).unsqueeze([-1, -2])
