"""Guess the language of a text from its script; for Latin script, from frequent words."""

from __future__ import annotations

import re
from collections import Counter

UNKNOWN = "unknown"
_SAMPLE = 600
_SCRIPTS = (
    ("Japanese", 0x3040, 0x30FF),
    ("Korean", 0xAC00, 0xD7AF),
    ("Korean", 0x1100, 0x11FF),
    ("Chinese", 0x3400, 0x9FFF),
    ("Cyrillic script", 0x0400, 0x052F),
    ("Greek", 0x0370, 0x03FF),
    ("Hebrew", 0x0590, 0x05FF),
    ("Arabic script", 0x0600, 0x077F),
    ("Devanagari script", 0x0900, 0x097F),
    ("Bengali", 0x0980, 0x09FF),
    ("Tamil", 0x0B80, 0x0BFF),
    ("Thai", 0x0E00, 0x0E7F),
    ("Georgian", 0x10A0, 0x10FF),
    ("Armenian", 0x0530, 0x058F),
)
"""Name of a language or script, and the first and last code point of its range."""
_WORDS = {
    "English": "the of and is are was what how you that this with for from have it not which they would to",
    "German": "der die das und ist nicht ein eine mit von zu den auf für sich wie auch werden wird im was",
    "French": "le les des et est une dans que qui pour pas sur avec du au ce sont nous vous quel quelle",
    "Spanish": "el los las y es una en que por para con del como su está qué cuál más se lo",
    "Portuguese": "os as e é uma em que para com não do da dos das como seu mais está qual você",
    "Italian": "il gli e è una che per con non di del della dei come sono qual quale questo nel più",
    "Dutch": "het een en is niet van dat met voor zijn op aan wat hoe wordt ook naar deze de",
    "Polish": "i w na nie się że jest do to z jak co czy dla jako przez od po oraz są",
    "Turkish": "ve bir için ile ne nasıl da de çok olan olarak var mı daha gibi en kadar değil",
    "Vietnamese": "của và là có cho một không được trong với các người này những để khi đã như thế nào",
    "Indonesian": "yang dan di ini dengan untuk dari adalah tidak dalam pada itu akan apa bagaimana oleh juga",
}
_LANGUAGES = {language: frozenset(words.split()) for language, words in _WORDS.items()}
_WORD = re.compile(r"[^\W\d_]+")
_MIN_HITS = 2


def language_of(text: str) -> str:
    """Return the probable language of a text, or `UNKNOWN`.

    Only the first 600 characters are examined. For non-Latin scripts that several languages share, the result is the
    name of the script. Chinese characters count as Japanese if there is more than one kana per ten Chinese characters.
    """
    sample = text[:_SAMPLE]
    if not sample.isascii():
        counts: Counter[str] = Counter(filter(None, map(_script, filter(str.isalpha, sample))))
        num_letters = sum(map(str.isalpha, sample))
        if counts["Japanese"] * 10 > counts["Chinese"]:
            counts["Japanese"] += counts.pop("Chinese", 0)
        best = max(counts, key=lambda name: counts[name], default="")
        if counts[best] * 3 > num_letters:
            return best
    return _latin(sample)


def _script(character: str) -> str | None:
    code = ord(character)
    if code < 0x0370:
        return None
    return next((name for name, first, last in _SCRIPTS if first <= code <= last), None)


def _latin(text: str) -> str:
    words = set(_WORD.findall(text.lower()))
    hits = {language: len(words & common) for language, common in _LANGUAGES.items()}
    first, second = sorted(hits, key=lambda language: -hits[language])[:2]
    is_clear = hits[first] >= _MIN_HITS and hits[first] > hits[second] + hits[first] // 4
    return first if is_clear else UNKNOWN
