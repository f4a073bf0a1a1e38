"""Perplexity of the bundled model in several types: ours, llama.cpp's, and that of float64.

All read the same dequantised weights. Float64 chains the points of `float64_steps.py`. Two more
chains read activations in the form that an engine has them in (`peers/readings.py`), and so tell
whether that form is all that is between the engine and float64. PEER_PYTHON names a Python with
llama_cpp; without it llama.cpp's figure is that of `peer_llama_cpp.json`, of the same tokens.

    python benchmarks/perplexity_beside.py
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support")]

from peer import comparison  # noqa: E402

from hypocenter.base.dtypes import Float64s  # noqa: E402
from hypocenter.base.tensor import DType  # noqa: E402
from hypocenter.engine.float64_steps import Float64Steps, InputForm, exactly  # noqa: E402
from hypocenter.model.facts.architecture import Architecture, read_architecture  # noqa: E402
from hypocenter.model.gguf.file import GGUFFile, open_gguf  # noqa: E402
from hypocenter.model.quantising.mixes import MIXES  # noqa: E402
from hypocenter.model.quantising.quantising import WantedFile, quantise  # noqa: E402
from hypocenter.peers.own_weights import head_of  # noqa: E402
from hypocenter.peers.readings import FORMS  # noqa: E402
from hypocenter.trace.points import (  # noqa: E402
    OF_LAYERS,
    ModelTrace,
    Point,
    PointPlace,
    TracedStep,
    TraceHeader,
)

OUT = ROOT / "benchmarks" / "results" / "perplexity-float64.json"
KINDS = ("F16", "Q8_0", "Q4_0", "Q5_0")
OURS = "8-bit codes with a scale of four bits per 32 columns"
CODES_OF_32 = "8-bit codes with an f16 scale per 32 columns"
CODES_OF_256 = "8-bit codes with an f32 scale per 256 columns"
#: The form in which each engine reads activations, by the type of the weights.
_CHAINS: dict[str, dict[DType, str]] = {
    "our form": dict.fromkeys((DType.Q8_0, DType.Q4_0, DType.Q5_0, DType.Q6_K), OURS),
    "llama.cpp's form": {
        DType.F16: "f16",
        DType.Q8_0: CODES_OF_32,
        DType.Q4_0: CODES_OF_32,
        DType.Q5_0: CODES_OF_32,
        DType.Q6_K: CODES_OF_256,
    },
}
_MATRICES = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "attn_residual": "attn_output"}
_MATRICES |= {"layer_out": "ffn_down"}


def chained_logits(file: GGUFFile, ids: Iterable[int], forms: Mapping[DType, str]) -> Float64s:
    """Logits of all positions in float64, [num_tokens, vocab_size], with activations read so."""
    arch, ids = read_architecture(file), tuple(ids)
    trace = ModelTrace(_header(file, arch), ())
    rows = tuple(range(len(ids)))
    step = TracedStep(0, ids, rows, (0,) * len(ids), rows, {})
    steps = Float64Steps(file, ModelTrace(trace.header, (step,)))
    places: list[PointPlace] = [("embedding", None)]
    places += [(name, layer) for layer in range(arch.num_layers) for name in OF_LAYERS]
    for place in (*places, ("result_norm", None), ("logits", None)):
        values = steps.point(step, *place, _reading(file, place, forms))
        if place[0] in ("k_cache", "v_cache"):
            values = values.astype(np.float16).astype(np.float64)
        step.points[place] = _point(place, values)
    found: Any = step.points["logits", None].values
    return found  # type: ignore[no-any-return]


def _reading(file: GGUFFile, place: PointPlace, forms: Mapping[DType, str]) -> InputForm:
    name, layer = place
    tensor = head_of(file) if name == "logits" else f"blk.{layer}.{_MATRICES.get(name)}.weight"
    dtype = file.tensors[tensor].dtype if tensor in file.tensors else None
    return FORMS[forms[dtype]] if dtype is not None and dtype in forms else exactly


def _header(file: GGUFFile, arch: Architecture) -> TraceHeader:
    size = Path(file.path).stat().st_size
    where = (str(file.path), size, arch.name, arch.num_layers)
    return TraceHeader("", 2, "", *where, "float64", "f16", {}, (), {})


def _point(place: PointPlace, values: Any) -> Point:
    none = np.zeros(0, np.float32)
    return Point(*place, values.shape, "F64", "", 0, 0, 0, 0, 0, 0, none, values)


def log_probs(
    logits: Callable[[int], np.ndarray[Any, Any]], windows: np.ndarray[Any, Any]
) -> Float64s:
    """Of each token behind the first of its window, given those before it."""
    found = []
    for at, window in enumerate(windows):
        logs = comparison.log_softmax(logits(at)[:-1])
        found.append(np.take_along_axis(logs, window[1:, None], axis=-1)[:, 0])
    return np.concatenate(found)


def row(kind: str, peer: comparison.Peer | None, folder: Path) -> dict[str, Any]:
    """The figures of one type."""
    windows = comparison.validation_windows()
    path = comparison.BUNDLED
    if kind != "Q8_0":  # equal in bytes to what llama.cpp's quantiser writes
        path = folder / f"{kind}.gguf"
        with open_gguf(comparison.BUNDLED) as file:
            quantise(file, path, WantedFile(MIXES[kind], None, False, True), lambda *_: None)
    ours = comparison._our_logits(path, windows)
    logs = {"ours": log_probs(lambda at: ours[at], windows)}
    if peer is not None:
        theirs = peer.logits(path, windows.tolist(), comparison.WINDOW_TOKENS, cache="f16")
        logs["llama.cpp"] = log_probs(lambda at: theirs[at], windows)
    with open_gguf(path) as file:
        for who, forms in {"float64": {}, **_CHAINS}.items():
            chain = partial(_chained, file, windows, forms)
            logs[who] = log_probs(chain, windows)
        types = sorted({tensor.dtype.name for tensor in file.tensors.values()})
    pairs = [*combinations(logs, 2)]
    return {
        "file_type": kind,
        "tensor_types": types,
        "num_tokens": len(logs["ours"]),
        "perplexity": {
            **({} if peer is not None else {"llama.cpp": _measured_before(kind)}),
            **{who: math.exp(-found.mean()) for who, found in logs.items()},
        },
        "percent_apart": {f"{a} - {b}": _percent(logs[b] - logs[a]) for a, b in pairs},
        "token_rms": {f"{a} - {b}": _rms(logs[b] - logs[a]) for a, b in pairs},
    }


def _chained(
    file: GGUFFile, windows: np.ndarray[Any, Any], forms: Mapping[DType, str], at: int
) -> Float64s:
    return chained_logits(file, windows[at].tolist(), forms)


def _measured_before(kind: str) -> float:
    rows = json.loads((OUT.with_name("peer_llama_cpp.json")).read_text())["perplexity"]
    return next(float(row["llama_cpp"]) for row in rows if row["file_type"] == kind)


def _rms(values: Float64s) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def _percent(differences: Float64s) -> dict[str, float]:
    """The mean difference of logarithms in percent of perplexity, and its standard error."""
    error = differences.std(ddof=1) / math.sqrt(len(differences))
    return {"mean": 100 * float(differences.mean()), "error": 100 * float(error)}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        has_peer = bool(os.environ.get("PEER_PYTHON"))
        peer = comparison.Peer.from_environment(Path(folder)) if has_peer else None
        rows = []
        for kind in KINDS:
            rows.append(row(kind, peer, Path(folder)))
            print(json.dumps(rows[-1], indent=1), flush=True)
        found = {"machine": platform.machine(), "has_peer": peer is not None, "rows": rows}
    OUT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
