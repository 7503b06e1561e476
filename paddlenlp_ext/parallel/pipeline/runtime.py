"""Pipeline runtime: run micro-batches through the stages of the model.

Each stage sends hidden states [B, S, D] to the next stage, and their gradients to the previous stage. All stages of a
pipeline read the same batches, so token ids and labels need not be sent. With sequence parallelism, each tensor rank
sends its slice [B, P, D] to the same tensor rank of the neighboring stage. If MoE routers have an auxiliary loss, the
stages also send the accumulated router statistics (nn/load_balancing_loss.py).

Every stage calls the unchanged forward method of the model. A `stage` set on the decoder replaces three computations:

    Decoder.embed                  zeros in the shape of the embeddings, except on the first stage
    Decoder.forward_embeddings     the current chunk of layers, applied to the received hidden states
    CausalLM.logits                logits of the last stage, broadcast to all stages (generation and evaluation)

Fleet's `PipelineLayer` is not used, because it requires a list of layers and renames their parameters.
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
"""Tensors sent from stage to stage. Forward pass: hidden states, and with an auxiliary loss, `RoutedPass.sums`.
Backward pass: the gradient of the hidden states, and with an auxiliary loss, `RoutedPass.slopes`. Empty if there is no
sender."""

Forward = Callable[[int, bool], paddle.Tensor | None]
"""Function that calls the model for a micro-batch.

The arguments are the index of the micro-batch, and True for the last chunk, whose pass must return the loss.
"""


class _Saved(NamedTuple):
    """Tensors that the forward pass of a chunk saves for its backward pass."""

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
        sequence: sequence parallelism over the tensor ranks; None if it is off or the layers are not sharded yet.
    """

    def __init__(self, model: CausalLM, plan: StagePlan, axis: ProcessAxis) -> None:
        self.plan, self.axis = plan, axis
        self.sequence: SequenceShards | None = None
        self._decoder, self._vocab_size = model.model, model.config.vocab_size
        balance = self._decoder.load_balance
        self._balance = balance if balance is not None and balance.coefficient else None
        # State of the running pass: index of the chunk, received message, output of the chunk.
        self._chunk: int | None = None
        self._input: Message = ()
        self._output: paddle.Tensor | None = None

    # -- micro-batches of an optimizer step ---------------------------------------------------------------------------
    def run(self, shapes: Sequence[Sequence[int]], forward: Forward, training: bool) -> None:
        """Run all micro-batches of an optimizer step, or of an evaluation, through this stage.

        Args:
            shapes: unsharded shape [B, S, D] of the hidden states of each micro-batch.
            forward: function that calls the model, see `Forward`.
            training: whether to run backward passes that accumulate gradients.
        """
        messages: dict[Pass, Message] = {}  # outgoing messages by producer, incoming messages by consumer
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
        """Run the forward pass of a chunk; return the hidden states, or for the last chunk, the loss."""
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
        """Run the backward pass of a chunk; return the message for the previous chunk, empty for the first chunk."""
        gradient, *slopes = received or (None,)
        if saved.routed is not None and slopes:
            saved.routed.slopes = slopes[0]
        if not saved.output.stop_gradient:  # with an adapter, the first chunk may have no trainable parameters
            gradients = [None if gradient is None else gradient.astype(saved.output.dtype)]
            paddle.autograd.backward([saved.output], gradients)
        if saved.received is None:
            return ()
        assert saved.received.grad is not None, "the received hidden states must have a gradient"
        if saved.routed is None:
            return (saved.received.grad,)
        assert saved.routed.slopes is not None, "the loss must contain the auxiliary loss of the routers"
        return saved.received.grad, saved.routed.slopes

    def _transfer(self, entry: Transfer, messages: dict[Pass, Message], shape: Sequence[int], training: bool) -> None:
        """Send or receive one message.

        Args:
            entry: entry of the schedule.
            messages: pending messages. The sent message is removed, or the received message is added.
            shape: unsharded shape [B, S, D] of the hidden states of the micro-batch.
            training: whether the step has backward passes.
        """
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
        """True on the first stage, which computes the input embeddings."""
        return self.axis.index == 0

    def forward_embeddings(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        """Run only the layers of the current chunk; outside `run`, run an inference pass through all stages."""
        if self._chunk is None:
            return self._run_inference(x_BSD, inputs)
        hidden, *sums = self._input or (x_BSD,)
        if self._balance is not None and sums:
            self._balance.current.earlier_sums = sums[0]
        output = self._run_chunk(self._chunk, hidden, inputs)
        return output if self._is_last(self._chunk) else x_BSD  # the caller uses only the shape of x_BSD

    def _run_chunk(self, chunk: int, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        """Run the layers of a chunk; in the last chunk, also run the final norm and add the routers' auxiliary loss."""
        start, stop = self.plan.bounds[chunk : chunk + 2]
        self._output = self._decoder.run_layers(x_BSD, inputs, start, stop)
        if not self._is_last(chunk):
            return self._output
        hidden_BSD = self._decoder.final_norm(self._output)
        if self._balance is None or not paddle.is_grad_enabled():
            return hidden_BSD
        return self._balance.attach_loss(hidden_BSD)

    def _run_inference(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        """Run one forward pass through all stages; only the last stage returns the final hidden states."""
        assert not paddle.is_grad_enabled(), "a forward pass outside `run` must be under no_grad"
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
        """Compute the logits [..., V] on the last stage, and broadcast them to every stage in float32."""
        assert not paddle.is_grad_enabled(), "logits of a pipeline must be computed under no_grad"
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
