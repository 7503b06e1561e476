"""Changes of single logits before a token is chosen: penalties of generated tokens, and biases.

Shapes: V vocab.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from paddlenlp_ext.generation.prefill_and_decode import ModelLogits, on_host


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

    def apply(self, logits_1V: ModelLogits, generated: Sequence[int]) -> ModelLogits:
        """Return the logits [1, V] after the tokens `generated`; fp32 on the host if any of them changes."""
        changes = dict(self.logit_bias)
        if self.frequency_penalty or self.presence_penalty:
            for token, count in Counter(generated).items():
                penalty = self.frequency_penalty * count + self.presence_penalty
                changes[token] = changes.get(token, 0.0) - penalty
        if not changes:
            return logits_1V
        adjusted_1V = on_host(logits_1V).copy()
        adjusted_1V[0, [*changes]] += np.array([*changes.values()], np.float32)
        return adjusted_1V
