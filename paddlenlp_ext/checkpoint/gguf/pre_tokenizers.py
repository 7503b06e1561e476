"""Pre-tokenizers, which split text into words before byte-pair merging.

A GGUF file stores only the name of the pre-tokenizer (`tokenizer.ggml.pre`). This module defines the patterns of
llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN3_5 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_AFMOE = (
    r"[^\S\r\n](?=\p{N})",  # llama.cpp splits digits after spaces, so that `\s+(?!\S)` leaves a space before a digit
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",  # groups of three digits from the right
    r"[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
    _DEEPSEEK_V3[2],
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[[\p{Lu}\p{Ll}\p{Lt}]&&[^\x{1D400}-\x{1D7FF}]]+",  # cased letters, without mathematical alphanumerics
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
    r"\p{N}+",
)
_DEFAULT = (  # default of llama.cpp for files without tokenizer.ggml.pre
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


@dataclass(frozen=True)
class WordRule:
    """Rule that splits text into words.

    Attributes:
        names: values of `tokenizer.ggml.pre` for this rule; the exporter writes the first name.
        patterns: regular expressions, applied one after another; None: the GPT-2 pattern of the tokenizers library.
        single_digits: whether each digit becomes a word before the GPT-2 pattern is applied.
        ignores_merges: whether a word in the vocabulary becomes one token without applying merges.
        adds_bos: whether llama.cpp adds bos to a text if the file has no `add_bos_token`.
        normalizes: whether the original tokenizer normalizes text to NFC, unlike llama.cpp.
    """

    names: tuple[str, ...]
    patterns: tuple[str, ...] | None = None
    single_digits: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False
    normalizes: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Build the pre-tokenizer of the tokenizers library; as in GPT-2, each byte becomes a printable character."""
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.patterns is None)
        if self.patterns is not None:
            splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
            return pre_tokenizers.Sequence([*splits, byte_level])
        digits = [pre_tokenizers.Digits(individual_digits=True)] if self.single_digits else []
        return pre_tokenizers.Sequence([*digits, byte_level])

    def normalizer(self) -> normalizers.Normalizer | None:
        """Build the normalizer; None if text is not normalized."""
        return normalizers.NFC() if self.normalizes else None


WORD_RULES = (
    WordRule(("gpt-2", "olmo", "mpt", "exaone4")),
    WordRule(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), single_digits=True),
    WordRule(("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon-h1"), (_LLAMA3,), ignores_merges=True, adds_bos=True),
    WordRule(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_LLAMA3,)),
    WordRule(("qwen2",), (_QWEN2,), normalizes=True),
    WordRule(("qwen35",), (_QWEN3_5,), normalizes=True),
    WordRule(("hunyuan", "stablelm2"), (_QWEN2,)),
    WordRule(("tekken",), (_TEKKEN,), ignores_merges=True, adds_bos=True),
    WordRule(("gpt-4o", "llama4"), (_GPT_4O,)),
    WordRule(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK_V3),
    WordRule(("afmoe",), _AFMOE),
    WordRule(("deepseek-llm",), _DEEPSEEK_LLM),
    WordRule(("default",), _DEFAULT),
)
_BY_NAME = {name: rule for rule in WORD_RULES for name in rule.names}


def word_rule(name: str | None) -> WordRule:
    """Return the rule for a value of `tokenizer.ggml.pre`.

    Raises:
        ValueError: the value is unknown or None.
    """
    if name is None or name not in _BY_NAME:
        raise ValueError(
            f"tokenizer.ggml.pre is {name!r}, an unknown rule for splitting text into words (known: "
            f"{', '.join(sorted(_BY_NAME))})"
        )
    return _BY_NAME[name]


def adds_bos_by_default(name: str | None) -> bool:
    """Return whether llama.cpp adds bos by default in a file with this value of `tokenizer.ggml.pre`."""
    return name in _BY_NAME and _BY_NAME[name].adds_bos
