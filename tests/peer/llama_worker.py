"""Run by the peer interpreter: writes what llama.cpp computes for a GGUF file; compares nothing.

Needs `llama_cpp` and numpy only, so that the peer's environment stays apart from ours.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from pathlib import Path

import llama_cpp
import numpy as np

CACHE_TYPES = {"f32": 0, "f16": 1}  # ggml_type


def write_logits(model: Path, ids: Path, out: Path, context_length: int, cache: str) -> None:
    """Logits of every position of each id list in `ids` (JSON), f32 [texts, tokens, vocab]."""
    texts = json.loads(ids.read_text())
    longest = max(len(text) for text in texts)
    llama = llama_cpp.Llama(
        str(model),
        n_ctx=context_length,
        n_batch=longest,
        n_ubatch=longest,
        n_threads=2,
        n_threads_batch=2,
        logits_all=True,
        flash_attn=False,
        type_k=CACHE_TYPES[cache],
        type_v=CACHE_TYPES[cache],
        verbose=False,
    )
    rows = []
    for text in texts:
        llama.reset()
        llama.eval(text)
        rows.append(np.array(llama.scores[: len(text)], dtype=np.float32))
    np.save(out, np.stack(rows))


def quantise(model: Path, out: Path, kind: str) -> None:
    """Requantise `model` to llama.cpp's file type `kind`, for example Q4_K_M."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.nthread = 2
    params.allow_requantize = True
    status = llama_cpp.llama_model_quantize(
        str(model).encode(), str(out).encode(), ctypes.byref(params)
    )
    if status != 0:
        raise SystemExit(f"llama_model_quantize({model}, {kind}) returned {status}")


def main() -> None:
    """Command line: `logits MODEL IDS OUT CONTEXT`, `quantise MODEL OUT KIND` or `version`."""
    parser = argparse.ArgumentParser()
    verbs = parser.add_subparsers(dest="verb", required=True)
    logits = verbs.add_parser("logits")
    for name in ("model", "ids", "out"):
        logits.add_argument(name, type=Path)
    logits.add_argument("context_length", type=int)
    logits.add_argument("--cache", choices=CACHE_TYPES, default="f32")
    quant = verbs.add_parser("quantise")
    for name in ("model", "out"):
        quant.add_argument(name, type=Path)
    quant.add_argument("kind")
    verbs.add_parser("version")
    given = parser.parse_args()
    if given.verb == "logits":
        write_logits(given.model, given.ids, given.out, given.context_length, given.cache)
    elif given.verb == "version":
        print(llama_cpp.__version__)
    else:
        quantise(given.model, given.out, given.kind)


if __name__ == "__main__":
    main()
