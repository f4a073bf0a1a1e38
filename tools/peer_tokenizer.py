"""Asks llama.cpp how it tokenises; runs where `llama_cpp` is, and imports no hypocenter.

Reads one JSON object from standard input, `{"path": vocabulary file, "texts": [...]}`, and writes
one to standard output: `ids[parse_special][text]` without BOS and EOS, `ids_with_special` the same
with them, and the facts of the vocabulary. Pieces are hexadecimal.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import llama_cpp


def main() -> None:
    """Answer one request."""
    request = json.load(sys.stdin)
    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(request["path"].encode(), params)
    if not model:
        raise SystemExit(f"llama.cpp does not load {request['path']}")
    vocab = llama_cpp.llama_model_get_vocab(model)
    texts = [text.encode() for text in request["texts"]]
    num_tokens = llama_cpp.llama_vocab_n_tokens(vocab)
    answer = {
        "ids": [[_tokenize(vocab, t, False, parse) for t in texts] for parse in (False, True)],
        "ids_with_special": [_tokenize(vocab, t, True, False) for t in texts],
        "bos": llama_cpp.llama_vocab_bos(vocab),
        "eos": llama_cpp.llama_vocab_eos(vocab),
        "add_bos": bool(llama_cpp.llama_vocab_get_add_bos(vocab)),
        "add_eos": bool(llama_cpp.llama_vocab_get_add_eos(vocab)),
        "ends": [i for i in range(num_tokens) if llama_cpp.llama_vocab_is_eog(vocab, i)],
        "pieces": [_piece(vocab, i, True).hex() for i in range(num_tokens)],
        "hidden": [
            i for i in range(num_tokens) if _piece(vocab, i, True) and not _piece(vocab, i, False)
        ],
    }
    json.dump(answer, sys.stdout)


def _tokenize(vocab: Any, text: bytes, add_special: bool, parse_special: bool) -> list[int]:
    size = len(text) + 8
    buffer = (llama_cpp.llama_token * size)()
    count = llama_cpp.llama_tokenize(
        vocab, text, len(text), buffer, size, add_special, parse_special
    )
    assert count >= 0, count
    return list(buffer[:count])


def _piece(vocab: Any, token_id: int, special: bool) -> bytes:
    buffer = ctypes.create_string_buffer(1 << 12)
    count = llama_cpp.llama_token_to_piece(vocab, token_id, buffer, 1 << 12, 0, special)
    assert count >= 0, count
    return buffer.raw[:count]


if __name__ == "__main__":
    main()
