"""Token embedding."""

from __future__ import annotations

import paddle
from paddle import nn

from paddlenlp_ext.ops.embedding import embedding


class Embedding(nn.Layer):
    """A table [vocab_size, hidden_size] read by row."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = self.create_parameter([vocab_size, hidden_size], default_initializer=nn.initializer.Constant())

    def forward(self, input_ids: paddle.Tensor) -> paddle.Tensor:
        """Map ids [...] to vectors [..., hidden_size]; of a table in bfloat16 on the CPU they are float32."""
        return embedding(self.weight, input_ids)
