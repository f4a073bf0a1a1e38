"""Rows of the comparison, and their table: `python -m peer.rows ROWS` prints it as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peer.comparison import (
    COMPARABLE,
    CONVERTED_KINDS,
    PERPLEXITY_KINDS,
    PERPLEXITY_LIMIT,
    ConvertedRow,
    FamilyRow,
    Peer,
    PerplexityRow,
)
from peer.converted import NAMES


def keep(row: FamilyRow | PerplexityRow | ConvertedRow) -> None:
    """Add a row to the file that PEER_ROWS names, if it names one. Safe from several processes."""
    if path := os.environ.get("PEER_ROWS"):
        line = json.dumps(dataclasses.asdict(row) | {"limit": getattr(row, "limit", None)})
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, f"{line}\n".encode())
        finally:
            os.close(file)


def table(rows: list[dict[str, Any]], version: str) -> dict[str, Any]:
    """What `benchmarks/results/peer_llama_cpp.json` holds, of the rows of a whole run.

    Raises KeyError when a family, a file type or a converted file has none.
    """
    families = {row["family"]: row for row in rows if "family" in row}
    kinds = {row["kind"]: row for row in rows if "kind" in row}
    converted = {(row["model"], row["file_type"]): row for row in rows if "model" in row}
    return {
        "peer": f"llama-cpp-python {version}",
        "machine": platform.machine(),
        "perplexity_limit": PERPLEXITY_LIMIT,
        "families": [_told(families[name]) for name in COMPARABLE],
        "perplexity": [
            {
                "file_type": kind,
                "hypocenter": kinds[kind]["ours"],
                "llama_cpp": kinds[kind]["theirs"],
                "num_tokens": kinds[kind]["num_tokens"],
            }
            for kind in PERPLEXITY_KINDS
        ],
        "converted": {
            name: {kind: _rounded(converted[name, kind]) for kind in CONVERTED_KINDS}
            for name in NAMES
        },
    }


def _rounded(row: Mapping[str, Any]) -> dict[str, float]:
    """The figures that a row has, with two digits."""
    found = {"kl_nats": row["ours"], "llama_cpp_kl_nats": row["theirs"], "error": row["error"]}
    return {key: float(f"{value:.1e}") for key, value in found.items() if value is not None}


def _told(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "family": row["family"],
        "kl_nats": row["sound"],
        "limit_nats": row["limit"],
        "fault_kl_nats": row["faults"],
    }


def main() -> None:
    found = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    print(json.dumps(table(found, Peer.from_environment(Path()).version()), indent=1))


if __name__ == "__main__":
    main()
