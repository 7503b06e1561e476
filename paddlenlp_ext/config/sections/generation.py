"""How answers are generated in evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from paddlenlp_ext.config.schema import option


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """`config.generation`."""

    eval_with_do_generation: bool = option(False, help="evaluate by generating answers (ROUGE, BLEU, exact match)")
    save_generation_output: bool = option(False, help="write the generated answers to generated_output.json")
    max_new_tokens: int | None = option(None, minimum=1, help="longest answer; absent: max_length - src_length")
    top_k: int = option(1, minimum=0, help="draw among this many likeliest tokens; 1: greedy, 0: all")
    top_p: float = option(1.0, above=0, maximum=1, help="draw among the likeliest tokens of this total probability")
    temperature: float = option(1.0, above=0, help="below 1 likelier tokens gain, above 1 they lose")
