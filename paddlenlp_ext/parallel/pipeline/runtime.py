"""Pipeline runtime: each process holds some layers; micro-batches pass from stage to stage and back.

All stages of a pipeline read the same batches, so that only hidden states [B, S, D] and their gradients are sent. With
sequence parallelism, each tensor rank sends its slice [B, P, D] to the same tensor rank of the next stage. If MoE
routers have an auxiliary loss, the stages also send the accumulated router statistics (nn/load_balancing_loss.py).

The forward pass of the model runs unchanged on every stage. The decoder calls its `stage` at three points:

    Decoder.embed                  zeros in the shape of the embeddings, except on the first stage
    Decoder.forward_embeddings     the current chunk of layers, applied to the received hidden states
    CausalLM.logits                the last stage's logits, broadcast to all stages (generation and evaluation)

Fleet's `PipelineLayer` is not used. It requires a list of layers, renames their parameters, and passes only tensors
between stages, so that the document lengths of a packed batch would have to be sent as tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import paddle
import paddle.distributed as dist

from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.nn.attention import AttentionInputs
from paddlenlp_ext.nn.load_balancing_loss import RoutedPass
from paddlenlp_ext.parallel.mesh import ProcessAxis
from paddlenlp_ext.parallel.pipeline.schedule import Entry, Pass, Transfer, build_schedule
from paddlenlp_ext.parallel.pipeline.stages import StagePlan
from paddlenlp_ext.parallel.sequence_parallel import SequenceShards

Message = tuple[paddle.Tensor, ...]
"""Hidden states or their gradient; with an auxiliary loss, also `RoutedPass.sums` or `slopes`. May be empty."""

Forward = Callable[[int, bool], paddle.Tensor | None]
"""Function that runs micro-batch n; the flag says whether the pass ends at the lm_head and returns the loss."""


class _Saved(NamedTuple):
    """Values saved by the forward pass of a chunk for its backward pass."""

    received: paddle.Tensor | None
    output: paddle.Tensor
    routed: RoutedPass | None


class Pipeline:
    """Pipeline stage that this process runs; implements `models.decoder.PipelineStage`.

    Args:
        model: model whose decoder calls this object as its `stage`.
        plan: assignment of layers to processes.
        axis: mesh axis of the pipeline.

    Attributes:
        sequence: split of the sequence over the tensor ranks; None without sequence parallelism, or before the layers
            are sharded.
    """

    def __init__(self, model: CausalLM, plan: StagePlan, axis: ProcessAxis) -> None:
        self.plan, self.axis = plan, axis
        self.sequence: SequenceShards | None = None
        self._decoder, self._vocab_size = model.model, model.config.vocab_size
        balance = self._decoder.load_balance
        self._balance = balance if balance is not None and balance.coefficient else None
        # State of the running pass: its chunk, the received hidden states, and the chunk's output.
        self._chunk: int | None = None
        self._input: Message = ()
        self._output: paddle.Tensor | None = None

    # -- micro-batches of an optimizer step ---------------------------------------------------------------------------
    def run(self, shapes: Sequence[Sequence[int]], forward: Forward, training: bool) -> None:
        """Run the forward passes of all micro-batches and, in training, their backward passes; accumulate gradients.

        Args:
            shapes: full shape of the hidden states of each micro-batch.
            forward: see `Forward`.
            training: whether to run backward passes.
        """
        messages: dict[Pass, Message] = {}  # outgoing messages by producer; incoming messages by consumer
        saved: dict[tuple[int, int], _Saved] = {}
        for entry in self._schedule(len(shapes), training):
            if isinstance(entry, Transfer):
                self._transfer(entry, messages, shapes[entry.producer.micro], training)
                continue
            if self.sequence is not None:
                self.sequence.length = shapes[entry.micro][1]
            if entry.backward:
                messages[entry] = self._backward(saved.pop((entry.chunk, entry.micro)), messages.pop(entry, ()))
            else:
                received = messages.pop(entry, ())
                output = self._forward(entry, received, forward, training)
                routed = self._balance.current if self._balance is not None and training else None
                if output is not None and not self._is_last(entry.chunk):
                    messages[entry] = (output.detach(), *(() if routed is None else (routed.sums(),)))
                if training:
                    assert output is not None, "a chunk with a backward pass must have an output"
                    saved[entry.chunk, entry.micro] = _Saved(received[0] if received else None, output, routed)

    def _schedule(self, num_micro: int, training: bool) -> tuple[Entry, ...]:
        return build_schedule(self.axis.index, self.axis.size, self.plan.num_chunks, num_micro, training)

    def _forward(self, entry: Pass, received: Message, forward: Forward, training: bool) -> paddle.Tensor | None:
        """Run the forward pass of a chunk; return hidden states, or the loss from the last chunk."""
        if received:
            received[0].stop_gradient = not training
        is_last = self._is_last(entry.chunk)
        self._chunk, self._input = entry.chunk, received
        try:
            loss = forward(entry.micro, is_last)
            return loss if is_last else self._output
        finally:
            self._chunk, self._input, self._output = None, (), None

    def _backward(self, saved: _Saved, received: Message) -> Message:
        """Run the backward pass of a chunk; return the message to the previous chunk, empty for the first chunk."""
        gradient, *slopes = received or (None,)
        if saved.routed is not None and slopes:
            saved.routed.slopes = slopes[0]
        if not saved.output.stop_gradient:  # nothing is trainable below the first adapter
            gradients = [None if gradient is None else gradient.astype(saved.output.dtype)]
            paddle.autograd.backward([saved.output], gradients)
        if saved.received is None:
            return ()
        assert saved.received.grad is not None, "hidden states pass through every layer"
        if saved.routed is None:
            return (saved.received.grad,)
        assert saved.routed.slopes is not None, "the loss of the last chunk has the auxiliary loss"
        return saved.received.grad, saved.routed.slopes

    def _transfer(self, entry: Transfer, messages: dict[Pass, Message], shape: Sequence[int], training: bool) -> None:
        """Send or receive one message; `shape` is the full shape of the hidden states of the micro-batch."""
        is_sender, ranks = entry.source == self.axis.index, self.axis.ranks
        group = self.axis.pairs[entry.target if is_sender else entry.source]
        if is_sender:
            hidden, *sums = messages.pop(entry.producer)
            for tensor in (hidden.astype(self._dtype), *sums):
                dist.send(tensor.contiguous(), dst=ranks[entry.target], group=group)
        else:
            local_shape = shape if self.sequence is None else self.sequence.shard_shape(shape)
            received = [paddle.empty(list(local_shape), self._dtype)]
            if self._balance is not None and training:
                experts = self._balance.num_experts
                received.append(paddle.empty([experts if entry.producer.backward else 2 * experts + 1], "float32"))
            for tensor in received:
                dist.recv(tensor, src=ranks[entry.source], group=group)
            messages[entry.consumer] = tuple(received)

    @property
    def _dtype(self) -> Any:
        return self._decoder.norm.weight.dtype

    def _is_last(self, chunk: int) -> bool:
        return chunk == self.plan.num_chunks - 1

    # -- called by the decoder (models.decoder.PipelineStage) ---------------------------------------------------------
    @property
    def is_first(self) -> bool:
        """True on the stage that holds the embedding."""
        return self.axis.index == 0

    def forward_embeddings(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        """Run the current chunk instead of all layers; outside `run`, run one forward pass through all stages."""
        if self._chunk is None:
            return self._run_inference(x_BSD, inputs)
        hidden, *sums = self._input or (x_BSD,)
        if self._balance is not None and sums:
            self._balance.current.earlier_sums = sums[0]
        output = self._run_chunk(self._chunk, hidden, inputs)
        return output if self._is_last(self._chunk) else x_BSD  # an unused tensor in the shape of the result

    def _run_chunk(self, chunk: int, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        """Run the layers of the chunk, and the last norm in the last chunk; store the output for `run`.

        The auxiliary loss of the routers is computed only in training passes.
        """
        start, stop = self.plan.bounds[chunk : chunk + 2]
        self._output = self._decoder.run_layers(x_BSD, inputs, start, stop)
        if not self._is_last(chunk):
            return self._output
        hidden_BSD = self._decoder.final_norm(self._output)
        if self._balance is None or not paddle.is_grad_enabled():
            return hidden_BSD
        return self._balance.attach_loss(hidden_BSD)

    def _run_inference(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        """Run one forward pass through all stages outside `run`; the last stage returns the hidden states."""
        assert not paddle.is_grad_enabled(), "backward passes are possible only in `run`"
        messages: dict[Pass, Message] = {}
        result = x_BSD
        if self.sequence is not None:
            self.sequence.length = x_BSD.shape[1]
        for entry in self._schedule(1, training=False):
            if isinstance(entry, Transfer):
                self._transfer(entry, messages, x_BSD.shape, training=False)
            else:
                output = self._run_chunk(entry.chunk, messages.pop(entry, (x_BSD,))[0], inputs)
                messages[entry] = (output,)
                result = output if self._is_last(entry.chunk) else result
        return result

    def logits(self, hidden: paddle.Tensor, compute_logits: Callable[[paddle.Tensor], paddle.Tensor]) -> paddle.Tensor:
        """Broadcast the logits [..., V] of the last stage to every stage, in float32."""
        assert not paddle.is_grad_enabled(), "logits have no gradient: the backward pass starts at the loss"
        if self.axis.index == self.plan.last:
            logits = compute_logits(hidden).astype("float32")
        else:
            logits = paddle.empty([*hidden.shape[:-1], self._vocab_size], "float32")
        dist.broadcast(logits, src=self.axis.ranks[self.plan.last], group=self.axis.group)
        return logits

    def union(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the union of the dictionaries of all stages."""
        by_stage: list[dict[str, Any]] = []
        dist.all_gather_object(by_stage, values, group=self.axis.group)
        return {name: value for one in by_stage for name, value in one.items()}
