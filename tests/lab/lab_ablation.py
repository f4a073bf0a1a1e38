"""Takes each rung of the doctor away in turn and says how much less of the lab is told right.

`python tests/lab/lab_ablation.py [NAMES...]`, by scripts/test-lab. A rung without which nothing
is lost is one too many: then the exit code is 1.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from hypocenter.doctor.doctor import LADDER
from hypocenter.lab.score import examine, merit, score
from hypocenter.lab.victim import victims

TESTS = Path(__file__).resolve().parent.parent
#: Rungs that the lab's victims cannot need, and the tests that do: real dumps, programs of others
#: under a guard or a sanitizer, several processes, and faults that need several requests at once
#: (`benchmarks/engine_faults.py` plants those).
TESTED_ELSEWHERE = {
    "core dump": "doctor/test_gpu_stop.py",
    "guarded run": "foreign/test_again.py",
    "sanitizer": "foreign/test_again.py",
    "adopted blocks": "doctor/test_adopted_blocks.py",
    "compiled code": "doctor/test_compiled_code.py",
    "draws": "doctor/test_draws.py",
    "lost rank": "engine/test_rank_faults.py",
}


def main(names: list[str]) -> int:
    assert all((TESTS / file).is_file() for file in TESTED_ELSEWHERE.values())
    with tempfile.TemporaryDirectory(prefix="hypo-lab-") as folder:
        runs = list(examine(victims(names), Path(folder)))
    whole = [score(one, with_twin=False) for one in runs]
    print(f"{'all rungs':24} {merit(whole):4} points of {len(runs)} victims", flush=True)
    idle = []
    for rung in LADDER:
        without = [score(one, (rung,), with_twin=False) for one in runs]
        lost = merit(whole) - merit(without)
        worse = [a.victim for a, b in zip(whole, without, strict=True) if merit([a]) > merit([b])]
        print(f"without {rung:16} {merit(without):4}, {lost} fewer: {', '.join(worse)}", flush=True)
        if lost <= 0 and rung not in TESTED_ELSEWHERE:
            idle.append(rung)
    for rung in idle:
        print(f"nothing is lost without {rung!r}: delete it, or add the victim that needs it")
    return bool(idle)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
