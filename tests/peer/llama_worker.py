"""Run by the peer interpreter: writes what llama.cpp computes for a GGUF file; compares nothing.

Needs `llama_cpp` and numpy only, so that the peer's environment stays apart from ours.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
from pathlib import Path
from typing import Any

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


def write_blocks(cases: Path, out: Path, ggml_id: int, row_bytes: int) -> None:
    """ggml's blocks of each f32 array of `cases` (npz), u8 [num_rows, row_bytes], by its name.

    "weights" is no case, but what each column counts, for those whose name begins with "weighed".
    """
    folder = Path(os.environ.get("LLAMA_CPP_LIB_PATH", Path(llama_cpp.__file__).parent / "lib"))
    make = ctypes.CDLL(str(folder / "libggml-base.so")).ggml_quantize_chunk
    numbers = (ctypes.c_int64,) * 3
    make.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *numbers, ctypes.c_void_p)
    make.restype = ctypes.c_size_t
    given = dict(np.load(cases, allow_pickle=False))
    weights = given.pop("weights").astype(np.float32)
    made: dict[str, Any] = {}
    for name, values in given.items():
        x = np.ascontiguousarray(values, np.float32)
        made[name] = np.zeros((len(x), row_bytes), np.uint8)
        of_columns = weights.ctypes.data if name.startswith("weighed") else None
        make(ggml_id, x.ctypes.data, made[name].ctypes.data, 0, *x.shape, of_columns)
    np.savez(out, **made)


def quantise(model: Path, out: Path, kind: str) -> None:
    """Requantise `model` to llama.cpp's file type `kind`, for example Q4_K_M."""
    params = llama_cpp.llama_model_quantize_default_params()
    name = "ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{name}")
    params.nthread = 2
    params.allow_requantize = True
    status = llama_cpp.llama_model_quantize(
        str(model).encode(), str(out).encode(), ctypes.byref(params)
    )
    if status != 0:
        raise SystemExit(f"llama_model_quantize({model}, {kind}) returned {status}")


def main() -> None:
    """Command line: `logits MODEL IDS OUT CONTEXT`, `quantise MODEL OUT KIND`,
    `blocks CASES OUT GGML_ID ROW_BYTES` or `version`."""
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
    blocks = verbs.add_parser("blocks")
    for name in ("cases", "out"):
        blocks.add_argument(name, type=Path)
    for name in ("ggml_id", "row_bytes"):
        blocks.add_argument(name, type=int)
    verbs.add_parser("version")
    given = parser.parse_args()
    if given.verb == "logits":
        write_logits(given.model, given.ids, given.out, given.context_length, given.cache)
    elif given.verb == "blocks":
        write_blocks(given.cases, given.out, given.ggml_id, given.row_bytes)
    elif given.verb == "version":
        print(llama_cpp.__version__)
    else:
        quantise(given.model, given.out, given.kind)


if __name__ == "__main__":
    main()
