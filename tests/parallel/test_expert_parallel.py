"""Exchange of rows between expert ranks, which threads stand in for, against all experts on one process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.nn.experts import Experts, ExpertShape
from paddlenlp_ext.nn.routers import RouterOptions
from paddlenlp_ext.parallel import collectives, expert_parallel, gloo
from paddlenlp_ext.parallel.expert_parallel import ExpertExchange, ExpertShards, check_experts
from paddlenlp_ext.parallel.mesh import Mesh, ProcessAxis
from paddlenlp_ext.parallel.shard_parameters import shard_experts, shard_parameter
from paddlenlp_ext.peft.layers import AdapterLayer
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantized_grouped_linear import QuantizedGroupedLinear, quantize_stack
from paddlenlp_ext.sharding_spec import Shard, full_shape, is_expert_parallel, shard_of
from tests.common.models import TINY_SIZES

HIDDEN = 10
NUM_EXPERTS = 6
CHOICES = {
    "uneven": ([[0, 5], [3, 0], [0, 1], [5, 4], [0, 3]], [[1, 2], [0, 1], [4, 0]]),
    "rank_without_rows": ([[4, 5], [5, 3]], [[3, 4], [4, 5], [5, 4]]),
    "rows_that_all_leave": ([[3, 5], [4, 3], [5, 4]], [[0, 1]]),
    "rank_without_tokens": ([[0, 3], [4, 1]], []),
}


class Group:
    """Group of threads with the all-gather that Paddle's gloo groups have."""

    def __init__(self, rank, size, shared):
        self._rank, self._size, self._shared = rank, size, shared

    def rank(self):
        return self._rank

    def size(self):
        return self._size

    def exchange(self, value):
        """Return the values of all ranks."""
        self._shared.parts[self._rank] = value
        self._shared.barrier.wait(timeout=20)
        values = list(self._shared.parts)
        self._shared.barrier.wait(timeout=20)
        return values

    def all_gather_into_tensor(self, out, part, sync):
        out.set_value(np.concatenate(self.exchange(part.numpy())))
        return SimpleNamespace(wait=lambda: None)


def install(monkeypatch):
    """Use the all-to-all of gloo.py over threads, and for rows that have gradients slices of the other threads' graphs.

    Paddle runs one backward pass at a time, so the ranks have to be parts of one graph.
    """

    def exchange_rows(x, sent, received, group):
        sources = group.exchange((x, sent))
        starts = [sum(sent[: group.rank()]) for _, sent in sources]
        parts = [rows[start : start + n] for (rows, _), start, n in zip(sources, starts, received, strict=True)]
        result = paddle.concat(parts)
        np.testing.assert_array_equal(collectives.all_to_all_rows(x, sent, received, group).numpy(), result.numpy())
        return result

    def alltoall_single(out_tensor, in_tensor, out_split_sizes, in_split_sizes, group):
        gloo._all_to_all_single(group, out_tensor, in_tensor, out_split_sizes or [], in_split_sizes or [])

    def all_gather(parts, part, group):
        gathered = paddle.empty([group.size() * part.shape[0], *part.shape[1:]], part.dtype)
        group.all_gather_into_tensor(gathered, part, True)
        parts += gathered.split(group.size())

    monkeypatch.setattr(expert_parallel, "exchange_rows", exchange_rows)
    monkeypatch.setattr(collectives.dist, "alltoall_single", alltoall_single)
    monkeypatch.setattr(collectives.dist, "all_gather", all_gather)


def on_ranks(size, function):
    """Return the results of function(axis) of all ranks, one thread each."""
    shared = SimpleNamespace(parts=[None] * size, barrier=threading.Barrier(size))
    axes = [ProcessAxis(rank, size, Group(rank, size, shared), tuple(range(size))) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(function, axes))


