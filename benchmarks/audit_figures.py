"""What `hypo audit` says of a small random model of each architecture, and of planted errors.

    python benchmarks/audit_figures.py families    # an audit of each architecture, all gates
    python benchmarks/audit_figures.py canaries    # gates of the bundled model, 100 times

Each is a file of `benchmarks/results/`, named by its part and the device, and written row by row.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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
from hypocenter.base.errors import HypoError  # noqa: E402
from hypocenter.record.recorder import open_recorder  # noqa: E402
from hypocenter.verify.outcome import Stage, StageVerdict, Verification  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
NUM_RUNS = 100
_SMALL = AuditSizes(read=40, asked=5, answered=3, chunks=(7,), batches=(2,))


#: An audit that takes longer is given up, so that the others have their turn.
MAX_SECONDS = 600


class TooLong(Exception):
    """An audit took more than MAX_SECONDS."""


def makers_by_architecture() -> dict[str, tuple[str, Callable[..., Any]]]:
    """The first family of each architecture, and what writes a model of it."""
    from models.encoder_gguf import ENCODERS, make_encoder
    from models.families import make_family
    from models.family_table import FAMILIES

    makers: dict[str, tuple[str, Callable[..., Any]]] = {
        kind.arch: (name, make_encoder) for name, kind in reversed(ENCODERS.items())
    }
    makers |= {family.arch: (name, make_family) for name, family in reversed(FAMILIES.items())}
    return dict(sorted(makers.items()))


def of_architectures(device: str) -> Iterator[dict[str, Any]]:
    """A row for the first family of each architecture; where it is refused, with the reason."""
    with tempfile.TemporaryDirectory() as folder:
        for arch, (name, make) in makers_by_architecture().items():
            path = make(name, Path(folder)).path
            began = time.perf_counter()
            try:
                with _limit(MAX_SECONDS):
                    row = _row(audit(str(path), EngineConfig(device=device), SHORT))
            except (HypoError, TooLong) as error:
                row = {"verdict": "refused", "why": str(error)}
            path.unlink()
            seconds = round(time.perf_counter() - began, 1)
            yield {"architecture": arch, "family": name, **row, "seconds": seconds}


def _row(found: Verification) -> dict[str, Any]:
    not_run = {s.name: s.uncovered[0].why for s in found.stages if _is_not_run(s)}
    ran = [stage for stage in found.stages if not _is_not_run(stage)]
    return {
        "verdict": found.verdict,
        "num_gates": len(found.stages),
        "right": [s.name for s in ran if s.verdict is StageVerdict.RIGHT],
        "not_audited": not_run,
        "left_out": [f"{s.name}: {u.what}: {u.why}" for s in ran for u in s.uncovered],
        "findings": [f"{s.name}: {f.what}" for s in found.stages for f in s.findings],
        "planted": sum(s.canary.num_planted for s in found.stages if s.canary),
        "seen": sum(s.canary.num_seen for s in found.stages if s.canary),
    }


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raises TooLong in what takes longer."""

    def end(*_: object) -> None:
        raise TooLong(f"the audit took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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


def write_as_they_come(rows: Iterable[dict[str, Any]], told: dict[str, Any], out: Path) -> None:
    """Print and keep each row when it comes: the file has all rows up to then."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        print(json.dumps(row), flush=True)
        kept.append(row)
        beside = out.with_suffix(".part")
        beside.write_text(json.dumps({**told, "rows": kept}, indent=1) + "\n")
        beside.replace(out)


def main() -> None:
    part, device = sys.argv[1], (sys.argv[2:] or ["cpu"])[0]
    os.environ.pop("HYPO_RECORD", None)
    out = RESULTS / f"audit-{part}-{device.replace(':', '-')}.json"
    if part == "families":
        told = {"device": device, "num_architectures": len(makers_by_architecture())}
        write_as_they_come(of_architectures(device), told, out)
    else:
        write_as_they_come(of_canaries(device), {"device": device}, out)


if __name__ == "__main__":
    main()
