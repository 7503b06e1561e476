"""Token embedding layer."""

from __future__ import annotations

import paddle
from paddle import nn

from paddlenlp_ext.ops.embedding import embedding


class Embedding(nn.Layer):
    """Embedding table [vocab_size, hidden_size] indexed by token id."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = self.create_parameter([vocab_size, hidden_size], default_initializer=nn.initializer.Constant())

    def forward(self, input_ids: paddle.Tensor) -> paddle.Tensor:
        """Map token ids [...] to embeddings [..., hidden_size]. On the CPU, a bfloat16 table gives float32 output."""
        return self.lookup(self.weight, input_ids)

    def lookup(self, table: paddle.Tensor, input_ids: paddle.Tensor) -> paddle.Tensor:
        """Look up token ids [...] in another table [vocab_size, K], such as an adapter factor; return [..., K]."""
        return embedding(table, input_ids)
