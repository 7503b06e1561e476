"""Call every collective of the plug-in in each process, and compare the results with NumPy."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed as dist

LENGTH = 40_001  # several pieces of shared memory, the last one incomplete
REDUCED = ("int8", "int16", "int32", "int64", "float16", "bfloat16", "float32")
COPIED = ("int8", "int32", "int64", "float16", "bfloat16", "float32", "uint8", "bool", "float64")


def tensor_of(rank: int, dtype: str, length: int = LENGTH) -> paddle.Tensor:
    """Return small integers that every dtype holds exactly."""
    return paddle.to_tensor((np.arange(length) * (rank + 1)) % 7 - 3).astype(dtype)


def values(tensor: paddle.Tensor) -> np.ndarray:
    return tensor.astype("float64").numpy()


def check_reductions(rank: int, size: int, dtype: str) -> None:
    parts = np.stack([values(tensor_of(one, dtype)) for one in range(size)])
    for op, want in (
        (dist.ReduceOp.SUM, parts.sum(0)),
        (dist.ReduceOp.MAX, parts.max(0)),
        (dist.ReduceOp.MIN, parts.min(0)),
    ):
        everywhere, on_last = tensor_of(rank, dtype), tensor_of(rank, dtype)
        dist.all_reduce(everywhere, op=op)
        np.testing.assert_array_equal(values(everywhere), want)
        dist.reduce(on_last, dst=size - 1, op=op)
        if rank == size - 1:
            np.testing.assert_array_equal(values(on_last), want)
    share = paddle.empty([LENGTH], dtype)
    dist.reduce_scatter(share, tensor_of(rank, dtype, LENGTH * size))
    whole = sum(values(tensor_of(one, dtype, LENGTH * size)) for one in range(size))
    np.testing.assert_array_equal(values(share), whole[rank * LENGTH : (rank + 1) * LENGTH])


def check_copies(rank: int, size: int, dtype: str) -> None:
    own, parts = tensor_of(rank, dtype), [values(tensor_of(one, dtype)) for one in range(size)]
    gathered: list[paddle.Tensor] = []
    dist.all_gather(gathered, own)
    np.testing.assert_array_equal([values(part) for part in gathered], parts)
    broadcast = own.clone()
    dist.broadcast(broadcast, src=1)
    np.testing.assert_array_equal(values(broadcast), parts[1])
    received = paddle.empty_like(own)
    if rank % 2:
        dist.recv(received, src=rank - 1)
        dist.send(own, dst=rank - 1)
    else:
        dist.send(own, dst=rank + 1)
        dist.recv(received, src=rank + 1)
    np.testing.assert_array_equal(values(received), parts[rank ^ 1])


def check_exchange(rank: int, size: int) -> None:
    """Send rank + 1 rows to every process, in messages of several pieces."""
    rows = paddle.full([(rank + 1) * size, LENGTH], float(rank))
    received = paddle.empty([size * (size + 1) // 2, LENGTH])
    counts = [source + 1 for source in range(size)]
    dist.alltoall_single(received, rows, in_split_sizes=[rank + 1] * size, out_split_sizes=counts)
    np.testing.assert_array_equal(received.numpy()[:, -1], np.repeat(np.arange(size), counts))


def check_refusal() -> None:
    """Check that float64 is not reduced, as on Ascend devices."""
    try:
        dist.all_reduce(paddle.ones([1], "float64"))
    except Exception as error:
        assert "CustomDevice error" in str(error), error
    else:
        raise AssertionError("float64 was reduced")


def main() -> None:
    dist.init_parallel_env()
    rank, size = dist.get_rank(), dist.get_world_size()
    assert paddle.get_device() == f"stub:{rank % 2}"
    for dtype in REDUCED:
        check_reductions(rank, size, dtype)
    for dtype in COPIED:
        check_copies(rank, size, dtype)
    check_exchange(rank, size)
    dist.barrier()
    check_refusal()


if __name__ == "__main__":
    main()
