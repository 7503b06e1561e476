"""Pipeline parallelism: each process holds some layers; micro-batches pass from stage to stage and back.

Every stage of a pipeline reads the same batches, so that only the hidden states [B, S, D] and their gradient are sent.
Under sequence parallelism each tensor rank sends its part [B, P, D] to the same tensor rank of the next stage.

Fleet's own PipelineLayer is not used: it needs a model written as a list of layers, renames them, and passes nothing
but tensors between stages, so that the documents of a packed batch would have to be sent as tensors. The model's code
runs unchanged instead. `Pipeline.install` replaces three of its methods on the instance:

    method                       replaced by
    embed_tokens.forward         on later stages, zeros in the shape of the embeddings
    decoder.forward_embeddings   the current chunk of layers, applied to the received hidden states
    model.logits                 the last stage's logits, broadcast to all stages (generation and evaluation)
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
"""Run micro-batch n through the model; returns the loss if the flag says that the pass ends at the lm_head."""


class Pipeline:
    """One process's part of a pipeline.

    Args:
        plan: assignment of layers to processes.
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
        """Let a `CausalLM` or `PeftModel` run the current chunk; call it again after its layers were sharded.

        Args:
            model: the model to install into.
            sequence: split of the positions over tensor ranks; None without sequence parallelism.
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
        """Return the union of the dictionaries of all stages."""
        everyone: list[dict[str, Any]] = []
        dist.all_gather_object(everyone, known, group=self.axis.group)
        return {name: value for one in everyone for name, value in one.items()}

    def run(self, shapes: Sequence[Sequence[int]], forward: Forward, learns: bool) -> None:
        """Run micro-batches through the pipeline, and back in training; gradients accumulate.

        Args:
            shapes: full shape of the hidden states of each micro-batch.
            forward: see `Forward`.
            learns: whether to run backward passes.
        """
        moving: dict[Pass, Any] = {}  # to send, by producer; received, by consumer
        kept: dict[tuple[int, int], tuple[paddle.Tensor | None, paddle.Tensor | None]] = {}
        for entry in self._entries(len(shapes), learns):
            if isinstance(entry, Transfer):
                self._transfer(entry, moving, shapes[entry.producer.micro])
                continue
            if self.sequence is not None:
                self.sequence.length = shapes[entry.micro][1]
            if entry.backward:
                gradient = moving.pop(entry, None)
                received, made = kept.pop((entry.chunk, entry.micro))
                assert made is not None, "a chunk with a backward pass has a result"
                moving[entry] = _backward(received, made, gradient)
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
        """Return the chunk's output: hidden states, or the loss from the last chunk."""
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

    # -- replacements of the model's methods --------------------------------------------------------------------------
    def _placeholder_embeddings(self, input_ids: paddle.Tensor) -> paddle.Tensor:
        return paddle.zeros([*input_ids.shape, self._decoder.norm.weight.shape[0]], self._dtype)

    def _forward_embeddings(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        if self._chunk is None:
            return self._run_inference(x_BSD, inputs)
        made = self._run_chunk(self._chunk, x_BSD if self._input is None else self._input, inputs)
        return made if self._is_last(self._chunk) else x_BSD  # unused, in the shape of the result

    def _run_chunk(self, chunk: int, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        start, stop = self.plan.bounds[chunk : chunk + 2]
        self._output = self._decoder.run_layers(x_BSD, inputs, start, stop)
        return self._decoder.norm(self._output) if self._is_last(chunk) else self._output

    def _is_last(self, chunk: int) -> bool:
        return chunk == self.plan.num_chunks - 1

    def _run_inference(self, x_BSD: paddle.Tensor, inputs: AttentionInputs) -> paddle.Tensor:
        """Run one forward pass of all stages outside `run`; the last stage returns the result."""
        assert not paddle.is_grad_enabled(), "only `run` runs backward passes"
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
        """Return the last stage's logits [..., V] on every stage, in float32."""
        assert not paddle.is_grad_enabled(), "the backward pass starts at the loss"
        if self.axis.index == self.plan.last:
            logits = type(self._model).logits(self._model, hidden).astype("float32")
        else:
            logits = paddle.empty([*hidden.shape[:-1], self._model.config.vocab_size], "float32")
        dist.broadcast(logits, src=self.axis.ranks[self.plan.last], group=self.axis.group)
        return logits


def _backward(
    received: paddle.Tensor | None, made: paddle.Tensor, gradient: paddle.Tensor | None
) -> paddle.Tensor | None:
    """Run the backward pass of a chunk; return the gradient of what was received."""
    if not made.stop_gradient:  # below the first adapter nothing trains
        paddle.autograd.backward([made], [None if gradient is None else gradient.astype(made.dtype)])
    if received is None:
        return None
    assert received.grad is not None, "hidden states pass through every layer"
    return received.grad
