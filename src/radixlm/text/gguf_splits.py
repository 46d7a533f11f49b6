"""The pre-tokenizers of GGUF files (``tokenizer.ggml.pre``): how byte-level tokenizers split a text
into words before they merge. The patterns are those of the models' own tokenizers."""

from __future__ import annotations

from collections.abc import Mapping

from radixlm.base.record import Record


class Splits(Record):
    """A text is split by each of ``patterns`` in turn, then as GPT-2 does if ``then_gpt2``.
    ``is_whole_first``: a word that is a token is not merged (ignore_merges). ``adds_bos``,
    ``adds_sep``: the defaults where the file does not say."""

    patterns: tuple[str, ...] = ()
    then_gpt2: bool = True
    is_whole_first: bool = False
    adds_bos: bool = False
    adds_sep: bool = False


_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"\s+(?!\S)|\s+"
_LINES = rf"\s*[\r\n]+|{_END}"
_WORDS = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(ending: str, digits: str, no: str = "", end: str = "/") -> str:
    """A word ends where a lower-case letter is followed by an upper-case one. ``no``: subtracted
    from letters; ``end``: may follow signs, beside line ends."""
    upper, lower = f"[{_UPPER}{no}]", f"[{_LOWER}{no}]"
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{ending}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{ending}"
        rf"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{end}]*|{_LINES}"
    )


_DIGIT, _DIGITS = r"\p{N}", r"\p{N}{1,3}"
_THREES = r"\d{1,3}(?=(?:\d{3})*\b)"  # as in 1,234,567
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+"
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c"
    "\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _CJK
)
_HAN_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_SIGNS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK = rf"{_SIGNS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# letters with a case, as DeepSeek's first models list them
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-"
    "\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-"
    "\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    "\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d"
    "\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183"
    "\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-"
    "\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    "\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _END
_GPT2, _QWEN2 = Splits(), Splits((_WORDS % "",), False)
_LLAMA3 = Splits((_WORDS % "{1,3}",), False, is_whole_first=True, adds_bos=True)
_GLM4 = Splits((_WORDS % "{1,3}",), False)
_DEEPSEEK3 = Splits((_DIGITS, _CJK, _DEEPSEEK), False)
_BERT_LIKE = Splits(adds_sep=True)
_SPLITS: Mapping[tuple[str, ...], Splits] = {
    (
        *("gpt-2", "default", "olmo", "mpt", "exaone4", "phi-2", "jais", "trillion"),
        *("granite-docling", "gigachat", "a.x-4.0", "mellum", "modern-bert"),
        *("jina-es", "jina-de", "jina-v2-es", "jina-v2-de"),
    ): _GPT2,
    ("jina-v1-en", "jina-v2-code", "roberta-bpe"): _BERT_LIKE,
    (
        *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
        *("lfm2", "jina-v5-nano"),
    ): _LLAMA3,
    ("smaug-bpe", "dbrx", "chatglm-bpe"): _GLM4,
    ("glm4", "glm5"): Splits((_WORDS % "{1,3}",), False, is_whole_first=True),
    (
        *("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "f2llmv2", "stablelm2", "hunyuan"),
        *("solar-open", "grok-2"),
    ): _QWEN2,
    ("qwen35",): Splits(
        ((_WORDS % "").replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"s\p{L}", r"s\p{L}\p{M}"),),
        False,
    ),
    (
        *("smollm", "starcoder", "refact", "command-r", "exaone", "codeshell", "minerva-7b"),
        "mellum2",
    ): Splits((_DIGIT,)),
    ("tekken",): Splits((_cased("", ""),), False, is_whole_first=True, adds_bos=True),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): Splits(
        (_cased(_SHORT + "?", "{1,3}"),), False
    ),
    ("granite-embed-multi-97m",): Splits(
        (_cased(_SHORT + "?", "{1,3}"),), False, is_whole_first=True
    ),
    ("tiny_aya", "cohere2moe"): Splits((_THREES, _cased(_SHORT + "?", "{1,3}")), False),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): _DEEPSEEK3,
    ("falcon",): Splits((r"[\p{P}$+<=>^~|`]+", _GPT2_WORDS, "[0-9]{3}"), False),
    ("deepseek-llm",): Splits(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _HAN_HANGUL,
            _DIGIT,
        ),
        False,
    ),
    ("deepseek-coder",): Splits(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_HANGUL, _DIGIT), False
    ),
    ("bloom", "poro-chat", "gpt3-finnish"): Splits((_BLOOM,), False),
    ("viking",): Splits((_BLOOM, _DIGIT), False),
    ("kimi-k2",): Splits(
        (r"\p{Han}+|" + _cased(_SHORT + "?", "{1,3}", no=r"&&[^\p{Han}]", end=""),), False
    ),
    ("bailingmoe", "bailingmoe2", "llada-moe"): Splits(
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
            rf"|\s*[\r\n]|{_END}",
        ),
        False,
    ),
    ("seed-coder",): Splits(
        (
            (_WORDS % "")
            .replace(r"+[\r\n]*", "+")
            .replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{N}\r\n]"),
        ),
        False,
    ),
    ("youtu",): Splits((_YOUTU, _cased(_SHORT + "?", "")), False, is_whole_first=True),
    ("superbpe",): Splits((r"\p{N}+", r"(?=(\d{3})+(?!\d))"), False),
    ("afmoe",): Splits((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN, _DEEPSEEK), False),
    ("laguna",): Splits((r"[^\n]+|[\n]+", _WORDS % ""), False),
    ("minicpm5",): Splits((_DIGITS, _WORDS % "+"), False, is_whole_first=True),
    ("exaone-moe",): Splits(
        (
            rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_END}",
        ),
        False,
    ),
}
SPLITS = {name: splits for names, splits in _SPLITS.items() for name in names}
