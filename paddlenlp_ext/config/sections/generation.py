"""Configuration section for the evaluation on generated answers: sampling options and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from paddlenlp_ext.config.dataclass_options import OptionGroup, option


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(OptionGroup):
    """`config.generation`: options of the evaluation on generated answers."""

    compute_metrics: str | None = option(
        None,
        help="function that computes further metrics of generated answers: module.function or file.py:function",
    )
    eval_with_do_generation: bool = option(False, help="evaluate by generating answers (ROUGE, BLEU, exact match)")
    eval_labels: bool = option(
        False, help="with eval_with_do_generation: score answers as class labels (precision, recall, F1)"
    )
    save_generation_output: bool = option(False, help="write the generated answers to generated_output.json")
    max_new_tokens: int | None = option(
        None, minimum=1, help="maximum number of new tokens in an answer; unset: max_length - src_length"
    )
    top_k: int = option(1, minimum=0, help="number of most likely tokens to sample from; 1: greedy, 0: all tokens")
    top_p: float = option(
        1.0,
        above=0,
        maximum=1,
        help="nucleus sampling: sample from the most likely tokens whose total probability reaches this value",
    )
    temperature: float = option(1.0, above=0, help="softmax temperature of sampling")

    @property
    def max_completion_length(self) -> int:
        """Return the maximum number of tokens in a sampled completion."""
        return self.max_new_tokens or 512
