"""How the models that llama.cpp knows split a text into words, before byte-level BPE merges the bytes of each.

A GGUF file has only the name of its pre-tokenizer (``tokenizer.ggml.pre``). The regular expressions are those of the
models' own tokenizer.json. Source for the names and for what belongs together: llama.cpp's ``llama-vocab.cpp``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WHITESPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_WHITESPACE}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_PUNCTUATION}|{_WHITESPACE}"
_MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_QWEN35 = rf"{_CONTRACTION}|{_MARKED_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_WHITESPACE}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_O200K_WORDS = _CASED % (f"{_CONTRACTION}?", f"{_CONTRACTION}?")
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_WHITESPACE}"
_O200K = rf"{_O200K_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_WHITESPACE}"
_YOUTU = rf"{_O200K_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_WHITESPACE}"
_NOT_HAN_UPPER, _NOT_HAN_LOWER = (rf"[{each[1:-1]}&&[^\p{{Han}}]]" for each in (_UPPER, _LOWER))
_KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN_UPPER}*{_NOT_HAN_LOWER}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN_UPPER}+{_NOT_HAN_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_WHITESPACE}"
)
_CJK = "[一-龥぀-ゟ゠-ヿ]+"
_ASCII_PUNCTUATION_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_DEEPSEEK3_WORD = rf"{_ASCII_PUNCTUATION_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK3 = rf"{_DEEPSEEK3_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_WHITESPACE}"
_DEEPSEEK_LETTERS = (
    "\\s?[A-Za-z\u00b5À-ÖØ-öø-ƺƼ-ƿ\u01c4-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-\u03f5Ϸ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ"
    "-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d"
    "\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149ⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_DEEPSEEK_PUNCTUATION = "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+"
_BLOOM = " ?[^(\\s|[.,!?…。，、।۔،])]+"
_DIGITS_FROM_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"


class PreTokenizer(NamedTuple):
    """A way of splitting a text into words, which a GGUF file gives by name.

    Each of ``splits`` is a regular expression, applied to what those before it left; its matches and what lies between
    them become parts. ``ignore_merges``: a word that is a token is not merged from its bytes. ``adds_bos``: a text gets
    the token for its beginning unless the file says otherwise. ``composes``: the text is composed first (NFC).
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    composes: bool = False

    def normalizer(self) -> dict[str, Any] | None:
        return {"type": "NFC"} if self.composes else None

    def pre_tokenizer(self) -> dict[str, Any]:
        """Return what tokenizer.json has for it: the splits, and the bytes of each word as letters."""
        parts = [
            {"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False} for one in self.splits
        ]
        return {"type": "Sequence", "pretokenizers": [*parts, BYTE_LEVEL]}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_DIGIT = r"\p{N}"
_GPT2_ONLY = PreTokenizer((_GPT2,))
_DIGITS_GPT2 = PreTokenizer((_DIGIT, _GPT2))
_LLAMA_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)
_QWEN = PreTokenizer((_QWEN2,))
_DEEPSEEK_V3 = PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK3))
_GPT_4O = PreTokenizer((_O200K,))
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_AFMOE_SCRIPTS = "[一-鿿㐀-䶿豈-\ufaff぀-ゟ゠-ヿ･-ﾟ⼀-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"
_JAIS2_SPACES = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))

_GROUPS: dict[str, PreTokenizer] = {
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _LLAMA_BPE,
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "glm4 glm5": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe gigachat a.x-4.0 mellum "
    "exaone4 jais trillion granite-docling": _GPT2_ONLY,
    "mpt olmo modern-bert": PreTokenizer((_GPT2,), composes=True),
    "starcoder refact smollm codeshell exaone minerva-7b mellum2": _DIGITS_GPT2,
    "command-r": PreTokenizer((_DIGIT, _GPT2), composes=True),
    "qwen2": PreTokenizer((_QWEN2,), composes=True),
    "stablelm2 deepseek-r1-qwen kormo f2llmv2 megrez hunyuan solar-open grok-2": _QWEN,
    "qwen35": PreTokenizer((_QWEN35,), composes=True),
    "deepseek-llm": PreTokenizer(
        ("[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_PUNCTUATION, r"\s+$", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", _DIGIT)),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _DEEPSEEK_V3,
    "spark2_5": PreTokenizer(
        (r"\p{N}{1,3}", _CJK, rf"{_DEEPSEEK3_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+", _DIGIT)
    ),
    "youtu": PreTokenizer(("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _CJK, _YOUTU), ignore_merges=True),
    "falcon": PreTokenizer((r"[\p{P}$+<=>\^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "bloom poro-chat gpt3-finnish": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, _DIGIT)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": _GPT_4O,
    "granite-embed-multi-97m": PreTokenizer((_O200K,), ignore_merges=True),
    "tiny_aya cohere2moe": PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K)),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer((_BAILING,)),
    "seed-coder": PreTokenizer((rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_WHITESPACE}",)),
    "ufakzeka": PreTokenizer((rf"{_WORD}|\p{{N}}|{_PUNCTUATION}|{_WHITESPACE}",)),
    "afmoe": PreTokenizer((_DIGITS_FROM_RIGHT, _AFMOE_SCRIPTS, _DEEPSEEK3)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    "exaone-moe": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_PUNCTUATION}|{_WHITESPACE}"), ignore_merges=True
    ),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            _DIGIT,
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        adds_bos=True,
    ),
    "jais-2": PreTokenizer((rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|\s*[\r\n]+|{_JAIS2_SPACES}|\s",)),
}
PRE_TOKENIZERS = {name: kind for names, kind in _GROUPS.items() for name in names.split()}
CHARACTER_PRE_TOKENIZERS = frozenset(("gemma4", "granite-embed-multi-311m", "sarvam-moe"))  # their BPE is not of bytes
LSTRIPPED_MASKS = frozenset(("jina-v2-de", "jina-v2-es", "jina-v2-code", "modern-bert"))
