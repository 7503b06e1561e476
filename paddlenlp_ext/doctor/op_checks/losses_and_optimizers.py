"""Test cases of losses, gradient clipping and optimizers."""

from __future__ import annotations

from functools import partial

import paddle

from paddlenlp_ext.doctor.op_checks.case import Inputs, op_case
from paddlenlp_ext.ops.adamw import AdamWUpdate, adamw_8bit_op, adamw_bf16_op, adamw_op
from paddlenlp_ext.ops.adamw.quantizer_8bit import dynamic_8bit
from paddlenlp_ext.ops.adamw.updates import BLOCK, AdamStep, AdamW8BitUpdate, Bf16Update, Moments8Bit
from paddlenlp_ext.ops.gradient_clipping import scale_, sum_of_squares
from paddlenlp_ext.ops.linear_cross_entropy import linear_cross_entropy, sharded_products_op
from paddlenlp_ext.ops.linear_cross_entropy.chunks import losses_by_chunks, sum_of_losses
from paddlenlp_ext.ops.linear_cross_entropy.cross_entropy import cross_entropy_
from paddlenlp_ext.ops.stochastic_rounding import DrawPosition, stochastic_round
from paddlenlp_ext.utils.labels import IGNORED_LABEL

BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-6
SHAPE = (9, 50)


@op_case("linear_cross_entropy")
def run_linear_cross_entropy(inputs: Inputs) -> list[paddle.Tensor]:
    """Compute losses with some ignored labels, without and with a soft-cap."""
    labels = paddle.to_tensor([3, IGNORED_LABEL, 96, 0, 11, IGNORED_LABEL, 50])
    weight = inputs.trained(97, 32)
    return [linear_cross_entropy(inputs.trained(7, 32), weight, labels, softcap=cap)[0] for cap in (None, 5.0)]


class SingleShard:
    """Stand-in for `VocabShards` in a process that holds the entire vocabulary."""

    start, largest_size = 0, 97

    def largest(self, largest_R: paddle.Tensor, first_R: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return both arguments unchanged."""
        return largest_R, first_R

    def sum(self, values: paddle.Tensor) -> paddle.Tensor:
        """Return `values` unchanged."""
        return values


@op_case("vocabulary-parallel cross entropy")
def run_sharded_cross_entropy(inputs: Inputs) -> list[paddle.Tensor]:
    """Compute the loss of hidden states with the vocabulary-parallel code."""
    hidden, weight = inputs.trained(7, 32), inputs.trained(97, 32)
    labels = paddle.to_tensor([3, IGNORED_LABEL, 96, 0, 11, IGNORED_LABEL, 50])
    products = sharded_products_op.choose(hidden)(SingleShard())
    run = partial(losses_by_chunks, products, softcap=None)
    return [sum_of_losses(run, hidden, weight, labels, None, ())[0]]


@op_case("cross_entropy", gpu_dtypes=("float32",))
def run_cross_entropy(inputs: Inputs) -> list[paddle.Tensor]:
    """Compute the losses of logits, and overwrite the logits with their gradient."""
    logits = inputs.frozen(5, 97)
    losses, _ = cross_entropy_(logits, paddle.to_tensor([3, 96, 0, 11, 50]), with_gradient=True)
    return [losses, logits]


@op_case("sum_of_squares", cpu_dtypes=("float32", "bfloat16"))
def run_sum_of_squares(inputs: Inputs) -> list[paddle.Tensor]:
    """Sum the squares of two gradients."""
    return [paddle.to_tensor(sum_of_squares([inputs.frozen(3, 50), inputs.frozen(7)]))]


@op_case("scale", cpu_dtypes=("float32", "bfloat16"))
def run_scale(inputs: Inputs) -> list[paddle.Tensor]:
    """Scale two gradients in place."""
    tensors = [inputs.frozen(3, 50), inputs.frozen(7)]
    scale_(tensors, 0.25)
    return tensors


def _update(inputs: Inputs, dtype: str) -> AdamWUpdate:
    weight, gradient = inputs.frozen(*SHAPE, dtype=dtype), inputs.frozen(*SHAPE, dtype=dtype)
    moments = inputs.frozen(*SHAPE, dtype="float32"), inputs.frozen(*SHAPE, dtype="float32").square()
    powers = paddle.full([1], BETA1**3), paddle.full([1], BETA2**3)
    return AdamWUpdate(weight, gradient, *moments, *powers, 0.01, 0.1)


@op_case("adamw", gpu_dtypes=("float32",))
def run_adamw(inputs: Inputs) -> list[paddle.Tensor]:
    """Update a float32 weight and its moments with AdamW."""
    update = _update(inputs, "float32")
    adamw_op.choose(update.parameter)([update], BETA1, BETA2, EPSILON)
    return [update.parameter, update.moment1, update.moment2]


@op_case("adamw in bfloat16", gpu_dtypes=("bfloat16",), cpu_dtypes=("bfloat16",), keeps_dtype=True)
def run_adamw_bf16(inputs: Inputs) -> list[paddle.Tensor]:
    """Update two bfloat16 weights with AdamW: with a float32 master weight, and with stochastic rounding."""
    with_master, rounded = _update(inputs, "bfloat16"), _update(inputs, "bfloat16")
    master = with_master.parameter.astype("float32")
    updates = [Bf16Update(with_master, master=master), Bf16Update(rounded, position=_position())]
    adamw_bf16_op.choose(with_master.parameter)(updates, BETA1, BETA2, EPSILON)
    return [with_master.parameter, master, rounded.parameter]


@op_case("adamw in 8 bits", gpu_dtypes=("float32",))
def run_adamw_8bit(inputs: Inputs) -> list[paddle.Tensor]:
    """Update a weight twice with 8-bit AdamW; the second update reads quantized moments."""
    weight, blocks = inputs.frozen(*SHAPE), -(-SHAPE[0] * SHAPE[1] // BLOCK)
    codes = [paddle.full([blocks, BLOCK], dynamic_8bit(signed).zero, "uint8") for signed in (True, False)]
    moments = Moments8Bit(codes[0], paddle.zeros([blocks, 1]), codes[1], paddle.zeros([blocks, 1]))
    for number in (1, 2):
        step = AdamStep(BETA1, BETA2, EPSILON, number, 0.01)
        adamw_8bit_op.choose(weight)([AdamW8BitUpdate(weight, inputs.frozen(*SHAPE), moments, step)])
    return [weight, moments.scales1, moments.scales2]


@op_case("stochastic rounding", gpu_dtypes=("float32",))
def run_stochastic_rounding(inputs: Inputs) -> list[paddle.Tensor]:
    """Round values stochastically."""
    return [stochastic_round(inputs.frozen(*SHAPE), _position())]


def _position() -> DrawPosition:
    return DrawPosition(seed=1, tensor=2, step=3, first=0, width=SHAPE[0] * SHAPE[1], stride=SHAPE[0] * SHAPE[1])
