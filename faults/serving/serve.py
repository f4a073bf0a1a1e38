"""`python -m faults serve`: a server whose workers have a planted defect, and what clients saw.

With `--plant` one victim after the other, in the middle of the answers. Without it a kernel of each
worker writes far outside of its tensor, under the load of `hypo kill-serve`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from faults.serving.planted import PlantedFigures, PlantedServers
from faults.serving.planted_server import ServerOrder, command
from faults.serving.planted_worker import Plant
from faults.victim import victims
from hypocenter.base.errors import EXIT_GATE, EXIT_OK, HypoError, UsageError
from hypocenter.base.package import bundled_model
from hypocenter.cli.output import show, show_json
from hypocenter.cli.verbs.kill_serve import table
from hypocenter.server.kills import KV_TOKENS, KillFigures, KillPlan, Report, run_kills
from hypocenter.server.target import Target
from hypocenter.settings.config import EngineConfig

_LOOK_SECONDS = 0.005
#: What a worker may take to die of a defect, beyond the moment that was drawn.
_FAULT_SECONDS = 120.0
MAX_COUNT = 1000


def main(words: Sequence[str]) -> int:
    """Returns the exit status: 4 where a client saw more than a pause."""
    parser = argparse.ArgumentParser("python -m faults serve")
    parser.add_argument("model", nargs="?", default=str(bundled_model()), help="GGUF file")
    parser.add_argument("--plant", help="victims, separated by commas, or all")
    parser.add_argument("--kills", type=int, default=20, help="workers that fault")
    parser.add_argument("--streams", type=int, default=32, help="answers that are open at once")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each answer")
    parser.add_argument("--every", type=float, default=1.5, help="longest seconds until they do")
    parser.add_argument("--device", default="", help="of the workers; cpu, or the victim's own")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    if given.plant is not None:
        return _serve_victims(given.plant, given.device, as_json=given.json)
    for name in ("kills", "streams", "tokens"):
        if not 1 <= (value := vars(given)[name]) <= MAX_COUNT:
            raise UsageError(f"--{name} is {value}, but must be from 1 to {MAX_COUNT}")
    plan = KillPlan(
        model=given.model,
        num_kills=given.kills,
        num_streams=given.streams,
        num_tokens=given.tokens,
        device=given.device or "cpu",
        max_seconds=given.every,
    )
    figures = run_illegal(plan)
    if given.json:
        show_json({"cause": "illegal access", **msgspec.to_builtins(figures)})
    else:
        show(table(figures, "illegal access"))
    return EXIT_OK if figures.is_clean else EXIT_GATE


def run_illegal(plan: KillPlan) -> KillFigures:
    """Workers die of a kernel that writes far outside of its tensor, as often as planned."""
    with tempfile.TemporaryDirectory() as folder:
        plant = Plant(folder=folder, num_planted=plan.num_kills, max_seconds=plan.max_seconds)

        def server_of(plan: KillPlan, port: int, admin_key: str) -> list[str]:
            engine = EngineConfig(
                device=plan.device, max_batch_requests=plan.num_streams, kv_tokens=KV_TOKENS
            )
            text = msgspec.json.encode(plant).decode()
            return command(
                ServerOrder(
                    model=plan.model, engine=engine, port=port, admin_key=admin_key, plant=text
                )
            )

        def deaths(plan: KillPlan, target: Target, report: Report) -> Iterator[tuple[float, float]]:
            (Path(folder) / "armed").touch()
            yield from _await_deaths(plan, target, report)

        return run_kills(plan, server_of=server_of, deaths=deaths)


def _await_deaths(plan: KillPlan, target: Target, report: Report) -> Iterator[tuple[float, float]]:
    """When each worker died of what is planted in it, and how long until another was ready."""
    pid = target.wait_ready()
    for number in range(plan.num_kills):
        report("workers fault", number / plan.num_kills)
        stop = time.monotonic() + plan.max_seconds + _FAULT_SECONDS
        while Path(f"/proc/{pid}").exists():
            if time.monotonic() > stop:
                raise HypoError(f"worker {pid} did not die of what was planted in it")
            time.sleep(_LOOK_SECONDS)
        at = time.monotonic()
        pid = target.wait_ready(other_than=pid)
        yield at, time.monotonic() - at


def _serve_victims(names: str, device: str, *, as_json: bool) -> int:
    """Serve with one victim after the other in a worker."""
    found = victims([] if names == "all" else names.split(","))
    servers, figures = PlantedServers(), list[PlantedFigures]()
    for number, victim in enumerate(found):
        print(f"{number} of {len(found)}: {victim.name}", file=sys.stderr, flush=True)
        figures.append(servers.run(victim, device))
    if as_json:
        show_json({"victims": msgspec.to_builtins(figures)})
    else:
        show(planted_table(figures))
    return EXIT_OK if all(result.is_clean for result in figures) else EXIT_GATE


def planted_table(figures: Sequence[PlantedFigures]) -> str:
    """A line for each victim, those last whose defect no server can see; then sums of the rest."""
    lines = [f"{'victim':<30} {'symptom':<10} {'workers':>7} {'errors':>6} {'changed':>7}"]
    for result in sorted(figures, key=lambda result: (not result.is_seen, result.victim)):
        lines.append(
            f"{result.victim:<30} {result.symptom:<10} {result.num_faults:>7} "
            f"{result.num_errors:>6} {result.num_changed:>7}"
        )
    seen = [result for result in figures if result.is_seen]
    lines += [
        "",
        f"{len(seen)} defects that show: {sum(result.num_answers for result in seen)} answers, "
        f"{sum(result.num_errors for result in seen)} errors, "
        f"{sum(result.num_changed for result in seen)} changed",
    ]
    if silent := [result for result in figures if not result.is_seen]:
        lines.append(
            f"{len(silent)} defects that show in no number by itself: "
            f"{sum(result.num_changed for result in silent)} answers changed"
        )
    bad = [result for result in figures if not result.is_clean]
    return "\n".join([*lines, *(f"{result.victim}: {result.first_problem}" for result in bad)])
