"""The random matrices of VeRA, as PyTorch's CPU generator draws them, to the bit, without PyTorch.

`torch.Generator().manual_seed(key)` is the Mersenne Twister MT19937 in its original 32-bit seeding (Matsumoto and
Nishimura 1998), which NumPy has too; `Tensor.uniform_` of float32 takes the low 24 bits of each output.
"""

from __future__ import annotations

import numpy as np
import paddle


class Projections:
    """The pair that all layers of an adapter share: `a` [r, widest in], `b` [widest out, r]; no parameters.

    Args:
        rank, widest_in, widest_out: its sizes.
        key: what its values follow from.
        dtype: its format, the base's.
        stored: whether files hold it, not only `key`.
    """

    def __init__(
        self, rank: int, widest_in: int, widest_out: int, key: int, dtype: paddle.dtype, stored: bool = True
    ) -> None:
        self.key, self.dtype, self.stored = key, dtype, stored
        self.a, self.b = self._draw(rank, widest_in, widest_out)

    def redraw(self, key: int) -> None:
        """Become the pair of another key, in place."""
        self.key = key
        for old, new in zip((self.a, self.b), self._draw(*self.a.shape, self.b.shape[0]), strict=True):
            old.set_value(new)

    def _draw(self, rank: int, widest_in: int, widest_out: int) -> list[paddle.Tensor]:
        """Kaiming-uniform for ReLU, U(-sqrt(6 / in), sqrt(6 / in)) for [out, in]: first A, then B."""
        source = TorchUniform(self.key)
        shapes = ((rank, widest_in), (widest_out, rank))
        values = [source.draw(shape, (6 / shape[1]) ** 0.5) for shape in shapes]
        return [paddle.to_tensor(value).astype(self.dtype) for value in values]


class TorchUniform:
    """A stream of uniform float32 numbers.

    Args:
        key: of the generator; its low 32 bits count.
    """

    def __init__(self, key: int) -> None:
        self._bits = np.random.RandomState(key & 0xFFFFFFFF)

    def draw(self, shape: tuple[int, ...], bound: float) -> np.ndarray:
        """The next numbers of U(-bound, bound), in the order in which they lie in memory."""
        raw = self._bits.randint(0, 2**32, shape, dtype=np.uint32) & np.uint32(0xFFFFFF)
        low, high = np.float32(-bound), np.float32(bound)
        # In float64 and rounded once at the end, as the fused multiply-add of PyTorch's build does.
        return (raw * 2.0**-24 * float(high - low) + float(low)).astype(np.float32)
