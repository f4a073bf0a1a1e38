"""Figures of the comparison: medians, ratios with their spread, divergence, targets, the table.

Reads what was measured and measures nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

#: Positions of a vocabulary of 150,000 in float64 that are worked on at a time.
_ROWS_AT_A_TIME = 16
MEMORY_FACTOR, MEMORY_EXTRA_BYTES = 1.15, 350_000_000
MIN_DEPTH_SHARE = 0.85
#: Behind the name of an engine: its decodes at depth 0 beside those at a depth.
BESIDE = " at depth 0"
#: Cores that may be busy with something else before the figures come with a warning.
MAX_OUT_OF_TURN, MAX_OTHERS = 0.05, 0.1
#: By file type: decode and prefill as multiples of llama.cpp's, share of bandwidth in decode.
SPEED_TARGETS = {
    "F16": (0.97, 1.1, 0.90),
    "Q8_0": (1.05, 1.5, 0.85),
    "Q4_0": (1.25, 1.5, 0.80),
    "Q4_K_M": (1.25, 1.5, 0.80),
}
#: Of mixtures of experts of any type, with no goal for the share.
EXPERTS_TARGETS = (1.2, 1.5, None)
#: What ours runs otherwise than exactly, and its file type: listed apart, and without targets.
APART = {"F16-bf16": "F16"}


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure over another, of each pair of neighbouring measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ones: Sequence[float], others: Sequence[float]) -> Ratio:
        pairs = [one / other for one, other in zip(ones, others, strict=True)]
        return cls(statistics.median(pairs), min(pairs), max(pairs))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}..{self.high:.2f})"

    def percent(self) -> str:
        return f"{self.median:.0%} ({self.low:.0%}..{self.high:.0%})"


@dataclass(frozen=True, slots=True)
class Target:
    """One figure beside what it should reach; `is_ceiling`: it must stay below."""

    what: str
    value: float
    limit: float
    is_ceiling: bool = False
    note: str = ""

    @property
    def is_met(self) -> bool:
        return self.value <= self.limit if self.is_ceiling else self.value >= self.limit

    def __str__(self) -> str:
        sign = "<=" if self.is_ceiling else ">="
        verdict = "met" if self.is_met else "MISSED"
        return f"{self.what} {self.value:.4g} {sign} {self.limit:.4g}: {verdict}{self.note}"


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far the next-token distributions of an engine are from the reference's.

    `kl` [num_positions] is KL(reference || engine) in nats; `top_1` the share of positions with the
    same most likely token.
    """

    kl: np.ndarray[Any, Any]
    top_1: float

    def summary(self) -> dict[str, float]:
        mean, worst = float(self.kl.mean()), float(self.kl.max())
        return {"kl": mean, "kl_worst": worst, "top_1": self.top_1}


def divergence(reference: Path, other: Path) -> Divergence:
    """Of two files of logits, f32 [num_positions, vocab_size]; ValueError if shapes differ."""
    expected, found = np.load(reference, mmap_mode="r"), np.load(other, mmap_mode="r")
    if expected.shape != found.shape:
        raise ValueError(f"logits {list(found.shape)} beside {list(expected.shape)}")
    divergences, num_agreed = [], 0
    for at in range(0, len(expected), _ROWS_AT_A_TIME):
        p, q = (_log_softmax(rows[at : at + _ROWS_AT_A_TIME]) for rows in (expected, found))
        divergences.append((np.exp(p) * (p - q)).sum(-1))
        num_agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
    return Divergence(np.concatenate(divergences), num_agreed / len(expected))


def difference(ours: Divergence, peer: Divergence) -> dict[str, float]:
    """Of the two means, with the standard error that so few positions leave it."""
    apart = ours.kl - peer.kl
    error = apart.std(ddof=1) / len(apart) ** 0.5
    return {"mean": float(apart.mean()), "standard_error": float(error)}


def entropy(logits: Path) -> float:
    """Mean entropy of the distributions in a file of logits, in nats."""
    rows = np.load(logits, mmap_mode="r")
    parts = [_log_softmax(rows[at : at + 16]) for at in range(0, len(rows), 16)]
    return float(np.mean([-(np.exp(p) * p).sum(-1).mean() for p in parts]))


