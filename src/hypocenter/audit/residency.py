"""Whether all that a step needs stays on the device, by what the engine recorded of its steps.

A fallback is a launch on another device, or a tensor of the model that lies elsewhere. Copies
between host and device each need a reason; what has none is a mistake.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import msgspec

from hypocenter.audit.executed import Stretch
from hypocenter.audit.ways import Ways
from hypocenter.device import copies
from hypocenter.record.events import Allocated, Copied, PlanRecord, Stepped, TensorRecord
from hypocenter.verify.outcome import Mistake, PlantedError, Stage, Uncovered, verdict_of

NAME = "residency"
ASKS = "does all that a step needs stay on the device?"
#: Why a copy between host and device is made while requests run: by owner and name of its tensor,
#: and by its direction.
_REASONS = {
    ("sampler", "outcomes", "out"): "the chosen tokens",
    ("sampler", "*", "in"): "how tokens are chosen",
    ("step", "counts", "out"): "the end of a step",
}
#: What a GPU's launch of this name reads and writes goes to the host and back.
_BY_HOST, _WHY_BY_HOST = "host_mixture", "experts on the host"
#: The owners of what stays on the device from the load on.
_RESIDENT = ("model", "kv_cache", "states")


class _Copy(msgspec.Struct, frozen=True, order=True):
    direction: str
    tensor: str
    reason: str
    num_bytes: int
    site: str


def residency(ways: Ways, num_asked: int, num_answered: int) -> Stage:
    """Answer a prompt, and look at each launch and each copy of its steps."""
    started = time.perf_counter()
    device = ways.runner.config.device
    request = (
        ways.answering(ways.ids(num_asked), num_answered)
        if ways.writes
        else ways.reading(ways.ids(num_asked))
    )
    stretch = ways.quietly([request])
    mistakes = [*_fallbacks(stretch, device), *_without_reason(stretch)]
    found = list(_copies(stretch))
    planted = _plant(ways, device)
    per_step = Counter[str]()
    for copy in found:
        per_step[f"{copy.direction}: {copy.reason or copy.tensor}"] += copy.num_bytes
    num_steps = len(stretch.steps)
    per_step["in: inputs of the step"] += sum(_input_bytes(step) for step in stretch.steps)
    uncovered = list(_unknown(stretch))
    if device == "cpu":
        why = "host and device are one memory, so nothing is copied between them"
        uncovered.append(Uncovered("copies between host and device", why))
    num_launches = sum(len(stretch.plans[step.plan].launches) for step in stretch.steps)
    num_by_host = sum(len(stretch.plans[step.plan].host_launches) for step in stretch.steps)
    asks = ASKS
    if num_by_host:
        asks = "does all that a step needs stay on the device, but for experts on the host?"
        why = f"the host has them: {num_by_host} launches of its own, and rows go there and back"
        uncovered.append(Uncovered("experts", why))
    return Stage(
        name=NAME,
        asks=asks,
        verdict=verdict_of(mistakes, planted, num_steps),
        things="steps",
        num_covered=num_steps,
        num_all=num_steps,
        num_checks=num_launches + len(found),
        canary=planted,
        findings=tuple(mistakes[:16]),
        uncovered=tuple(uncovered),
        details={
            "fallbacks": len(_fallbacks(stretch, device)),
            "launches_by_host_per_step": num_by_host / max(num_steps, 1),
            "copies": [msgspec.to_builtins(copy) for copy in sorted(set(found))],
            "bytes_per_step": {name: total / max(num_steps, 1) for name, total in per_step.items()},
        },
        seconds=time.perf_counter() - started,
    )


def _fallbacks(stretch: Stretch, device: str) -> list[Mistake]:
    """Launches on another device, and tensors of the model that lie elsewhere."""
    devices = _devices(stretch)
    found: dict[str, Mistake] = {}
    for step in stretch.steps:
        plan = stretch.plans[step.plan]
        for launch in plan.launches:
            if launch.device != device:
                what = f"{launch.kernel} runs on {launch.device}, and the model on {device}"
                found[what] = Mistake(what, plan.name)
        for tensor in _resident(stretch, plan):
            where = devices.get(tensor.allocation)
            if where not in (device, None):
                what = f"{tensor.name} lies on {where}, and the model on {device}"
                found[what] = Mistake(what, plan.name)
    return list(found.values())


def _unknown(stretch: Stretch) -> Iterator[Uncovered]:
    """Tensors of which the record does not say where they lie."""
    devices = _devices(stretch)
    plans = {step.plan: stretch.plans[step.plan] for step in stretch.steps}
    tensors = {tensor.id: tensor for plan in plans.values() for tensor in _resident(stretch, plan)}
    left = sorted(t.name for t in tensors.values() if t.allocation not in devices)
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        why = "the record does not have their allocations"
        yield Uncovered(f"on which device {left[0]}{more} lie", why)


def _resident(stretch: Stretch, plan: PlanRecord) -> Iterator[TensorRecord]:
    """The tensors of a plan's launches that are to stay on its device."""
    for owner in _RESIDENT:
        yield from stretch.tensors_given(plan.launches, owner)