def build_experts(algo=None):
    """Build experts, quantized in the format `algo` if it is given."""
    experts = Experts(
        HIDDEN,
        ExpertShape(num_experts=NUM_EXPERTS, intermediate_size=7, router=RouterOptions(kind="softmax", top_k=2)),
    )
    rng = np.random.default_rng(0)
    for parameter in experts.parameters():
        parameter.set_value(rng.standard_normal(parameter.shape).astype(np.float32))
    for name in ("gate_up_proj", "down_proj") if algo else ():
        layer, options = getattr(experts, name), QuantizationConfig(algo=algo, double_quant=algo == "nf4")
        packed = quantize_stack(name, layer.weight.__getitem__, NUM_EXPERTS, layer.parts, options)
        setattr(experts, name, QuantizedGroupedLinear(packed))
    return experts


QUANTIZED = pytest.mark.parametrize("algo", [None, "nf4", "weight_only_int8"])


def forward(experts, x, weights, choices, _):
    """Return x, the weights and the result of the experts."""
    x_TD, weights_TK = (paddle.to_tensor(values, stop_gradient=False) for values in (x, weights))
    return x_TD, weights_TK, experts(x_TD, weights_TK, paddle.to_tensor(choices))


def backward(of_ranks, tokens):
    """Return results and gradients of x and of the weights, of all ranks' tokens."""
    paddle.autograd.backward([y for _, _, y in of_ranks], [paddle.to_tensor(toward) for *_, toward in tokens])
    found = [(y.numpy(), x.grad.numpy(), weights.grad.numpy()) for x, weights, y in of_ranks]
    return [np.concatenate(parts) for parts in zip(*found, strict=True)]


def on_one_process(experts, tokens):
    """Return the result of `backward` for all tokens on one process."""
    joined = [np.concatenate(parts) for parts in zip(*tokens, strict=True)]
    return backward([forward(experts, *joined)], [joined])


def assert_close(found, expected):
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def tokens_of(choices_of_ranks, seed=1):
    """Return x, weights, choices and the gradient of the result of each rank's tokens."""
    rng = np.random.default_rng(seed)
    numbers = [len(choices) for choices in choices_of_ranks]

    def draw(number, width):
        return rng.standard_normal((number, width)).astype(np.float32)

    return [
        (draw(number, HIDDEN), draw(number, 2), np.array(choices, np.int64).reshape(number, 2), draw(number, HIDDEN))
        for number, choices in zip(numbers, choices_of_ranks, strict=True)
    ]


@QUANTIZED
@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
def test_expert_exchange_matches_all_experts_on_one_process(monkeypatch, choices, algo):
    install(monkeypatch)
    tokens, full, held = tokens_of(choices), build_experts(algo), [build_experts(algo), build_experts(algo)]
    want = on_one_process(full, tokens)

    def run(axis):
        ExpertExchange(held[axis.index], axis)
        return forward(held[axis.index], *tokens[axis.index])

    assert_close(backward(on_ranks(2, run), tokens), want)
    for name, parameter in full.named_parameters():
        got = np.concatenate([dict(experts.named_parameters())[name].grad.numpy() for experts in held])
        np.testing.assert_allclose(got, parameter.grad.numpy(), rtol=1e-5, atol=1e-5)


def test_expert_exchange_of_three_ranks_within_a_tensor_shard_skips_the_experts_of_other_shards(monkeypatch):
    install(monkeypatch)
    choices = ([[0, 4], [3, 5]], [[5, 1], [3, 2]], [[0, 1]])
    tokens, full = tokens_of(choices), build_experts()
    tensor = ProcessAxis(1, 2, None, (0, 1))

    def keep_tensor_shard(experts):
        for linear in (experts.gate_up_proj, experts.down_proj):
            shard = shard_parameter(linear, "weight", 0, tensor)
            experts.first, experts.num_local = shard.start, shard.stop - shard.start

    keep_tensor_shard(full)
    want = on_one_process(full, tokens)

    def run(axis):
        experts = build_experts()
        keep_tensor_shard(experts)
        ExpertExchange(experts, axis)
        assert (experts.first, experts.num_local) == (3 + axis.index, 1)
        return forward(experts, *tokens[axis.index])

    assert_close(backward(on_ranks(3, run), tokens), want)


