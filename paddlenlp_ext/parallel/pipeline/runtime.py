"""Pipeline parallelism: each process has some of the layers, and micro-batches go from one to the next and back.

Every process of a pipeline reads the same batches, so that only the stream [B, S, D] and its gradient are sent; of a
divided sequence (sequence.py) each tensor rank sends its part [B, P, D] to the next stage's same rank.
(Fleet's own PipelineLayer wants a model written as a list of its layers, names them anew, and hands nothing but tensors
on: the documents of a packed batch would have to be sent as tensors.) The model's code runs as it stands, with three of
its methods replaced: an embedding that is elsewhere gives vectors that nobody reads, the decoder runs the chunk of
layers that is at hand, from what was received, and where logits are asked for all get those of the last stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import paddle
import paddle.distributed as dist

from paddlenlp_ext.nn.attention import AttentionInputs
from paddlenlp_ext.parallel.mesh import ProcessAxis
from paddlenlp_ext.parallel.pipeline.schedule import Pass, Transfer, entries
from paddlenlp_ext.parallel.pipeline.stages import StagePlan
from paddlenlp_ext.parallel.sequence_parallel import SequenceShards
from paddlenlp_ext.peft.layers import AdapterLayer
from paddlenlp_ext.peft.peft_model import PeftModel

Forward = Callable[[int, bool], paddle.Tensor | None]
"""Takes micro-batch number n through the model; told whether the pass ends at the head, it returns the loss then."""


class Pipeline:
    """One process's part of a pipeline.

    Args:
        plan: which layers are whose.
        axis: the pipeline's processes.
    """

    def __init__(self, plan: StagePlan, axis: ProcessAxis) -> None:
        self.plan, self.axis = plan, axis
        self.sequence: SequenceShards | None = None
        self._model: Any = None
        self._decoder: Any = None
        self._chunk: int | None = None
        self._input: paddle.Tensor | None = None
        self._output: paddle.Tensor | None = None

    def install(self, model: Any, sequence: SequenceShards | None = None) -> None:
        """Let a `CausalLM` or `PeftModel` run the chunk at hand; to be repeated when its layers were cut.

        `sequence` is how these divide the positions, None where they do not.
        """
        self.sequence = sequence
        self._model = getattr(model, "base_model", model)
        self._decoder = self._model.model
        if self.axis.index > 0:
            embedding = self._decoder.embed_tokens
            while isinstance(embedding, AdapterLayer):
                embedding = embedding.base
            embedding.forward = self._placeholder_embeddings
        self._decoder.forward_embeddings = self._forward_embeddings
        self._model.logits = self._logits
        if isinstance(model, PeftModel):
            model.join_stages = self.join

    def join(self, known: dict[str, Any]) -> dict[str, Any]:
        """What each stage knows by name, to what all know."""
        everyone: list[dict[str, Any]] = []
        dist.all_gather_object(everyone, known, group=self.axis.group)
        return {name: value for one in everyone for name, value in one.items()}

    def run(self, shapes: Sequence[Sequence[int]], forward: Forward, learns: bool) -> None:
        """Take micro-batches through all processes, in training back again; gradients are added to what is there.

        Args:
            shapes: of the stream, for each micro-batch, as if nothing were divided.
            forward: see `Forward`.
            learns: whether they come back.
        """
        moving: dict[Pass, paddle.Tensor] = {}  # what is to be sent, by who made it; received, by who needs it
        kept: dict[tuple[int, int], tuple[paddle.Tensor | None, paddle.Tensor]] = {}
        for entry in self._entries(len(shapes), learns):
            if isinstance(entry, Transfer):
                self._transfer(entry, moving, shapes[entry.producer.micro])
                continue
            if self.sequence is not None:
                self.sequence.length = shapes[entry.micro][1]
            if entry.backward:
                gradient = moving.pop(entry, None)
                moving[entry] = _backward(*kept.pop((entry.chunk, entry.micro)), gradient)
            else:
                received = moving.pop(entry, None)
                made = self._forward(entry, received, forward, learns)
                if made is not None and not self._is_last(entry.chunk):
                    moving[entry] = made.detach()
                if learns:
                    kept[entry.chunk, entry.micro] = received, made

    def _entries(self, num_micro: int, learns: bool) -> tuple[Any, ...]:
        return entries(self.axis.index, self.axis.size, self.plan.num_chunks, num_micro, learns)

    def _forward(
        self, entry: Pass, received: paddle.Tensor | None, forward: Forward, learns: bool
    ) -> paddle.Tensor | None:
        """The stream that the chunk makes; the loss where it ends at the head."""
        if received is not None:
            received.stop_gradient = not learns
        ends = self._is_last(entry.chunk)
        self._chunk, self._input = entry.chunk, received
        try:
            loss = forward(entry.micro, ends)
            return loss if ends else self._output
        finally:
            self._chunk = self._input = self._output = None

    def _transfer(self, entry: Transfer, moving: dict[Pass, paddle.Tensor], shape: Sequence[int]) -> None:
        sends, ranks = entry.source == self.axis.index, self.axis.ranks
        group = self.axis.pairs[entry.target if sends else entry.source]
        if sends:
            tensor = moving.pop(entry.producer)
            dist.send(tensor.astype(self._dtype).contiguous(), dst=ranks[entry.target], group=group)
        else:
            own = shape if self.sequence is None else self.sequence.shard_shape(shape)
            tensor = paddle.empty(list(own), self._dtype)
            dist.recv(tensor, src=ranks[entry.source], group=group)
            moving[entry.consumer] = tensor

    @property
    def _dtype(self) -> Any:
        return self._decoder.norm.weight.dtype

    # -- in place of the model's own ----------------------------------------------------------------------------------
    def _placeholder_embeddings(self, input_ids: paddle.Tensor) -> paddle.Tensor:
        return paddle.zeros([*input_ids.shape, self._decoder.norm.weight.shape[0]], self._dtype)

    def _forward_embeddings(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        if self._chunk is None:
            return self._run_inference(x_BSD, inputs)
        made = self._run_chunk(self._chunk, x_BSD if self._input is None else self._input, inputs)
        return made if self._is_last(self._chunk) else x_BSD  # what nobody reads, in the shape of the result

    def _run_chunk(self, chunk: int, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        start, stop = self.plan.bounds[chunk : chunk + 2]
        self._output = self._decoder.run_layers(x_BSD, inputs, start, stop)
        return self._decoder.norm(self._output) if self._is_last(chunk) else self._output

    def _is_last(self, chunk: int) -> bool:
        return chunk == self.plan.num_chunks - 1

    def _run_inference(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        """Outside `run`: one pass of all processes together, forwards alone; the last one has the result."""
        assert not paddle.is_grad_enabled(), "gradients come back in `run` alone"
        moving: dict[Pass, paddle.Tensor] = {}
        result = x_BSD
        if self.sequence is not None:
            self.sequence.length = x_BSD.shape[1]
        for entry in self._entries(1, False):
            if isinstance(entry, Transfer):
                self._transfer(entry, moving, x_BSD.shape)
            else:
                made = moving[entry] = self._run_chunk(entry.chunk, moving.pop(entry, x_BSD), inputs)
                result = made if self._is_last(entry.chunk) else result
        return result

    def _logits(self, hidden: paddle.Tensor) -> paddle.Tensor:
        """Logits [..., V] that the last process makes of what it has, float32 on all of them."""
        assert not paddle.is_grad_enabled(), "the way back begins with the loss"
        if self.axis.index == self.plan.last:
            logits = type(self._model).logits(self._model, hidden).astype("float32")
        else:
            logits = paddle.empty([*hidden.shape[:-1], self._model.config.vocab_size], "float32")
        dist.broadcast(logits, src=self.axis.ranks[self.plan.last], group=self.axis.group)
        return logits


def _backward(
    received: paddle.Tensor | None, made: paddle.Tensor, gradient: paddle.Tensor | None
) -> paddle.Tensor | None:
    """Add a pass's gradients; returns that of what was received."""
    if not made.stop_gradient:  # nothing below the first adapter trains
        paddle.autograd.backward([made], [None if gradient is None else gradient.astype(made.dtype)])
    if received is None:
        return None
    assert received.grad is not None, "the stream goes through every layer"
    return received.grad
