"""Measures hypocenter against llama.cpp: divergence of distributions, perplexity; no verdicts."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from models.families import FamilyModel, engine_logits, hf_logits, make_family
from models.family_gguf import Fault, write_gguf
from models.family_table import FAMILIES, WINDOW
from models.gguf_edit import rewritten
from repository import ROOT

from hypocenter.base.tensor import DType
from hypocenter.engine.llm import LLM
from hypocenter.model.facts.families import FAMILIES as OUR_FAMILIES
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.text.tokenizer import load_tokenizer
from hypocenter.settings.config import EngineConfig
from peer.converted import Converted
from peer.decoder_faults import DECODER_FAULTS

WORKER = Path(__file__).with_name("llama_worker.py")
BUNDLED = ROOT / "src/hypocenter/assets/demo-q8_0.gguf"
WORKER_SECONDS = 100
#: Mean divergence that a sound family may show, in nats, some ten times what is measured. Rounding
#: alone gives 1e-10; but llama.cpp takes GELU from a table of f16 values (ggml-cpu `vec.h`).
KL_LIMIT = 1e-8
KL_LIMIT_GELU = 5e-5
PERPLEXITY_LIMIT = 0.005
COMPARABLE = tuple(name for name, family in FAMILIES.items() if family.llama_cpp_agrees)
#: Other types are compared where they are unpacked, with the `gguf` package.
PERPLEXITY_KINDS = (
    *("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS"),
)
CONVERTED_KINDS = ("F16", "Q8_0", "Q4_K_M")
NUM_CONVERTED_TOKENS = 64
NUM_WINDOWS = 8
WINDOW_TOKENS = 512

#: Faults that a file can carry. The last four change one key; families without it skip them.
FILE_FAULTS: dict[str, Fault] = {
    "rope base x2": Fault(rope_base_factor=2.0),
    "q/k rows swapped": Fault(swapped_rows=True),
    "epsilon x100": Fault(epsilon_factor=100.0),
    "window +1": Fault(metadata={"attention.sliding_window": WINDOW + 1}),
    "score cap x1.1": Fault(metadata={"attn_logit_softcapping": 3.3}),
    "rope factor 1": Fault(metadata={"rope.scaling.factor": 1.0}),
    "rope gain 1": Fault(metadata={"rope.scaling.attn_factor": 1.0}),
}


@dataclass(frozen=True)
class Peer:
    """llama.cpp in an interpreter of its own, with a folder for what passes between."""

    python: Path
    folder: Path

    @classmethod
    def from_environment(cls, folder: Path) -> Peer:
        """Raises RuntimeError when PEER_PYTHON does not name an interpreter."""
        python = Path(os.environ.get("PEER_PYTHON", ""))
        if not python.is_file():
            raise RuntimeError(
                f"PEER_PYTHON is {os.environ.get('PEER_PYTHON')!r}, but must be an interpreter "
                "with llama_cpp; run scripts/test-peers, which builds one"
            )
        return cls(python, folder)

    def logits(
        self, model: Path, texts: Sequence[Sequence[int]], context_length: int, cache: str = "f32"
    ) -> np.ndarray:
        """Logits of all positions of equally long texts, f32 [texts, tokens, vocab_size]."""
        ids, out = self.folder / "ids.json", self.folder / "logits.npy"
        ids.write_text(json.dumps([list(text) for text in texts]))
        self._run("logits", model, ids, out, context_length, "--cache", cache)
        return np.asarray(np.load(out, allow_pickle=False))

    def quantise(
        self,
        model: Path,
        out: Path,
        kind: str,
        weights: dict[str, np.ndarray] | None = None,
        *,
        pure: bool = False,
    ) -> None:
        """Requantise with llama.cpp's own quantiser; `kind` as in its file type names. `weights`:
        f32 [num_columns] of tensors by their names."""
        more: list[object] = ["--pure"] if pure else []
        if weights is not None:
            given = self.folder / "imatrix.npz"
            arrays: dict[str, Any] = {**weights}
            np.savez(given, **arrays)
            more += ["--imatrix", given]
        self._run("quantise", model, out, kind, *more)

    def types(self, model: Path, kinds: Sequence[str]) -> dict[str, list[list[str]] | None]:
        """Name and type of each tensor, as `llama_worker.show_types` says."""
        found: dict[str, list[list[str]] | None] = json.loads(self._run("types", model, *kinds))
        return found

    def blocks(self, dtype: DType, cases: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """ggml's blocks of f32 rows, by the names of the cases; see `llama_worker.write_blocks`."""
        given, out = self.folder / "cases.npz", self.folder / "blocks.npz"
        arrays: dict[str, Any] = {**cases}
        np.savez(given, **arrays)
        num_columns = next(x.shape[-1] for name, x in cases.items() if name != "weights")
        self._run("blocks", given, out, dtype.ggml_id, dtype.num_bytes(num_columns))
        return dict(np.load(out, allow_pickle=False))

    def version(self) -> str:
        """Version of llama-cpp-python."""
        return self._run("version").strip()

    def _run(self, *arguments: object) -> str:
        done = subprocess.run(
            [self.python, WORKER, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=WORKER_SECONDS,
        )
        if done.returncode != 0:
            raise RuntimeError(f"llama_worker.py {arguments}: {done.stderr[-4000:]}")
        return done.stdout


@dataclass(frozen=True)
class FamilyRow:
    """Mean divergence of one family from llama.cpp, in nats, sound and with each fault planted."""

    family: str
    sound: float
    faults: dict[str, float]

    @property
    def limit(self) -> float:
        """What `sound` must stay below."""
        kind = OUR_FAMILIES[FAMILIES[self.family].arch].activation
        return KL_LIMIT_GELU if kind == "gelu" else KL_LIMIT


@dataclass(frozen=True)
class PerplexityRow:
    """Perplexity of the demo model in one file type, ours beside llama.cpp's."""

    kind: str
    ours: float
    theirs: float
    num_tokens: int

    @property
    def deviation(self) -> float:
        return self.ours / self.theirs - 1


def family_row(name: str, peer: Peer) -> FamilyRow:
    """Run family `name` in llama.cpp and in hypocenter, then hypocenter with every fault.

    llama.cpp always runs the sound file. A fault is planted in the file that hypocenter reads, or,
    where no file can express it, in the facts or the arithmetic of its decoder.
    """
    model = make_family(name, peer.folder)
    theirs = peer.logits(model.path, [model.token_ids], model.context_length)[0]
    sound = mean_kl(theirs, _ours(model, model.path))
    faults = {}
    for label, fault in FILE_FAULTS.items():
        if label in _unseen_by(model) or not _applies(fault, model):
            continue
        path = peer.folder / "fault.gguf"
        write_gguf(model.family, model.hf_model, path, fault)
        faults[label] = mean_kl(theirs, _ours(model, path))
    for label, planted in DECODER_FAULTS.items():
        if label in _unseen_by(model):
            continue
        with planted():
            faults[label] = mean_kl(theirs, _ours(model, model.path))
    return FamilyRow(name, sound, faults)


def _unseen_by(model: FamilyModel) -> Collection[str]:
    """Faults of what a model has not: positions that turn heads, feed-forwards."""
    of_turning = ("rope base x2", "q/k rows swapped", "no rope")
    if OUR_FAMILIES[model.family.arch].is_bare:
        return (*of_turning, "no activation", "silu <-> gelu")
    turns = model.family.metadata.get("rope.scaling.finetuned", True)
    return () if turns else of_turning


def _applies(fault: Fault, model: FamilyModel) -> bool:
    """A fault in metadata needs a family that has the key, and not switched off by a 0.

    Rows of latents are made for both engines in the same order.
    """
    if fault.swapped_rows and OUR_FAMILIES[model.family.arch].has_latent:
        return False
    return not fault.metadata or any(model.family.metadata.get(key) for key in fault.metadata)


def _ours(model: FamilyModel, path: Path) -> np.ndarray:
    return engine_logits(path, model.token_ids, model.context_length)


def mean_kl(reference: np.ndarray, other: np.ndarray) -> float:
    """Mean over positions of KL(reference || other) in nats; both are logits [tokens, vocab]."""
    return float(_kl(reference, other).mean())


def median_kl(reference: np.ndarray, other: np.ndarray) -> float:
    """The median over positions of the same."""
    return float(np.median(_kl(reference, other)))


def _kl(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    log_p, log_q = log_softmax(reference), log_softmax(other)
    return np.asarray((np.exp(log_p) * (log_p - log_q)).sum(-1))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64, over the last axis."""
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(-1, keepdims=True)))


@dataclass(frozen=True)
class ConvertedRow:
    """One file of llama.cpp's own making: median divergence, in nats, of ours and of llama.cpp's
    distribution from that of the numbers that its weights stand for; and for F16 how far ours is
    from transformers, the largest difference over the largest logit.

    A mean would be that of the few tokens for which rounding makes a router choose other experts.
    `theirs` is None where llama.cpp computes another model than transformers.
    """

    model: str
    file_type: str
    ours: float
    theirs: float | None
    error: float | None = None


def converted_row(model: Converted, kind: str, peer: Peer) -> ConvertedRow:
    """Quantise a converted model as `kind`, unless it is that already, and run it in both."""
    model.require_file()
    path, ids = model.path, model.token_ids[:NUM_CONVERTED_TOKENS]
    exact = hf_logits(model.hf_model, ids)
    if kind != "F16":
        path = peer.folder / "quantised.gguf"
        peer.quantise(model.path, path, kind)
        plain = rewritten(path, peer.folder / "plain.gguf", lambda tensors: tensors)
        exact = engine_logits(plain, ids, model.context_length)
    ours = engine_logits(path, ids, model.context_length)
    theirs = None
    if model.family.llama_cpp_agrees:
        theirs = median_kl(exact, peer.logits(path, [ids], model.context_length)[0])
    error = float(np.abs(ours - exact).max() / np.abs(exact).max()) if kind == "F16" else None
    return ConvertedRow(model.name, kind, median_kl(exact, ours), theirs, error)


def perplexity_row(kind: str, peer: Peer) -> PerplexityRow:
    """The bundled model as file type `kind` on held-back Python text; both sides cache in f16."""
    path, windows = _demo_in(kind, peer), validation_windows()
    theirs = peer.logits(path, windows.tolist(), WINDOW_TOKENS, cache="f16")
    ours = _our_logits(path, windows)
    return PerplexityRow(
        kind, _perplexity(ours, windows), _perplexity(theirs, windows), windows[:, 1:].size
    )


def _demo_in(kind: str, peer: Peer) -> Path:
    """The bundled model in another file type, made by llama.cpp from its Q8_0."""
    if kind == "Q8_0":
        return BUNDLED
    path = peer.folder / f"demo-{kind}.gguf"
    peer.quantise(BUNDLED, path, kind)
    return path


@cache
def validation_windows() -> np.ndarray:
    """Token ids of text that the demo model was not trained on, [NUM_WINDOWS, WINDOW_TOKENS]."""
    from tools.demo_model.corpus import collect
    from tools.demo_model.recipe import Recipe

    text = "".join(collect(Path(sysconfig.get_paths()["stdlib"]), Recipe())["validation"])
    with open_gguf(BUNDLED) as file:
        ids = load_tokenizer(file).encode(text[: 8 * NUM_WINDOWS * WINDOW_TOKENS])
    return np.array(ids[: NUM_WINDOWS * WINDOW_TOKENS]).reshape(NUM_WINDOWS, WINDOW_TOKENS)


def _our_logits(path: Path, windows: np.ndarray) -> np.ndarray:
    llm = LLM(path, EngineConfig(context_length=WINDOW_TOKENS))
    try:
        return np.stack([np.array(llm.logits(window.tolist())) for window in windows])
    finally:
        llm.close()


def _perplexity(logits: np.ndarray, windows: np.ndarray) -> float:
    """exp of the mean surprise of tokens 1.. of each window, given the tokens before them."""
    log_probs = log_softmax(logits[:, :-1])
    surprise = -np.take_along_axis(log_probs, windows[:, 1:, None], axis=-1)
    return float(np.exp(surprise.mean()))
