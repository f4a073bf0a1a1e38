"""The table of byte-BPE pre-tokenizers (`tokenizer.ggml.pre`) as data; it encodes no text itself.

A pre-tokenizer is a list of regular expressions. Each cuts every piece that the one before left,
matches and gaps alike. The expressions, names, `ignore_merges` and `add_bos` are facts of the GGUF
format as `src/llama-vocab.cpp` and `src/unicode.cpp` of llama.cpp define them.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass


def _code_points(ranges: str) -> str:
    """Inside of a regex bracket for space-separated hexadecimal code points and ranges of them."""
    return re.sub("[0-9A-F]+", lambda point: rf"\x{{{point[0]}}}", ranges).replace(" ", "")


# Character categories are those of Unicode 15.0. The regex engine beneath knows a later version, so
# what was assigned since then is taken out of every \p{...}; a test holds the result to 15.0.
_ASSIGNED_AFTER_UNICODE_15 = _code_points(
    "897 1B4E-1B4F 1B7F 1C89-1C8A 2427-2429 31E4-31E5 A7CB-A7CD A7DA-A7DC 105C0-105F3 10D40-10D8F "
    "10EC2-10EFC 11380-113E2 116D0-116E3 11BC0-11BF9 11F5A 13460-143FA 16100-16139 16D40-16D79 "
    "18CFF 1CC00-1CEB3 1E5D0-1E5FF 1F8B2-1F8C1 1FA89-1FA8F 1FABE 1FAC6 1FADC-1FADF 1FAE9 "
    "1FBCB-1FBEF"
)


def category(name: str) -> str:
    """Regex for one Unicode 15.0 category (`L N P M S`), usable alone and inside brackets."""
    return rf"[\p{{{name}}}&&[^{_ASSIGNED_AFTER_UNICODE_15}]]"


_L, _N, _P, _M, _S = (category(name) for name in "LNPMS")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before merging, and what a file may leave unsaid.

    `ignore_merges`: a piece that is a token as it stands is taken without merging.
    `add_bos`: whether a BOS token begins the ids when the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_CONTRACTIONS_ANY_CASE = "'[sStTmMdD]|'[rR][eE]|'[vV][eE]|'[lL][lL]"
_BLANKS = r"\s+(?!\S)|\s+"
_LINES_AND_BLANKS = r"\s*[\r\n]+|" + _BLANKS
_WORD = rf"[^\r\n{_L}{_N}]?{_L}+"
_OTHER = rf" ?[^\s{_L}{_N}]+"

#: A letter and what it may have before it, where marks are letters.
_MARKED_WORD = rf"[^\r\n{_L}{_N}]?[{_L}{_M}]+"

_GPT2 = rf"{_CONTRACTIONS}| ?{_L}+| ?{_N}+|{_OTHER}|{_BLANKS}"
_LLAMA3 = rf"{_CONTRACTIONS_ANY_CASE}|{_WORD}|{_N}{{1,3}}|{_OTHER}[\r\n]*|{_LINES_AND_BLANKS}"
_QWEN2 = rf"{_CONTRACTIONS_ANY_CASE}|{_WORD}|{_N}|{_OTHER}[\r\n]*|{_LINES_AND_BLANKS}"
_QWEN35 = (
    rf"{_CONTRACTIONS_ANY_CASE}|{_MARKED_WORD}|{_N}| ?[^\s{_L}{_M}{_N}]+[\r\n]*|"
    + _LINES_AND_BLANKS
)
_SEED_CODER = rf"{_CONTRACTIONS_ANY_CASE}|{_WORD}|{_N}|{_OTHER}|{_LINES_AND_BLANKS}"
_MINICPM5 = rf"{_CONTRACTIONS_ANY_CASE}|{_WORD}|{_N}+|{_OTHER}[\r\n]*|{_LINES_AND_BLANKS}"
_UFAKZEKA = rf"{_WORD}|{_N}|{_OTHER}[\r\n]*|{_LINES_AND_BLANKS}"
_EXAONE_MOE = (
    rf"{_CONTRACTIONS_ANY_CASE}|[^\r\n{_L}{_N}]?(?:{_L}{_M}*(?: {_L}{_M}*)*)+|{_N}|"
    rf"{_OTHER}[\r\n/]?|{_LINES_AND_BLANKS}"
)
# White space in powers of two, so that a long run becomes few tokens.
_JAIS2 = (
    rf"{_CONTRACTIONS_ANY_CASE}|{_WORD}|{_N}{{1,3}}|{_OTHER}[\r\n]*|\s*[\r\n]+|"
    + "".join(rf"\s{{{2**power}}}(?!\S)|" for power in range(9, 1, -1))
    + r"\s{1,2}(?!\S)|\s"
)
# The letters of llama.cpp: neither does it part words where capitals begin, nor join marks to them.
_HAN = _code_points("3400-4DBF 4E00-9FFF F900-FAFF 20000-2A6DF 2A700-2EBEF 2F800-2FA1F")
_KIMI_K2 = (
    rf"[{_HAN}]+|[^\r\n{_L}{_N}]?[{_L}&&[^{_HAN}]]+(?:{_CONTRACTIONS_ANY_CASE})?|{_N}{{1,3}}|"
    rf"{_OTHER}[\r\n]*|{_LINES_AND_BLANKS}"
)
# Digits by threes, counted from the last one. The first group of a number has what stands before
# it with it; where one group ends, the rest are whole threes. The last choice keeps text without
# digits from being searched from each of its characters.
_THREES = rf"(?<={_N}){_N}{{3}}|[^{_N}]*+{_N}{{1,3}}?(?=(?:{_N}{{3}})*+(?!{_N}))|[^{_N}]++\z"
# Words are not parted at all; digits go by threes, counted from the last one. Behind three of them
# there are whole threes, so a long number is not read to its end for each.
_ASCII_THREES = "(?<=[0-9]{3})[0-9]{3}|[0-9]{3}(?=(?:[0-9]{3})*+(?![0-9]))"

# Words that begin with capitals. Only ASCII letters have a case here: every other letter is both.
_UPPER = rf"[{_L}&&[^a-z]]"
_LOWER = rf"[{_L}&&[^A-Z]]"
_CASED = (
    rf"[^\r\n{_L}{_N}]?{_UPPER}*{_LOWER}+{{suffix}}|[^\r\n{_L}{_N}]?{_UPPER}+{_LOWER}*{{suffix}}|"
)
_TEKKEN = _CASED.replace("{suffix}", "") + rf"{_N}|{_OTHER}[\r\n/]*|{_LINES_AND_BLANKS}"
_GPT4O = (
    _CASED.replace("{suffix}", f"(?:{_CONTRACTIONS_ANY_CASE})?")
    + rf"{_N}{{1,3}}|{_OTHER}[\r\n/]*|{_LINES_AND_BLANKS}"
)
# The same with marks for letters, which are upper and lower case both.
_MARKED_GPT4O = _GPT4O.replace(_UPPER, rf"[{_L}{_M}&&[^a-z]]").replace(
    _LOWER, rf"[{_L}{_M}&&[^A-Z]]"
)
# Here llama.cpp takes all letters for upper and lower case both.
_CASELESS = rf"{_MARKED_WORD}(?:{_CONTRACTIONS_ANY_CASE})?|"
_YOUTU = _CASELESS + rf"{_N}|{_OTHER}[\r\n/]*|{_LINES_AND_BLANKS}"
_TINY_AYA = _CASELESS + rf"{_N}{{1,3}}|{_OTHER}[\r\n/]*|{_LINES_AND_BLANKS}"

# White space never matches in these two classes, although it lies inside their ranges.
_CJK_DEEPSEEK = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}&&\S]+"
_PUNCTUATION_DEEPSEEK = r"\s?[!-/:-~！-／：-～‘-‟\x{3001}\x{3002}]+"
_CASED_LETTERS_DEEPSEEK = _code_points(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 "
    "388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA "
    "1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 "
    "1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB "
    "1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D "
    "212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 "
    "A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A "
    "FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF "
    "1E900-1E943"
)
_CJK_DEEPSEEK_V3 = r"[一-龥\x{3040}-ヿ]+"
_WORD_DEEPSEEK_V3 = (
    rf"[!\x{{22}}#$%&'()*+,\-./:;<=>?@\[\\\]^_`{{|}}~][A-Za-z]+|[^\r\n{_L}{_P}{_S}]?[{_L}{_M}]+|"
)
_DEEPSEEK_V3 = _WORD_DEEPSEEK_V3 + rf" ?[{_P}{_S}]+[\r\n]*|{_LINES_AND_BLANKS}"
_SPARK = _WORD_DEEPSEEK_V3 + rf" ?[{_P}{_S}]+|[\r\n]|{_BLANKS}"
# The compatibility ideographs begin at 8C48 there, and not at F900, as they should.
_ASIAN_AFMOE = "[{}]+".format(
    _code_points(
        "E40-E7F E80-EFF 1000-109F 1100-11FF 1780-17FF 2F00-2FDF 3040-30FF 3400-4DBF 4E00-FAFF "
        "FF65-FF9F"
    )
)
# White space and these marks end a word, opening and closing parentheses and bars too.
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

_BY_FAMILY: dict[str, PreTokenizer] = {
    "default": PreTokenizer((rf"[{_P}$+<=>^~|]+", _GPT2, rf"{_N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "starcoder": PreTokenizer((_N, _GPT2)),
    "falcon": PreTokenizer((rf"[{_P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "llama-bpe": PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    "glm4": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,)),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS_DEEPSEEK}]+",
            _PUNCTUATION_DEEPSEEK,
            # Trailing white space. The look-behind keeps a long run from being tried n times.
            r"(?<!\s)\s++\z",
            _CJK_DEEPSEEK,
            rf"{_N}+",
        )
    ),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", rf"\s?{_L}+", rf"\s?{_P}+", _CJK_DEEPSEEK, _N),
    ),
    "deepseek-v3": PreTokenizer((rf"{_N}{{1,3}}", _CJK_DEEPSEEK_V3, _DEEPSEEK_V3)),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "kimi-k2": PreTokenizer((_KIMI_K2,)),
    "minicpm5": PreTokenizer((rf"{_N}{{1,3}}", _MINICPM5), ignore_merges=True),
    "jais-2": PreTokenizer((_JAIS2,)),
    "exaone-moe": PreTokenizer((_EXAONE_MOE,)),
    "spark2_5": PreTokenizer((rf"{_N}{{1,3}}", _CJK_DEEPSEEK_V3, _SPARK, _N)),
    "ufakzeka": PreTokenizer((_UFAKZEKA,)),
    "laguna": PreTokenizer((r"[^\n]+|\n+", _QWEN2)),
    "youtu": PreTokenizer(
        (
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _CJK_DEEPSEEK_V3,
            _YOUTU,
        ),
        ignore_merges=True,
    ),
    "granite-embed-multi-97m": PreTokenizer((_MARKED_GPT4O,), ignore_merges=True),
    "tiny_aya": PreTokenizer((_THREES, _TINY_AYA)),
    "afmoe": PreTokenizer((_THREES, _ASIAN_AFMOE, _DEEPSEEK_V3)),
    "superbpe": PreTokenizer((rf"{_N}+", _ASCII_THREES)),
    "bloom": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, _N)),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "IMGIMG[A-I]{1,4}Z",
            r"[\t\n]|    |  ",
            _N,
            rf"[{_P}!-/:-@\[-`{{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
}

#: Other names of the same rules.
_ALIASES: dict[str, tuple[str, ...]] = {
    "gpt-2": (
        "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais", "trillion",
        "granite-docling", "exaone4", "modern-bert", "jina-es", "jina-de", "jina-v2-es",
        "jina-v2-de",
    ),
    "starcoder": (
        "smollm", "command-r", "refact", "codeshell", "exaone", "minerva-7b", "mellum2",
    ),
    "llama-bpe": (
        "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
    ),
    "glm4": ("glm5",),
    "chatglm-bpe": ("dbrx", "smaug-bpe"),
    "qwen2": (
        "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open",
        "grok-2", "bailingmoe", "bailingmoe2", "llada-moe",
    ),
    "gpt-4o": ("llama4", "kanana2", "talkie", "minimax-m2"),
    "deepseek-v3": ("hunyuan-dense", "joyai-llm", "hy_v4"),
    "tiny_aya": ("cohere2moe",),
    "bloom": ("poro-chat", "gpt3-finnish"),
}  # fmt: skip

#: Every name of `tokenizer.ggml.pre` that hypocenter runs.
PRE_TOKENIZERS: dict[str, PreTokenizer] = dict(
    sorted(
        (name, pre)
        for family, pre in _BY_FAMILY.items()
        for name in (family, *_ALIASES.get(family, ()))
    )
)

#: Names that say that text is not cut at all: characters are merged, as `blank_bpe.py` does it.
UNCUT = frozenset({"sarvam-moe"})
#: Names of llama.cpp whose models make embeddings of texts, by architectures that are not run here.
OF_EMBEDDINGS = frozenset(
    {"granite-embed-multi-311m", "jina-v1-en", "jina-v2-code", "roberta-bpe", "whitespace"}
)


def known_names(wrong: str) -> str:
    """The sentence that answers an unknown name: the nearest known one, then all of them."""
    if wrong in OF_EMBEDDINGS:
        return "models with it make embeddings, and hypocenter does not run their architecture"
    known = sorted({*PRE_TOKENIZERS, *UNCUT})
    nearest = difflib.get_close_matches(wrong, known, n=1)
    guess = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"{guess}known names are {', '.join(known)}"
