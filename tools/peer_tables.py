"""Prints how far hypocenter and llama.cpp lie apart, and writes it as JSON; the tests set limits.

PEER_PYTHON=.venv-peers/bin/python python -m tools.peer_tables
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import cyclopts
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from peer.comparison import FamilyRow, PerplexityRow

ROOT = Path(__file__).parents[1]
DEFAULT_OUTPUT = ROOT / "benchmarks/results/peer_llama_cpp.json"


def main(output: Path = DEFAULT_OUTPUT) -> None:
    """Measure every family and file type.

    Parameters
    ----------
    output
        JSON file to write.
    """
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/support")]
    from peer import comparison

    with tempfile.TemporaryDirectory() as folder:
        peer = comparison.Peer.from_environment(Path(folder))
        families = [comparison.family_row(name, peer) for name in comparison.COMPARABLE]
        perplexities = [
            comparison.perplexity_row(kind, peer) for kind in comparison.PERPLEXITY_KINDS
        ]
        version = peer.version()
    results = {
        "peer": f"llama-cpp-python {version}",
        "machine": platform.machine(),
        "perplexity_limit": comparison.PERPLEXITY_LIMIT,
        "families": [
            {
                "family": row.family,
                "kl_nats": row.sound,
                "limit_nats": row.limit,
                "fault_kl_nats": row.faults,
            }
            for row in families
        ],
        "perplexity": [
            {
                "file_type": row.kind,
                "hypocenter": row.ours,
                "llama_cpp": row.theirs,
                "num_tokens": row.num_tokens,
            }
            for row in perplexities
        ],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    console = Console(width=160)
    console.print(family_table(families), perplexity_table(perplexities))


def family_table(rows: list[FamilyRow]) -> Table:
    """Mean KL divergence per family in nats: sound, then with each fault planted."""
    faults = list(dict.fromkeys(fault for row in rows for fault in row.faults))
    table = Table(title="mean KL(llama.cpp || hypocenter), nats")
    table.add_column("family", no_wrap=True)
    for heading in ("sound", "limit", *faults):
        table.add_column(heading)
    for row in rows:
        cells = [f"{row.faults[fault]:.1e}" if fault in row.faults else "–" for fault in faults]
        table.add_row(row.family, f"{row.sound:.1e}", f"{row.limit:.0e}", *cells)
    return table


def perplexity_table(rows: list[PerplexityRow]) -> Table:
    """Perplexity of the demo model per file type."""
    table = Table("file type", "hypocenter", "llama.cpp", "deviation", "tokens", title="perplexity")
    for row in rows:
        table.add_row(
            row.kind,
            f"{row.ours:.4f}",
            f"{row.theirs:.4f}",
            f"{100 * row.deviation:+.3f} %",
            str(row.num_tokens),
        )
    return table


if __name__ == "__main__":
    cyclopts.run(main)
