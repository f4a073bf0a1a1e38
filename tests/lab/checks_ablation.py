"""Takes each check of soundness away in turn and says how many false claims come back.

`python tests/lab/checks_ablation.py [NAMES...]`, by scripts/test-lab; over launches of one kernel
each, with healthy ones. A check without which no claim is false is one too many: then, and where
any claim is false with all of them, the exit code is 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))
os.environ.setdefault("TRITON_INTERPRET", "1")

from common_mistakes import CASES, TWINS, UNDECIDED, Expected, is_false
from program_launch import Launch
from soundness_checks import CHECKS


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


def main(names: list[str]) -> int:
    idle = []
    for name in ("", *(names or CHECKS)):
        with CHECKS[name].taken_away() if name else nullcontext():
            found = false_claims()
        said = f"without: {name}" if name else "all checks"
        print(
            f"{said:64} {len(found):2} false of {len(launches())}: {'; '.join(found)}", flush=True
        )
        if bool(name) != bool(found):
            idle.append(name or "the doctor")
    for name in idle:
        print(f"nothing false is said without {name!r}: delete it, or add the launch that needs it")
    return bool(idle)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
