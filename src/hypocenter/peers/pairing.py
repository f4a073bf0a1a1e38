"""The answer of a peer as a trace beside ours: the same steps, the same points, the same columns.

A peer runs all tokens in one batch; a step of ours has its rows by their positions. Judges nothing.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from hypocenter.base.dtypes import Float32s
from hypocenter.base.errors import UsageError
from hypocenter.device.cpu.measuring import figures_of
from hypocenter.model.facts.architecture import Architecture
from hypocenter.peers.asking import Peer, PeerAnswer
from hypocenter.trace.points import OF_LOGIT_ROWS, ModelTrace, Point, PointPlace, TracedStep

#: Points in whose columns the pairs of a rotation lie.
_OF_PAIRS = ("q", "k", "q_rope", "k_cache")
#: Architectures whose files have q and k in another order than transformers has them: pairs beside
#: each other, where transformers has halves (`permute` of llama.cpp's converter).
_REORDERED = ("llama",)


def trace_of(peer: Peer, answer: PeerAnswer, ours: ModelTrace, arch: Architecture) -> ModelTrace:
    """Raises UsageError where a step of ours is not of one text that begins at its start."""
    header = msgspec.structs.replace(
        ours.header,
        program=answer.version,
        device="cpu",
        route={},
        adapters=(),
        override_kv={},
    )
    return ModelTrace(header, tuple(_step(peer, answer, step, arch) for step in ours.steps))


def _step(peer: Peer, answer: PeerAnswer, ours: TracedStep, arch: Architecture) -> TracedStep:
    if len(set(ours.sequences)) != 1:
        raise UsageError(f"step {ours.step} holds several texts, and a peer is given one")
    points: dict[PointPlace, Point] = {}
    for place, point in ours.points.items():
        values = _values(peer, answer, place, arch)
        if values is None:
            continue
        rows = np.array(ours.positions)
        if point.name in OF_LOGIT_ROWS:
            rows = rows[list(ours.logit_rows)]
        if len(rows) and rows.max() < len(values):
            points[place] = _point(place, values[rows])
    return replace(ours, points=points)


def _values(
    peer: Peer, answer: PeerAnswer, place: PointPlace, arch: Architecture
) -> Float32s | None:
    """The rows of all tokens at a point, as ours are laid out; None where it has no such point."""
    name, layer = place
    found = answer.tensors.get(place)
    if found is None and name == "v_cache":
        found = answer.tensors.get(("v", layer))
    if found is None or layer is None:
        return found
    if not peer.has_cache and name in _OF_PAIRS and arch.family.rope_style == "normal":
        if arch.name not in _REORDERED:
            return None
        found = _pairs_beside(found, arch.layers[layer].head_dim)
    if peer.has_cache and name in ("k_cache", "v_cache"):
        # Its cache holds halves, as ours does; what was seen is what went in.
        with np.errstate(over="ignore"):
            return found.astype(np.float16).astype(np.float32)
    return found


def _pairs_beside(rows: Float32s, head_dim: int) -> Float32s:
    """The halves of each head interleaved: column i and i + half become 2 i and 2 i + 1."""
    halves = rows.reshape(len(rows), -1, 2, head_dim // 2)
    return np.ascontiguousarray(halves.swapaxes(2, 3)).reshape(rows.shape)


def _point(place: PointPlace, values: Float32s) -> Point:
    figures = figures_of(values[None])
    name, layer = place
    return Point(
        name=name,
        layer=layer,
        shape=values.shape,
        dtype="F32",
        digest=figures.digests,
        low=figures.low[0],
        high=figures.high[0],
        mean=figures.mean[0],
        rms=figures.rms[0],
        num_nan=figures.num_nan[0],
        num_inf=figures.num_inf[0],
        sketch=figures.sketches[0],
        values=values,
    )
