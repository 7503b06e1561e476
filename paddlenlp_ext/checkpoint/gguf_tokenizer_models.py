"""The two tokenizer kinds of the GGUF files read here, in the `tokenizers` library's parts."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from paddlenlp_ext.checkpoint.gguf_file import GgufFile

_WORD_MARK = "\u2581"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = (  # llama.cpp's rule for files that name none of their own
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_WHOLE_WORDS_FIRST = (*_LLAMA3_NAMES, "tekken")  # a word that is in the vocabulary is taken without merging
_BOS_BY_DEFAULT = (*_LLAMA3_NAMES, "tekken")


def default_add_bos(file: GgufFile) -> bool:
    """Whether bos precedes a text in a file that does not say (as in llama.cpp)."""
    if file.metadata["tokenizer.ggml.model"] == "llama":
        return True
    return file.metadata.get("tokenizer.ggml.pre") in _BOS_BY_DEFAULT


def byte_level_bpe(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """Byte-level BPE as GPT-2 introduced it, with the file's own rule for cutting words.

    Raises:
        ValueError: the file names no rule, or one that is not known here.
    """
    rule = file.metadata.get("tokenizer.ggml.pre")
    merges = [tuple(merge.split(" ", 1)) for merge in file.require("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=rule in _WHOLE_WORDS_FIRST,
        )
    )
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _word_rule(file, rule)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _word_rule(file: GgufFile, rule: str | None) -> pre_tokenizers.PreTokenizer:
    with_regex = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule == "gpt-2":
        return with_regex
    if rule in ("smollm", "starcoder"):
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), with_regex])
    splits = {"qwen2": (_QWEN2,), "tekken": (_TEKKEN,), "default": _DEFAULT} | dict.fromkeys(_LLAMA3_NAMES, (_LLAMA3,))
    if rule not in splits:
        known = ", ".join(sorted(["gpt-2", "smollm", "starcoder", *splits]))
        raise ValueError(
            f"{file.path}: tokenizer.ggml.pre is {rule!r}, a way of cutting text into words that is not known here "
            f"(known: {known}); use the model's folder with its tokenizer.json, or a GGUF file that says it"
        )
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splits[rule]]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def sentencepiece_bpe(file: GgufFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """SentencePiece's BPE: the pair whose joined piece scores highest is merged first; what is left falls to bytes.

    A file keeps no merges; they follow from the pieces and their scores.
    """
    scores = file.require("tokenizer.ggml.scores")
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges_from_scores(tokens, scores, types),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _WORD_MARK)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_WORD_MARK), spaces]) if prefix else spaces
    parts = [decoders.Replace(_WORD_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return tokenizer


def merges_from_scores(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """All pairs of pieces that join into a piece, best first.

    Control, unknown and byte pieces (types 2, 3, 6) neither join nor are joined to: text never makes them.
    """
    rank = {
        token: (-score, i)
        for i, (token, score, kind) in enumerate(zip(tokens, scores, types, strict=False))
        if kind not in (2, 3, 6)
    }
    pairs = [
        (rank[token], token[:cut], token[cut:])
        for token in rank
        for cut in range(1, len(token))
        if token[:cut] in rank and token[cut:] in rank
    ]
    pairs.sort(key=lambda pair: pair[0])
    return [(left, right) for _, left, right in pairs]
