"""Changes of single logits before a token is chosen: penalties of generated tokens, and biases.

Shapes: V vocab.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import paddle


@dataclass(frozen=True)
class Adjustments:
    """Numbers added to logits, as in OpenAI's interface.

    Attributes:
        frequency_penalty: subtracted once for each time that a token was generated.
        presence_penalty: subtracted from every token that was generated.
        logit_bias: number added to the logit of each token id.
    """

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def apply(self, logits_1V: paddle.Tensor, generated: Sequence[int]) -> paddle.Tensor:
        """Return the logits [1, V] after the tokens `generated`, float32 if any of them changes."""
        changes = dict(self.logit_bias)
        if self.frequency_penalty or self.presence_penalty:
            for token, count in Counter(generated).items():
                penalty = self.frequency_penalty * count + self.presence_penalty
                changes[token] = changes.get(token, 0.0) - penalty
        if not changes:
            return logits_1V
        ids_T = paddle.to_tensor([*changes], "int64")
        values_1T = paddle.to_tensor([[*changes.values()]], "float32")
        return paddle.index_add(logits_1V.astype("float32"), ids_T, 1, values_1T)
