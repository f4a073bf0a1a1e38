"""Takes each check of soundness away in turn and says how many false claims come back.

`python tests/faults/checks_ablation.py [NAMES...] [--out FILE]`, by scripts/test-lab; over launches
of one kernel each, with healthy ones. A check without which no claim is false is one too many:
then, and where any claim is false with all of them, the exit code is 1. FILE gets it as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

from recorded.common_mistakes import CASES, TWINS, UNDECIDED, Expected, is_false
from recorded.program_launch import Launch
from recorded.soundness_checks import CHECKS


def launches() -> Mapping[str, tuple[Launch, Expected | None]]:
    """All launches by name, each with what may be said of it."""
    silent = {name: (launch, None) for name, launch in (UNDECIDED | TWINS).items()}
    return {name: (one.launch, one) for name, one in CASES.items()} | silent


def false_claims() -> list[str]:
    return [
        name
        for name, (launch, expected) in launches().items()
        if any(is_false(root, expected) for root in launch.diagnosis().roots)
    ]


def table(names: Sequence[str]) -> dict[str, Any]:
    """What is false with all checks, and without each of these."""
    rows: list[dict[str, Any]] = []
    with_all = false_claims()
    print(_line("all checks", with_all), flush=True)
    for name in names:
        with CHECKS[name].taken_away():
            found = [one for one in false_claims() if one not in with_all]
        print(_line(f"without: {name}", found), flush=True)
        rows.append({"check": name, "num_false": len(found), "false": found})
    return {"num_launches": len(launches()), "false_with_all": with_all, "without": rows}


def _line(said: str, found: list[str]) -> str:
    return f"{said:64} {len(found):2} false of {len(launches())}: {'; '.join(found)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = table(options.names or tuple(CHECKS))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    idle = [row["check"] for row in found["without"] if not row["num_false"]]
    for name in idle:
        print(f"nothing false is said without {name!r}: delete it, or add the launch that needs it")
    return bool(idle or found["false_with_all"])


if __name__ == "__main__":
    sys.exit(main())
