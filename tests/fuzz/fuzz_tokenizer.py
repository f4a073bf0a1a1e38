"""Atheris target for tokenizers: odd vocabularies and odd texts; `scripts/test-fuzz` runs it.

The input begins with the vocabulary, a character of text per token, and ends with the text. Only
the refusals of `hypocenter.base.errors` are accepted. Every text that is encoded must come back.
"""

from __future__ import annotations

import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["hypocenter.model"]):
    from hypocenter.base.errors import HypoError
    from hypocenter.model.gguf.file import open_gguf
    from hypocenter.model.text.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
write_vocabulary: Any = runpy.run_path(str(ROOT / "tools" / "tokenizer_fixtures.py"))[
    "write_vocabulary"
]


def one_input(path: Path, data: bytes) -> None:
    """Build one vocabulary of the `llama` form, encode and decode one text."""
    source = atheris.FuzzedDataProvider(data)
    num_tokens = source.ConsumeIntInRange(1, 24)
    tokens = [source.ConsumeUnicodeNoSurrogates(4) for _ in range(num_tokens)]
    kinds = [source.ConsumeIntInRange(0, 7) for _ in range(num_tokens)]
    scores = [float(source.ConsumeIntInRange(-4, 4)) for _ in range(num_tokens)]
    if source.ConsumeBool():
        tokens += [f"<0x{byte:02X}>" for byte in range(256)]
        kinds += [6] * 256
        scores += [0.0] * 256
    vocabulary = {"tokens": tokens, "kinds": kinds, "scores": scores, "roles": {}}
    extra = {"tokenizer.ggml.add_bos_token": False}
    text = source.ConsumeUnicode(400)
    try:
        write_vocabulary(path, vocabulary, "llama", extra)
        with open_gguf(path) as file:
            tokenizer = load_tokenizer(file)
        ids = tokenizer.encode(text)
    except HypoError:
        return
    if {0, 4, 5}.isdisjoint(kinds):  # these are shown otherwise than they were read
        stream = tokenizer.detokenizer(skip_special=False, at_start=False)
        shown = "".join(map(stream.push, ids)) + stream.flush()
        # A vocabulary may lack the mark for a blank, and then spells it by bytes.
        blank = " " if text else ""
        assert shown.replace("▁", " ") == blank + text.replace("▁", " "), (vocabulary, text)


def main() -> None:
    """Arguments are libFuzzer's: a corpus folder, `-max_total_time=120`, or one input to repeat."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.gguf"
        atheris.Setup(sys.argv, lambda data: one_input(path, data))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
