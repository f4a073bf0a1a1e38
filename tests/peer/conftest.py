"""The interpreter with llama.cpp in it; a peer test without one fails instead of being skipped."""

from __future__ import annotations

import pytest

from peer.comparison import Peer


@pytest.fixture(scope="session")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Peer:
    """llama.cpp behind PEER_PYTHON, which scripts/test-peers sets."""
    return Peer.from_environment(tmp_path_factory.mktemp("peer"))
