"""Names of long-sequence strategies and their other spellings; models/long_context.py implements them."""

from __future__ import annotations

LONG_SEQUENCE_STRATEGIES: dict[str, dict[str, str]] = {
    "embedding_strategies": {
        "RotaryEmbedding": "default",
        "LinearScalingRotaryEmbedding": "linear",
        "NTKScalingRotaryEmbedding": "ntk",
        "DynamicNTKScalingRotaryEmbedding": "dynamic",
        "YaRNScalingRotaryEmbedding": "yarn",
        "LongRoPEScalingRotaryEmbedding": "longrope",
        "Llama3ScalingRotaryEmbedding": "llama3",
    },
    "attention_strategies": {"AttentionWithLinearBias": "alibi"},
}
"""strategy_type -> strategy_name -> short spelling."""
_MODULE = "paddlenlp.transformers.long_sequence_strategies"
STRATEGY_NAMES = tuple(name for names in LONG_SEQUENCE_STRATEGIES.values() for name in names)
TYPE_SPELLINGS = {f"{_MODULE}.{kind}": kind for kind in LONG_SEQUENCE_STRATEGIES}
"""PaddleNLP's module -> strategy_type."""
NAME_SPELLINGS = {
    spelling: name
    for kind, names in LONG_SEQUENCE_STRATEGIES.items()
    for name, short in names.items()
    for spelling in (short, f"{_MODULE}.{kind}.{name}")
}
"""Short name, or PaddleNLP's module path -> strategy_name."""
