"""hypocenter and llama.cpp on the same files: distributions of families, perplexity of the demo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peer.comparison import (
    COMPARABLE,
    CONVERTED_KINDS,
    NUM_WINDOWS,
    PERPLEXITY_KINDS,
    PERPLEXITY_LIMIT,
    WINDOW_TOKENS,
    ConvertedRow,
    FamilyRow,
    Peer,
    PerplexityRow,
    family_row,
    perplexity_row,
    validation_windows,
)
from peer.converted import NAMES
from peer.rows import keep, table

#: Every fault must diverge at least this many times further than a sound family may.
FAULT_MARGIN = 10


@pytest.mark.parametrize("name", COMPARABLE)
def test_distributions(name: str, peer: Peer) -> None:
    row = family_row(name, peer)
    keep(row)
    assert row.sound < row.limit
    harmless = {fault: kl for fault, kl in row.faults.items() if kl < FAULT_MARGIN * row.limit}
    assert not harmless, f"{name}: these faults would pass unseen or nearly so"


@pytest.mark.parametrize("kind", PERPLEXITY_KINDS)
def test_perplexity(kind: str, peer: Peer) -> None:
    row = perplexity_row(kind, peer)
    keep(row)
    assert abs(row.deviation) < PERPLEXITY_LIMIT
    assert row.num_tokens == NUM_WINDOWS * (WINDOW_TOKENS - 1)


def test_perplexity_text_is_predictable_but_not_known() -> None:
    """Held-back Python text, and enough of it: no window repeats another."""
    windows = validation_windows()
    assert windows.shape == (NUM_WINDOWS, WINDOW_TOKENS)
    assert len({window.tobytes() for window in windows}) == NUM_WINDOWS


def test_the_table_has_all_rows_or_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = tmp_path / "rows"
    monkeypatch.setenv("PEER_ROWS", str(kept))
    for name in reversed(COMPARABLE):
        keep(FamilyRow(name, 1e-10, {"no rope": 2.0}))
    for kind in PERPLEXITY_KINDS:
        keep(PerplexityRow(kind, 18.4, 18.5, 4088))
    for name in NAMES:
        for kind in CONVERTED_KINDS:
            keep(ConvertedRow(name, kind, 0.0123, None if name == NAMES[0] else 0.02, None))
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    made = table(rows, "0.3.36")
    assert [row["family"] for row in made["families"]] == list(COMPARABLE)
    assert made["families"][0] == {
        "family": COMPARABLE[0],
        "kl_nats": 1e-10,
        "limit_nats": FamilyRow(COMPARABLE[0], 0, {}).limit,
        "fault_kl_nats": {"no rope": 2.0},
    }
    assert made["perplexity"][0] == {
        "file_type": "F16",
        "hypocenter": 18.4,
        "llama_cpp": 18.5,
        "num_tokens": 4088,
    }
    assert made["converted"][NAMES[0]]["Q8_0"] == {"kl_nats": 0.012}
    assert made["converted"][NAMES[1]]["F16"] == {"kl_nats": 0.012, "llama_cpp_kl_nats": 0.02}
    with pytest.raises(KeyError, match=NAMES[2]):
        table([row for row in rows if row.get("model") != NAMES[2]], "0.3.36")
    with pytest.raises(KeyError, match=COMPARABLE[3]):
        table([row for row in rows if row.get("family") != COMPARABLE[3]], "0.3.36")


def test_without_an_interpreter_the_message_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PEER_PYTHON", raising=False)
    with pytest.raises(RuntimeError, match="scripts/test-peers"):
        Peer.from_environment(tmp_path)
