"""Add tokens to the tokenizer, and trained rows for the new tokens to the embedding and the lm_head.

| | change |
| --- | --- |
| tokenizer | adds `add_tokens` and `add_special_tokens` |
| embedding, lm_head | a row for each token id; new rows start at the mean row (checkpoint/resized_embeddings.py) |
| full training | all rows are trained |
| LoRA | the new rows are trained (`trainable_token_indices`); in `modules_to_save` and target modules, all rows are |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.sections.model import ModelConfig
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.lora.low_rank_config import LowRankConfig
from paddlenlp_ext.peft.methods.trainable_tokens import TrainableTokensConfig
from paddlenlp_ext.peft.modules_to_save import covers
from paddlenlp_ext.peft.trainable_token_indices import EMBEDDING, HEAD, token_ids, tokens_by_table
from paddlenlp_ext.utils.layer_name_patterns import matches
from paddlenlp_ext.utils.logging import get_logger

logger = get_logger("paddlenlp_ext.trainer")


def extend_vocabulary(source: ModelSource, tokenizer: Any, options: ModelConfig) -> ModelSource:
    """Add the configured tokens to the tokenizer in place; return the model source with a row for each token.

    The source is unchanged if the options neither add tokens nor resize the vocabulary. The embedding never shrinks.
    Many models have more embedding rows than tokens; new tokens use the unused rows first.

    Args:
        source: the base model.
        tokenizer: a Hugging Face tokenizer.
        options: `config.model`.

    Raises:
        ValueError: a token is empty or contains a comma.
    """
    requested = {"add_tokens": options.add_tokens or (), "add_special_tokens": options.add_special_tokens or ()}
    is_resized = options.resize_vocab or options.resize_to_multiple_of is not None
    if not (is_resized or any(requested.values())):
        return source
    before = tokenizer.get_vocab()
    for key, tokens in requested.items():
        wrong = next((token for token in tokens if not token or "," in token), None)
        if wrong is not None:
            raise ValueError(
                f"{key}: {wrong!r} is not a token, because it is empty or has a comma; remove this entry, or list each "
                "token separately"
            )
        known = [token for token in tokens if token in before]
        if known:
            logger.info("%s: the tokenizer already has %s", key, ", ".join(known))
        tokenizer.add_tokens(list(tokens), special_tokens=key == "add_special_tokens")
    vocabulary, num_rows = tokenizer.get_vocab(), source.config["vocab_size"]
    added = vocabulary.keys() - before.keys()
    if not (added or is_resized):
        return source
    unit = options.resize_to_multiple_of or 1
    vocab_size = -(-max(num_rows, max(vocabulary.values()) + 1) // unit) * unit
    new_ids = sorted({index for token, index in vocabulary.items() if token in added or index >= num_rows})
    logger.info("%d new tokens; embedding and lm_head have %d rows (before: %d)", len(new_ids), vocab_size, num_rows)
    overrides = {**source.config_overrides, **({"vocab_size": vocab_size} if vocab_size != num_rows else {})}
    return dataclasses.replace(source, config_overrides=overrides, new_token_ids=tuple(new_ids))


def with_trained_tokens(config: RunConfig, source: ModelSource) -> RunConfig:
    """Return the configuration, changed so that the adapter trains the rows of new tokens.

    Raises:
        ValueError: the adapter method cannot train rows of the embedding, or the run continues with a stored adapter
            that does not train the new rows.
    """
    peft, new_ids = config.peft, source.new_token_ids
    if peft is None or not new_ids:
        return config
    is_tied = source.decoder_config().tie_word_embeddings
    tables = [EMBEDDING] if is_tied or source.score_seed is not None else [EMBEDDING, HEAD]
    structure = peft if peft.path is None else PeftConfig.from_pretrained(peft.path)
    saved = structure.modules_to_save
    tables = [table for table in tables if not (covers(saved, table) or (is_tied and covers(saved, HEAD)))]
    changes = _trained_tokens(structure, tables, new_ids, is_tied)
    if peft.path is not None and changes.keys() - {"saved_embeddings"}:
        raise ValueError(
            f"{peft.path}: this adapter does not train the rows of the new tokens {_shown(new_ids)}; start a new "
            "adapter, or remove add_tokens, add_special_tokens and resize_vocab"
        )
    if not changes or peft.path is not None:
        return config
    logger.info("the adapter also trains the rows of the new tokens")
    return dataclasses.replace(config, peft=peft.replace(**changes))


def _trained_tokens(peft: PeftConfig, tables: Sequence[str], new_ids: Sequence[int], is_tied: bool) -> dict[str, Any]:
    """Return the changes to an adapter config that let the adapter train the rows `new_ids` of all `tables`.

    Raises:
        ValueError: the adapter method cannot train rows of the embedding.
    """
    if not tables:
        return {}
    if isinstance(peft, LowRankConfig):
        return _trained_with_lora(peft, tables, new_ids, is_tied)
    if isinstance(peft, TrainableTokensConfig) and len(tables) == len(peft.target_modules or ()):
        ids = token_ids(peft.token_indices, "trainable_tokens_indices")
        missing = [index for index in new_ids if index not in ids]
        return {"token_indices": (*ids, *missing)} if missing else {}
    names = ", ".join(table.rpartition(".")[2] for table in tables)
    raise ValueError(
        f"add_tokens, add_special_tokens, resize_vocab: an adapter of type {peft.peft_type} ({type(peft).__name__}) "
        f"does not train the rows of the new tokens {_shown(new_ids)} in {names}; use LoRA, which trains these rows "
        "(trainable_token_indices), or train all weights"
    )


def _trained_with_lora(
    peft: LowRankConfig, tables: Sequence[str], new_ids: Sequence[int], is_tied: bool
) -> dict[str, Any]:
    """Return `trainable_token_indices` for tables without LoRA factors, and `saved_embeddings` for tables with factors.

    A table is the embedding or lm_head. If LoRA targets a table, the low-rank factors change the rows of all tokens.
    The resized table is saved too, because other programs need it to load the adapter.
    """
    targets = [EMBEDDING if is_tied and entry == HEAD else entry for entry in peft.target_modules or ()]
    tokens, adapted = tokens_by_table(peft.trainable_token_indices), []
    for table in tables:
        if peft.adapts_tables and any(matches(entry, table, peft.targets_key) for entry in targets):
            adapted.append(table)
        else:
            tokens[table] = tuple(dict.fromkeys((*tokens.get(table, ()), *new_ids)))
    changes: dict[str, Any] = {}
    if tokens != tokens_by_table(peft.trainable_token_indices):
        changes["trainable_token_indices"] = {table.rpartition(".")[2]: ids for table, ids in tokens.items()}
    if tuple(adapted) != peft.saved_embeddings:
        changes["saved_embeddings"] = tuple(adapted)
    return changes


def _shown(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")