def _devices(stretch: Stretch) -> dict[int, str]:
    """The device of each allocation that the record has."""
    events = stretch.all_events
    return {e.allocation.id: e.allocation.device for e in events if isinstance(e, Allocated)}


def _copies(stretch: Stretch) -> Iterator[_Copy]:
    given = _given_to_host(stretch)
    for event in stretch.events:
        if isinstance(event, Copied):
            tensor = stretch.tensors.get(event.tensor or 0)
            name, owner = (tensor.name, tensor.owner) if tensor is not None else ("?", "?")
            reason = _reason(owner, name, event.direction)
            if event.tensor in given:  # that of the counts may be copied for both
                reason = ", ".join(filter(None, (reason, _WHY_BY_HOST)))
            yield _Copy(event.direction, f"{name} ({owner})", reason, event.num_bytes, event.site)


def _given_to_host(stretch: Stretch) -> frozenset[int]:
    """Numbers of the tensors that the host changes in place of the device, as was asked of it."""
    return frozenset(
        fact.tensor
        for plan in stretch.plans.values()
        for launch in plan.launches
        if launch.kernel == _BY_HOST
        for fact in launch.facts
        if fact.tensor is not None
    )


def _reason(owner: str, name: str, direction: str) -> str:
    """Why a tensor is copied; empty where nobody knows."""
    for wanted in (name, "*"):
        if (reason := _REASONS.get((owner, wanted, direction))) is not None:
            return reason
    return ""


def _without_reason(stretch: Stretch) -> list[Mistake]:
    known = {copy for copy in _copies(stretch) if not copy.reason}
    words = {"in": "to the device", "out": "to the host"}
    return [
        Mistake(
            f"{copy.tensor} is copied {words[copy.direction]} for no known reason",
            copy.site,
            {"bytes": copy.num_bytes},
        )
        for copy in sorted(known)
    ]


def _input_bytes(step: Stepped) -> int:
    return sum(len(values.data) for values in step.inputs)


def _plant(ways: Ways, device: str) -> PlantedError:
    """A launch that is said to have run elsewhere; on a GPU also a copy that nobody needs."""
    request = ways.reading(ways.ids(2))
    stretch = ways.quietly([request])
    elsewhere = "a device that is not there"
    num_planted, num_seen = 1, int(bool(_fallbacks(stretch, elsewhere)))
    if device != "cpu":
        mark = ways.record.mark()
        copies.to_host(ways.runner.token_ids)
        num_planted += 1
        num_seen += bool(_without_reason(ways.record.since(mark)))
    return PlantedError("a launch elsewhere and a copy without reason", num_planted, num_seen)
