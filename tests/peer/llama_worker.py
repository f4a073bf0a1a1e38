"""Run by the peer interpreter: writes what llama.cpp computes for a GGUF file; compares nothing.

Needs `llama_cpp` and numpy only, so that the peer's environment stays apart from ours.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

CACHE_TYPES = {"f32": 0, "f16": 1}  # ggml_type
#: What a dry run says of a tensor: its name, its type and the new one, if it gets another.
_TYPES = re.compile(
    r"\[ *\d+/ *\d+\] (\S+) +- \[[^]]*\], type = +(\w+), size = .*?MiB(?: -> .*?\((\w+)\))?\n"
)


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


def quantise(model: Path, out: Path, kind: str, imatrix: Path | None, pure: bool) -> None:
    """Requantise `model` to llama.cpp's file type `kind`, for example Q4_K_M."""
    params = quantise_params(kind)
    params.pure = pure
    if imatrix is not None:
        weights = {name: np.ascontiguousarray(values) for name, values in np.load(imatrix).items()}
        params.imatrix = imatrix_of(weights)
    status = llama_cpp.llama_model_quantize(
        str(model).encode(), str(out).encode(), ctypes.byref(params)
    )
    if status != 0:
        raise SystemExit(f"llama_model_quantize({model}, {kind}) returned {status}")


def quantise_params(kind: str) -> Any:
    """The defaults, for that file type."""
    params = llama_cpp.llama_model_quantize_default_params()
    name = "ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{name}")
    params.nthread = 2
    params.allow_requantize = True
    return params


def imatrix_of(weights: dict[str, Any]) -> Any:
    """An importance matrix as llama.cpp takes it; `weights` must outlive it."""
    entries = (llama_cpp.llama_model_imatrix_data * (len(weights) + 1))()
    floats = ctypes.POINTER(ctypes.c_float)
    for entry, (name, values) in zip(entries, weights.items(), strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(floats)
    return entries


def show_types(model: Path, kinds: list[str]) -> None:
    """Print as JSON the type that each tensor of `model` gets, by kind, without and with an
    importance matrix; null where llama.cpp refuses."""
    lines: list[str] = []
    log = llama_cpp.llama_log_callback(lambda _, text, __: lines.append(text.decode()))
    llama_cpp.llama_log_set(log, ctypes.c_void_p())
    some = {"none": np.ones(1, np.float32)}
    found: dict[str, Any] = {}
    for kind in kinds:
        for weighed in (False, True):
            params = quantise_params(kind)
            params.dry_run = True
            if weighed:
                params.imatrix = imatrix_of(some)
            lines.clear()
            status = llama_cpp.llama_model_quantize(str(model).encode(), b"", ctypes.byref(params))
            rows = _TYPES.findall("".join(lines))
            types = [[name, (new or old).upper()] for name, old, new in rows]
            found[f"{kind} weighed" if weighed else kind] = types if status == 0 else None
    print(json.dumps(found))


def main() -> None:
    """Command line: `logits MODEL IDS OUT CONTEXT`, `quantise MODEL OUT KIND`,
    `types MODEL KIND...`, `blocks CASES OUT GGML_ID ROW_BYTES` or `version`."""
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
    quant.add_argument("--imatrix", type=Path)
    quant.add_argument("--pure", action="store_true")
    types = verbs.add_parser("types")
    types.add_argument("model", type=Path)
    types.add_argument("kinds", nargs="+")
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
    elif given.verb == "types":
        show_types(given.model, given.kinds)
    elif given.verb == "version":
        print(llama_cpp.__version__)
    else:
        quantise(given.model, given.out, given.kind, given.imatrix, given.pure)


if __name__ == "__main__":
    main()
