"""Makes tests/fixtures/tokenizers: small vocabularies, one rich set of texts, llama.cpp's ids.

    PEER_PYTHON=/path/to/python-with-llama_cpp python tools/tokenizer_fixtures.py

The vocabularies are made to tell pre-tokenizers apart: merges go across every boundary of words, so
that a piece cut elsewhere gives other ids. Everything is seeded; only the ids come from llama.cpp.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from hypocenter.model.text.pretokenizers import PRE_TOKENIZERS

FOLDER = Path(__file__).parent.parent / "tests" / "fixtures" / "tokenizers"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

SPECIAL_TOKENS = {
    "<|bos|>": CONTROL, "<|endoftext|>": CONTROL, "<|im_start|>": CONTROL,
    "<|im_end|>": CONTROL, "x[[a": USER_DEFINED, "<think>": USER_DEFINED, "</think>": USER_DEFINED,
    "[[ab]]": USER_DEFINED, "<tool>": CONTROL, "<|eot_id|>": NORMAL,
    "[PAD7]": UNUSED, "<|fim_pad|>": NORMAL,
}  # fmt: skip

#: One character or more of every class that a pre-tokenizer tells apart.
CLASSES = (
    "aszASZ" "éßΣж中がア한اא๓" "\u0301\u0e31\u20dd" "0139٣²Ⅷ" "'!.,/-_([{<" "$+=^`|~\u20ac"
    " \t\n\r\u00a0\u3000\u2028\u0085\u200b" "。！～‘—" "🦙\u200d\ufe0f"
    "\x00\x1f\ue000\U0003fffd\u0897\U00010d40" "µªℤ"
)  # fmt: skip

#: What contractions are made of.
CONTRACTED = "'rReEvVlLtTdDmMsS"

PROSE = (
    "The quick brown fox can't jump over what it WON'T see; she'll say it's HERS, we've 'VE 'Re.\n"
    "I'm sure they'd DON'T o'clock rock'n'roll 'tis 's 'S 'll'LL d'accord y'all're Ain'T\n"
    "Ich weiß, daß Größe zählt – Ça va? Αθήνα, ΕΛΛΆΔΑ. Привет, МИР! Съешь же ещё этих булок.\n"
    "مرحبا بالعالم ١٢٣ שלום עולם नमस्ते दुनिया १२३ สวัสดีชาวโลก ๑๒๓ 你好，世界。日本語テキスト、カタカナ"
    "ひらがな 안녕하세요 세계 កាន់តែពិសេស ខ្ញុំ e\u0301 a\u0308\u0323 Z\u0351\u036b\u0343 ǅ ﬀ ℵ K Å\n"
)
CODE = (
    "def f(x: int = 0x1F, *args) -> dict[str, float]:\n    if x >= 10 and x != 3.14e-10:\n"
    "\t\treturn {'key_%d' % x: x ** 2}  # TODO(me): fix!!\n\r\n"
    'for (int i=0;i<n;++i){ a[i]+=b->c[i]&0xFF; }//done\n<div class="x">&nbsp;</div>\n'
    "SELECT * FROM t WHERE id='42';\n\\alpha^{2}_{ij} $$x$$ #include <stdio.h> C:\\path\\to ../..\n"
    "HTTPServer XMLHttpRequest camelCase snake_case SCREAMING_CASE iPhone15Pro aBcD eBay McDonald\n"
)
EMOJI = (
    "🦙 🚀👩\u200d👩\u200d👧\u200d👦🏳\ufe0f\u200d🌈🇩🇪🇫🇷👍🏽 "
    "😶\u200d🌫\ufe0f ✅☃\ufe0f ©™ ❤\ufe0f\u200d🔥 "
    "1\ufe0f\u20e3#\ufe0f\u20e3 ～～～ €100 £5 ¥¥ №7 ½ ²³ Ⅷ "
    "٣٤٥٦ 〇一二三 \u180e\u200b\u2060\ufeff x"
)
DIGITS = (
    "1 12 123 1234 12345 123456 1234567 1,234,567.89 3.14159 0x1F2e 1e-10 v1.2.3 2024-01-31 9a9 "
    "٣٤٥٦٧ ²³¹"
)
SPECIALS = (
    "<|im_start|>user\n Hi <|im_end|>\n<|im_start|>assistant<think>\n\nx</think>  y<|endoftext|>  z"
    "x[[ab]] [[ab]]x[[a <|im_start <||im_end|>> <s> </s><unk><0x0A> <|eot_id|><tool> \n <tool>z"
)


def texts() -> list[str]:
    """The texts of all comparisons, from plain to random."""
    blanks = [char * n + end for char in " \t\n" for n in range(1, 9) for end in ("", "a")]
    mixed = [
        "a \n  b\t\tc \r\n\r\n d",
        " \r\n \n\n  \t\n x  ",
        "\r\r\n\n\r",
        "a\u00a0 \u3000b \u2028 c\u0085d",
    ]
    mixed += [
        " " * 3 + "1",
        "\t é",
        "\n\n中 。\u3000あ",
        "  !!  ?\n\n/ /\r\n",
        "! \n",
        "'s's 'S",
        "'",
        "' ",
        "",
    ]
    rng = random.Random(20)
    classes = ["".join(rng.choices(CLASSES, k=120)) for _ in range(24)]
    letters = ["".join(rng.choices("aAé中1 '\n.s", k=120)) for _ in range(8)]
    ends = ["'" + a + b for a, b in itertools.product("rRvVlL", "eElL")]
    letters += ["".join(rng.choices([*ends, *CONTRACTED], k=150)) for _ in range(4)]
    anything = ["".join(_any_character(rng) for _ in range(160)) for _ in range(4)]
    long = ["x" * 300 + "A" * 300, " " * 200 + "x", "ab" * 100, "1" * 100]
    natural = [PROSE, CODE, EMOJI, DIGITS, SPECIALS, PROSE.upper(), "Hello world", " Hello  World!"]
    return [*natural, "".join(blanks), *mixed, *classes, *letters, *anything, *long]


def bpe_vocabulary(corpus: list[str]) -> dict[str, Any]:
    """Byte BPE whose merges ignore words: characters, then trained ones, then pairs of classes."""
    alphabet = sorted(ByteLevel.alphabet())
    to_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
    merges: dict[tuple[str, str], None] = {}
    known = dict.fromkeys(alphabet)

    def add(left: str, right: str) -> None:
        if left in known and right in known:
            merges.setdefault((left, right))
            known.setdefault(left + right)

    symbols = []
    for char in dict.fromkeys(CLASSES):
        ((symbol, _),) = to_bytes.pre_tokenize_str(char)
        for end in range(1, len(symbol)):
            add(symbol[:end], symbol[end])
        symbols.append(symbol)
    # Runs of white space: where they are cut shows in threes and twos.
    for left, right in (("Ġ", "Ġ"), ("ĠĠ", "Ġ"), ("ĠĠ", "ĠĠ"), ("Ċ", "Ċ")):
        add(left, right)
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = to_bytes
    trainer = BpeTrainer(
        vocab_size=1100, initial_alphabet=alphabet, show_progress=False, max_token_length=12
    )
    trained.train_from_iterator(corpus[:8], trainer)
    for left, right in json.loads(trained.to_str())["model"]["merges"]:
        add(left, right)
    for pair in itertools.product(CONTRACTED, repeat=2):
        add(*pair)
    pairs = list(itertools.product(symbols, repeat=2))
    random.Random(21).shuffle(pairs)
    for left, right in pairs[:3000]:
        add(left, right)
    # Whole words that no merge makes: only `ignore_merges` finds them.
    words = [word for text in corpus[:8] for word in text.split()][::3]
    for word in [*words, *(" " + word for word in words), "123", "!!"]:
        ((symbol, _),) = to_bytes.pre_tokenize_str(word)
        known.setdefault(symbol)
    lines = [" ".join(pair) for pair in merges]
    # Some merges twice: the first rank counts.
    return _with_specials(list(known), {"merges": [*lines, *lines[100:300]]})


def spm_vocabulary(corpus: list[str]) -> dict[str, Any]:
    """Random substrings with scores that often tie; many characters are no token of their own."""
    rng = random.Random(22)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    known = dict.fromkeys(tokens)
    for text in corpus:
        if text == SPECIALS:  # no token may help to merge into "<s>": llama.cpp would, we do not
            continue
        text = text.replace(" ", "▁")
        for _ in range(len(text) // 3):
            start, length = rng.randrange(len(text)), rng.choice((1, 1, 2, 2, 2, 3, 3, 4, 5, 7))
            part = text[start : start + length]
            # llama.cpp cuts a token at a null character.
            if part and "\0" not in part and "<s" not in part:
                known.setdefault(part)
    words = [word for word in known if word not in SPECIAL_TOKENS][:3500]
    kinds += [NORMAL] * (len(words) - len(kinds))
    scores = [0.0] * 259 + [-rng.randrange(400) / 4 for _ in words[259:]]
    vocabulary = _with_specials(words, {}, kinds)
    vocabulary["scores"] = scores + [0.0] * (len(vocabulary["tokens"]) - len(words))
    return vocabulary


def _with_specials(
    words: list[str], extra: dict[str, Any], kinds: list[int] | None = None
) -> dict[str, Any]:
    words = [word for word in words if word not in SPECIAL_TOKENS]
    kinds = kinds or [NORMAL] * len(words)
    assert len(kinds) == len(words)
    roles = {"bos": len(words), "eos": len(words) + 1}
    tokens = [*words, *SPECIAL_TOKENS]
    return {"tokens": tokens, "kinds": [*kinds, *SPECIAL_TOKENS.values()], "roles": roles, **extra}


def write_vocabulary(
    path: Path, vocabulary: dict[str, Any], model: str, extra: dict[str, Any]
) -> None:
    """A GGUF file that holds `vocabulary` alone; `extra` goes into the metadata as it is."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["kinds"])
    if "scores" in vocabulary:
        writer.add_token_scores(vocabulary["scores"])
    if "merges" in vocabulary:
        writer.add_token_merges(vocabulary["merges"])
    for role, token_id in vocabulary["roles"].items():
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", token_id)
    for key, value in extra.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_string
        add(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def ask_peer(path: Path, cases: list[str]) -> dict[str, Any]:
    """What llama.cpp says about the vocabulary file at `path`; see `peer_tokenizer.py`."""
    script = Path(__file__).with_name("peer_tokenizer.py")
    request = json.dumps({"path": str(path), "texts": cases})
    command = [os.environ["PEER_PYTHON"], str(script)]
    done = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{path.name}: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


#: Names that a file of several goes by.
LABELS = ("gpt-2", "starcoder", "llama-bpe", "qwen2", "gpt-4o", "deepseek-v3", "glm4")
#: Fixtures of the `llama` form: what stands in the metadata beside the vocabulary.
SPM_CASES: dict[str, dict[str, Any]] = {
    "spm": {},
    "spm-no-prefix": {"tokenizer.ggml.add_space_prefix": False},
    "spm-remove-extra": {"tokenizer.ggml.remove_extra_whitespaces": True},
    "spm-phi-3": {"general.name": "Phi-3 small", "tokenizer.ggml.add_eos_token": True},
}


def main() -> None:
    """Write every fixture anew."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for stale in FOLDER.glob("*.json"):
        stale.unlink()
    cases = texts()
    bpe, spm = bpe_vocabulary(cases), spm_vocabulary(cases)
    for name, value in (("texts", cases), ("bpe-vocabulary", bpe), ("spm-vocabulary", spm)):
        _write(name, value)
    families: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        for pre in PRE_TOKENIZERS:
            write_vocabulary(path, bpe, "gpt2", {"tokenizer.ggml.pre": pre})
            families.setdefault(_expected(ask_peer(path, cases)), []).append(pre)
        for expected, names in families.items():
            label = next((name for name in LABELS if name in names), names[0])
            _write(f"bpe-{label}", {"names": names, **json.loads(expected)})
        for name, extra in SPM_CASES.items():
            write_vocabulary(path, spm, "llama", extra)
            _write(name, {"metadata": extra, **json.loads(_expected(ask_peer(path, cases)))})
    print(f"{len(PRE_TOKENIZERS)} names in {len(families)} families", file=sys.stderr)


def _expected(answer: dict[str, Any]) -> str:
    keys = ("ids", "ids_with_special", "add_bos", "add_eos", "ends", "hidden")
    # Most texts give the same ids in every mode; those are written once.
    plain, parsed = answer["ids"]
    compact = {
        **{key: answer[key] for key in keys[2:]},
        "ids": plain,
        "ids_parsed": {str(i): ids for i, ids in enumerate(parsed) if ids != plain[i]},
        "ids_with_special": {str(i): answer["ids_with_special"][i] for i in (0, 4)},
    }
    return json.dumps(compact)


def _write(name: str, value: Any) -> None:
    text = json.dumps(value, ensure_ascii=name == "texts", separators=(",", ":"))
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def _any_character(rng: random.Random) -> str:
    while True:
        point = rng.choice((rng.randrange(0x3000), rng.randrange(0x10000), rng.randrange(0x110000)))
        if not 0xD800 <= point <= 0xDFFF:
            return chr(point)


if __name__ == "__main__":
    main()