def test_exchange_rows_sends_gradients_the_opposite_way(monkeypatch):
    calls = []

    def all_to_all_rows(x, sent, received, group):
        calls.append((sent, received))
        return paddle.ones([sum(received), 2])

    monkeypatch.setattr(collectives, "all_to_all_rows", all_to_all_rows)
    x = paddle.zeros([4, 2])
    x.stop_gradient = False
    collectives.exchange_rows(x, [1, 3], [3, 1], None).sum().backward()
    assert calls == [([1, 3], [3, 1]), ([3, 1], [1, 3])] and x.grad.shape == [4, 2]


@QUANTIZED
def test_gathered_experts_process_all_tokens_without_an_exchange(monkeypatch, algo):
    install(monkeypatch)
    x, weights, choices, _ = tokens_of([CHOICES["uneven"][0]])[0]
    want = build_experts(algo)(*(paddle.to_tensor(values) for values in (x, weights, choices))).numpy()

    def run(axis):
        experts = build_experts(algo)
        exchange = ExpertExchange(experts, axis)
        name = "codes" if algo else "weight"
        own = getattr(experts.down_proj, name)
        assert len(own) == 3
        exchange.gather()
        if axis.index == 0:  # a rank alone: an exchange would wait for the other one
            np.testing.assert_allclose(
                experts(*(paddle.to_tensor(values) for values in (x, weights, choices))).numpy(), want, rtol=1e-6
            )
        exchange.release()
        assert getattr(experts.down_proj, name) is own and (experts.first, experts.num_local) == (3 * axis.index, 3)

    on_ranks(2, run)


def test_shard_experts_of_a_tensor_shard_are_a_slice_of_the_unsharded_experts():
    linear = build_experts().down_proj
    full = linear.weight.numpy()
    shard_parameter(linear, "weight", 0, ProcessAxis(1, 2))
    shard_experts(linear, "weight", ProcessAxis(2, 3))
    assert shard_of(linear.weight) == Shard(0, 5, 6, 6, by_experts=True)
    assert is_expert_parallel(linear.weight) and full_shape(linear.weight) == full.shape
    np.testing.assert_array_equal(linear.weight.numpy(), full[5:])


def test_mesh_holders_of_an_expert_shard_are_its_expert_group_times_the_tensor_ranks():
    mesh = Mesh(
        tensor=ProcessAxis(1, 2, ranks=(12, 13)),
        experts=ProcessAxis(1, 2, ranks=(9, 13)),
        world=ProcessAxis(13, 16),
    )
    assert mesh.holders(Shard(0, 2, 4, 8)) == mesh.holders(None) == {12, 13}
    assert mesh.holders(Shard(0, 2, 4, 8, by_experts=True)) == {8, 9, 12, 13}


@pytest.mark.parametrize(
    ("model", "degrees", "words"),
    [
        ({"model_type": "llama"}, (2,), "expert_parallel_degree 2: the model has no experts"),
        ({"model_type": "mixtral", "num_local_experts": 6}, (4,), "does not divide the 6 experts of a layer; the .* 3"),
        (
            {"model_type": "mixtral", "num_local_experts": 6},
            (3, 6),
            "degree 3 times tensor_parallel_degree 6 does not divide the 6 experts of a layer; the .* is 1",
        ),
    ],
)
def test_check_experts_that_ranks_cannot_divide_names_what_works(model, degrees, words):
    config = AutoModelForCausalLM.from_config({**TINY_SIZES, **model}).config
    check_experts(config, 1)
    with pytest.raises(ValueError, match=words):
        check_experts(config, *degrees)


def test_expert_shards_with_an_adapter_that_experts_share_are_refused():
    model = AutoModelForCausalLM.from_config({**TINY_SIZES, "model_type": "mixtral", "num_local_experts": 4})
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = AdapterLayer(experts.down_proj)
    experts.down_proj.scale = paddle.create_parameter([3], "float32")
    with pytest.raises(
        ValueError, match=r"model\.layers\.1\.mlp\.experts\.down_proj\.scale does not have one slice per"
    ):
        ExpertShards(model, ProcessAxis(0, 2))