def _log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(-1, keepdims=True)))


def speeds(row: Mapping[str, Any], engine: str, test: str) -> list[float]:
    """Tokens per second of each repetition; empty where that engine did not run."""
    return [run["tokens_per_second"] for run in _runs(row, engine, test)]


def bandwidth_share(row: Mapping[str, Any], engine: str, test: str) -> Ratio | None:
    """Of the bandwidth beside each decode, what reading each weight once a token takes.

    None where that engine did not run.
    """
    runs = _runs(row, engine, test)
    taken = [run["tokens_per_second"] * row["bytes_per_token"] for run in runs]
    # Memory may have changed its speed meanwhile; the larger reading flatters nobody.
    given = [max(run["bandwidth_before"], run["bandwidth_after"]) for run in runs]
    return Ratio.of(taken, given) if runs else None


def bandwidth_shares(row: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """By test and engine, as the result file holds them."""
    return {
        test: {
            engine: asdict(share) for engine in engines
            if (share := bandwidth_share(row, engine, test))
        }
        for test, engines in row["tests"].items() if _is_shallow_decode(test)
    }  # fmt: skip


def targets(row: Mapping[str, Any]) -> list[Target]:
    """Every target of a file type that this run has the figures for."""
    if row["type"] in APART:
        return []
    has_experts = row.get("has_experts", False)
    decode, prefill, share = EXPERTS_TARGETS if has_experts else SPEED_TARGETS[row["type"]]
    found = []
    tests = row["tests"]
    for name in tests:
        ours, theirs = speeds(row, "ours", name), speeds(row, "peer", name)
        if ours and theirs:
            # Behind a long context it only must not fall behind.
            limit = prefill if name.startswith("pp") else 1.0 if "@" in name else decode
            found.append(Target(f"{name}: x llama.cpp", Ratio.of(ours, theirs).median, limit))
        if kept := _kept(row, "ours", name):
            note = f" ({kept.low:.4g}..{kept.high:.4g})"
            what = f"{name}: of the speed at depth 0"
            found.append(Target(what, kept.median, MIN_DEPTH_SHARE, note=note))
        reached = bandwidth_share(row, "ours", name) if _is_shallow_decode(name) else None
        if reached and share is not None:
            note = f" ({reached.low:.4g}..{reached.high:.4g})"
            found.append(Target(f"{name}: of bandwidth", reached.median, share, note=note))
    if ours_memory := row["memory"].get("ours"):
        limit = memory_limit(row) / 1e6
        found.append(Target("peak memory, MB", ours_memory["peak_bytes"] / 1e6, limit, True))
    if {"ours", "peer"} <= row["divergence"].keys():
        kl = {engine: row["divergence"][engine]["kl"] for engine in ("ours", "peer")}
        apart = row["divergence"]["difference"]
        note = f" (difference {apart['mean']:.2g}, standard error {apart['standard_error']:.2g})"
        found.append(Target("KL to F32, nats", kl["ours"], kl["peer"], True, note))
    return found


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each target, and warnings for what makes the figures doubtful."""
    lines = []
    for row in rows:
        lines += [f"{row['type']}: {target}" for target in targets(row)]
    for row in rows:
        for engine, share in row["out_of_turn"].items():
            if share > MAX_OUT_OF_TURN:
                lines.append(
                    f"{row['type']}: WARNING: {engine} used {share:.0%} of a core out of turn"
                )
        if row["others"] > MAX_OTHERS:
            lines.append(
                f"{row['type']}: WARNING: others used {row['others']:.0%} of a core at times"
            )
        for engine in row["engines"]:
            decodes = [name for name in row["tests"] if name.startswith("tg")]
            shares = [bandwidth_share(row, engine, name) for name in decodes]
            if any(share and share.high > 1 for share in shares):
                lines.append(
                    f"{row['type']}: WARNING: {engine} read faster than the bandwidth beside it"
                )
        lines += _left_out(row)
    return lines


def _left_out(row: Mapping[str, Any]) -> Iterable[str]:
    """What did not count because memory was slower than asked for."""
    if num := row["num_pairs_left_out"]:
        yield f"{row['type']}: pairs of decodes left out, since memory was slower: {num}"
    for name, by_engine in row["tests"].items():
        num = min(len(runs) for runs in by_engine.values())
        if name.startswith("tg") and num < row["num_pairs"]:
            yield f"{row['type']}: WARNING: {num} of {row['num_pairs']} pairs of {name} count"


def memory_limit(row: Mapping[str, Any]) -> float:
    """Bytes that our process may have touched at most."""
    return float(MEMORY_FACTOR * row["file_bytes"] + row["kv_bytes"] + MEMORY_EXTRA_BYTES)


def speed_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: one line per file type, test and what both engines made of it."""
    header = (
        "type", "test", "ours t/s", "llama.cpp t/s", "ratio (min..max)", "of depth 0, ours",
        "of depth 0, llama.cpp", "of bandwidth, ours", "of bandwidth, llama.cpp",
    )  # fmt: skip
    lines: list[tuple[str, ...]] = [header]
    for row in rows:
        for name in row["tests"]:
            ours, theirs = speeds(row, "ours", name), speeds(row, "peer", name)
            ratio = str(Ratio.of(ours, theirs)) if ours and theirs else ""
            cells = [_median(ours), _median(theirs), ratio]
            for engine in ("ours", "peer"):
                kept = _kept(row, engine, name)
                cells.append(kept.percent() if kept else "")
            for engine in ("ours", "peer"):
                share = bandwidth_share(row, engine, name) if _is_shallow_decode(name) else None
                cells.append(share.percent() if share else "")
            lines.append((row["type"], name, *cells))
    return markdown(lines, num_left=2)


def memory_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: memory and divergence of each engine."""
    lines: list[tuple[str, ...]] = [
        ("type", "engine", "peak MB", "anonymous MB", "limit MB", "KL to F32", "worst", "top-1")
    ]
    for row in rows:
        for engine, label in (("ours", "ours"), ("peer", "llama.cpp")):
            memory, apart = row["memory"].get(engine), row["divergence"].get(engine)
            if not memory:
                continue
            limit = f"{memory_limit(row) / 1e6:.0f}" if engine == "ours" else ""
            cells = [
                f"{memory['peak_bytes'] / 1e6:.0f}", f"{memory['anonymous_bytes'] / 1e6:.0f}", limit
            ]  # fmt: skip
            if apart:
                cells += [f"{apart['kl']:.2e}", f"{apart['kl_worst']:.2e}", f"{apart['top_1']:.1%}"]
            lines.append((row["type"], label, *cells, *[""] * (3 if not apart else 0)))
    return markdown(lines, num_left=2)


def markdown(rows: Sequence[Sequence[str]], num_left: int) -> str:
    """A table whose first columns are text and whose other ones are figures."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rules = ["-" * (w + 1) + ("-" if at < num_left else ":") for at, w in enumerate(widths)]

    def line(cells: Iterable[str]) -> str:
        placed = [
            cell.ljust(w) if at < num_left else cell.rjust(w)
            for at, (cell, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(placed) + " |"

    return "\n".join([line(rows[0]), "|" + "|".join(rules) + "|", *map(line, rows[1:])])


def _runs(row: Mapping[str, Any], engine: str, test: str) -> Sequence[Mapping[str, Any]]:
    runs: Sequence[Mapping[str, Any]] = row["tests"].get(test, {}).get(engine, ())
    return runs


def _is_shallow_decode(test: str) -> bool:
    return test.startswith("tg") and "@" not in test


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f}" if values else ""


def _kept(row: Mapping[str, Any], engine: str, name: str) -> Ratio | None:
    """Of the speed at depth 0 right behind it, or else of the pair of that number; None of another
    test, and where no such pairs count."""
    if "@" not in name:
        return None
    beside = _runs(row, engine + BESIDE, name) or _runs(row, engine, name.split(" @")[0])
    shallow = _by_number(beside)
    deep = {
        at: speed for at, speed in _by_number(_runs(row, engine, name)).items() if at in shallow
    }
    return Ratio.of([*deep.values()], [shallow[at] for at in deep]) if deep else None


def _by_number(runs: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Tokens per second by the number of the pair; older files have all pairs, without numbers."""
    return {run.get("number", at): run["tokens_per_second"] for at, run in enumerate(runs)}
