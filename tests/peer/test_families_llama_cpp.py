"""hypocenter and llama.cpp on the same files: distributions of families, perplexity of the demo."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.comparison import (
    COMPARABLE,
    NUM_WINDOWS,
    PERPLEXITY_KINDS,
    PERPLEXITY_LIMIT,
    WINDOW_TOKENS,
    Peer,
    family_row,
    perplexity_row,
    validation_windows,
)

#: Every fault must diverge at least this many times further than a sound family may.
FAULT_MARGIN = 10


@pytest.mark.parametrize("name", COMPARABLE)
def test_distributions(name: str, peer: Peer) -> None:
    row = family_row(name, peer)
    assert row.sound < row.limit
    harmless = {fault: kl for fault, kl in row.faults.items() if kl < FAULT_MARGIN * row.limit}
    assert not harmless, f"{name}: these faults would pass unseen or nearly so"


@pytest.mark.parametrize("kind", PERPLEXITY_KINDS)
def test_perplexity(kind: str, peer: Peer) -> None:
    row = perplexity_row(kind, peer)
    assert abs(row.deviation) < PERPLEXITY_LIMIT
    assert row.num_tokens == NUM_WINDOWS * (WINDOW_TOKENS - 1)


def test_perplexity_text_is_predictable_but_not_known() -> None:
    """Held-back Python text, and enough of it: no window repeats another."""
    windows = validation_windows()
    assert windows.shape == (NUM_WINDOWS, WINDOW_TOKENS)
    assert len({window.tobytes() for window in windows}) == NUM_WINDOWS


def test_without_an_interpreter_the_message_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PEER_PYTHON", raising=False)
    with pytest.raises(RuntimeError, match="scripts/test-peers"):
        Peer.from_environment(tmp_path)
