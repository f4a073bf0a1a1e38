"""What `hypo audit` says of a small random model of each architecture, and of planted errors.

    python benchmarks/audit_figures.py families    # an audit of each architecture, all gates
    python benchmarks/audit_figures.py canaries    # gates of the bundled model, 100 times

Each is a file of `benchmarks/results/`, named by its part and the device.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support")]

from hypocenter import LLM, EngineConfig  # noqa: E402
from hypocenter.audit.audit import SHORT, audit  # noqa: E402
from hypocenter.audit.equivalence import AuditSizes, OwnGates  # noqa: E402
from hypocenter.audit.executed import OwnRecord  # noqa: E402
from hypocenter.audit.repeats import repeats  # noqa: E402
from hypocenter.audit.residency import residency  # noqa: E402
from hypocenter.audit.soak import soak  # noqa: E402
from hypocenter.audit.ways import Ways  # noqa: E402
from hypocenter.record.recorder import open_recorder  # noqa: E402
from hypocenter.verify.outcome import Stage, StageVerdict  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
NUM_RUNS = 100
_SMALL = AuditSizes(read=40, asked=5, answered=3, chunks=(7,), batches=(2,))


def of_architectures(device: str) -> Iterator[dict[str, Any]]:
    """A row for the first family of each architecture."""
    from models.encoder_gguf import ENCODERS, make_encoder
    from models.families import make_family
    from models.family_table import FAMILIES

    makers: dict[str, tuple[str, Callable[..., Any]]] = {
        kind.arch: (name, make_encoder) for name, kind in reversed(ENCODERS.items())
    }
    makers |= {family.arch: (name, make_family) for name, family in reversed(FAMILIES.items())}
    with tempfile.TemporaryDirectory() as folder:
        for arch, (name, make) in sorted(makers.items()):
            path = make(name, Path(folder)).path
            began = time.perf_counter()
            found = audit(str(path), EngineConfig(device=device), SHORT)
            path.unlink()
            not_run = {s.name: s.uncovered[0].why for s in found.stages if _is_not_run(s)}
            yield {
                "architecture": arch,
                "family": name,
                "verdict": found.verdict,
                "right": [s.name for s in found.stages if s.verdict is StageVerdict.RIGHT],
                "not_audited": not_run,
                "left_out": [f"{s.name}: {u.what}: {u.why}" for s in found.stages
                             if not _is_not_run(s) for u in s.uncovered],
                "findings": [f"{s.name}: {f.what}" for s in found.stages for f in s.findings],
                "planted": sum(s.canary.num_planted for s in found.stages if s.canary),
                "seen": sum(s.canary.num_seen for s in found.stages if s.canary),
                "seconds": round(time.perf_counter() - began, 1),
            }  # fmt: skip


def _is_not_run(stage: Stage) -> bool:
    return stage.verdict is StageVerdict.NOT_RUN


def of_canaries(device: str) -> list[dict[str, Any]]:
    """How many of the errors that gates plant they see, in so many runs."""
    open_recorder()
    planted, seen, runs = Counter[str](), Counter[str](), Counter[str]()
    words: dict[str, str] = {}
    fields: dict[str, Any] = {"context_length": 64, "kv_tokens": 1024, "max_batch_requests": 8}
    with LLM(device=device, prefix_cache=False, **fields) as llm:
        for _ in range(NUM_RUNS):
            own = OwnGates(Ways(llm, OwnRecord(), device), _SMALL, 0.0)
            llm.engine.cache._blank.sort(reverse=True)  # as an empty cache has them
            stages = [gate.run() for gate in own.each()]
            stages += [residency(own.ways, 5, 3), repeats(own, 2).run(), soak(own.ways, 2, 2)]
            for stage in stages:
                if stage.canary is not None:
                    words[stage.name] = stage.canary.planted
                    runs[stage.name] += 1
                    planted[stage.name] += stage.canary.num_planted
                    seen[stage.name] += stage.canary.num_seen
    return [
        {
            "gate": name,
            "planted": words[name],
            "runs": runs[name],
            "num_planted": planted[name],
            "num_seen": seen[name],
        }
        for name in words
    ]


def main() -> None:
    part, device = sys.argv[1], (sys.argv[2:] or ["cpu"])[0]
    os.environ.pop("HYPO_RECORD", None)
    rows = []
    for row in of_architectures(device) if part == "families" else of_canaries(device):
        print(json.dumps(row), flush=True)
        rows.append(row)
    out = RESULTS / f"audit-{part}-{device.replace(':', '-')}.json"
    out.write_text(json.dumps({"device": device, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
