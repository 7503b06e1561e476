"""Evaluation by what the model writes: generate an answer to every dev prompt and compare it with the reference."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

from paddlenlp_ext.train.ranks import Ranks, SingleRank
from paddlenlp_ext.train.text_metrics import text_metrics
from paddlenlp_ext.utils.files import write_text


def evaluate_generation(
    model: Any, rows: Any, tokenizer: Any, config: Any, output_file: Path | None, ranks: Ranks | None = None
) -> dict[str, float]:
    """ROUGE, BLEU-4 and exact match of generated answers.

    Args:
        model: whatever has `generate`; an answer ends at the model's `end_token_ids`.
        rows: a TokenizedDataset; `rows.prompts()` yields (prompt ids, reference, src).
        tokenizer: decodes the answers.
        config: the run's; `config.generation` says how tokens are drawn (`top_k` 1: greedily).
        output_file: where {"src", "tgt", "output"} lines go, or None.
        ranks: who shares the prompts; each comes to the same result.
    """
    ranks = ranks or SingleRank()
    options, train = config.generation, config.train
    limit = train.max_evaluate_steps * train.per_device_eval_batch_size if train.max_evaluate_steps > 0 else None
    prompts = list(itertools.islice(rows.prompts(), limit))
    # Neighbours, by their numbers among all: what is drawn for a prompt depends on its number.
    own = slice(*(len(prompts) * index // ranks.size for index in (ranks.index, ranks.index + 1)))
    started = time.perf_counter()
    generated = model.generate(
        [tokens for tokens, _, _ in prompts[own]],
        max_new_tokens=options.max_new_tokens or max(1, config.data.max_length - config.data.src_length),
        decode_strategy="greedy_search" if options.top_k == 1 else "sampling",
        top_k=options.top_k,
        top_p=options.top_p,
        temperature=options.temperature,
        seed=train.seed,
        batch_size=train.per_device_eval_batch_size,
        first_row=own.start,
    )
    shares = ranks.collect([tokenizer.decode(tokens, skip_special_tokens=True) for tokens in generated])
    outputs = list(itertools.chain.from_iterable(shares))
    if output_file is not None:
        lines = [
            json.dumps({"src": src, "tgt": reference, "output": output}, ensure_ascii=False)
            for (_, reference, src), output in zip(prompts, outputs, strict=True)
        ]
        write_text(output_file, "".join(f"{line}\n" for line in lines))
    metrics = text_metrics(outputs, [reference for _, reference, _ in prompts])
    seconds = time.perf_counter() - started
    return {**{f"eval_{name}": value for name, value in metrics.items()}, "eval_generation_runtime": seconds}
