"""The first place at which two recorded runs part: a launch, its arguments, its inputs or results.

Compares records; runs nothing and needs neither Triton nor torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hypocenter.device.offline.specimen import is_of_device
from hypocenter.doctor.difference import Compared, Difference, RunDiff
from hypocenter.dtypes import NUMPY_DTYPES
from hypocenter.record.bundle import Bundle
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.events import (
    AnyEvent,
    ArgumentRecord,
    Launched,
    LaunchRecord,
    Place,
    RequestRecord,
    Statistics,
    Stepped,
    TensorRecord,
    Values,
)
from hypocenter.record.gap import Gap
from hypocenter.record.keyed_digest import are_comparable

#: Differences of one launch or step that are told; the first is the one that matters.
MAX_TOLD = 16
#: Between devices figures are compared and not bytes, for the order of a sum may differ.
FIGURE_TOLERANCE = 1e-2


def rundiff(good: Bundle, bad: Bundle) -> RunDiff:
    """Compare two runs step by step, as far as both are recorded and `bad` got."""
    runs = _Runs(good, bad)
    differences = runs.first()
    counts = runs.counts
    compared = Compared(
        *(counts[name] for name in ("steps", "launches", "arguments", "inputs", "statistics"))
    )
    return RunDiff(
        tuple(differences[:MAX_TOLD]), compared, tuple(_around(good, bad)), tuple(runs.unseen)
    )


class _Runs:
    """Two runs side by side. `counts` says what was compared."""

    def __init__(self, good: Bundle, bad: Bundle) -> None:
        self.good, self.bad = BundleIndex(good), BundleIndex(bad)
        self.counts: Counter[str] = Counter()
        self._is_same_device = good.device == bad.device
        self._statistics = tuple(_by_place(bundle) for bundle in (good, bad))
        self.unseen: list[Gap] = []
        #: Requests of GOOD that were compared before, and whether that began with the first step.
        self._met: set[int] = set()
        self._is_whole = False
        for name, bundle in (("GOOD", good), ("BAD", bad)):
            if not bundle.statistics:
                self.unseen.append(
                    Gap.not_recorded(
                        "tensor statistics", f"{name} has none; run it with --launch-mode traced"
                    )
                )

    def first(self) -> list[Difference]:
        """The differences of the first launch or step that has any."""
        good, bad = _steps(self.good), _steps(self.bad)
        if not good or not bad:
            self.unseen.append(Gap.not_recorded("steps", "one of the runs has none"))
            return []
        start = max(min(good), min(bad))
        self._is_whole = start == 1
        if start > min((*good, *bad)):
            self.unseen.append(
                Gap.not_recorded(f"steps before {start}", "one run has kept no record of them")
            )
        for step in sorted(step for step in good.keys() | bad.keys() if step >= start):
            found = self._step(step, good.get(step, []), bad.get(step, []))
            if found:
                return found
            self.counts["steps"] += 1
        return []

    def _step(
        self, step: int, good: Sequence[Stepped | Launched], bad: Sequence[Stepped | Launched]
    ) -> list[Difference]:
        for one, other in zip(good, bad, strict=False):
            names = (self._name(self.good, one), self._name(self.bad, other))
            if names[0] != names[1]:
                return [
                    Difference(
                        step=step, what="launch", subject="plan", good=names[0], bad=names[1]
                    )
                ]
            found = self._event(step, names[0], one, other)
            if found:
                return found
        if len(good) != len(bad):
            return [
                Difference(
                    step=step,
                    what="end",
                    subject="of the step",
                    good=f"{len(good)} plans or launches",
                    bad=f"{len(bad)} plans or launches",
                )
            ]
        return []

    def _name(self, index: BundleIndex, event: Stepped | Launched) -> str:
        if isinstance(event, Launched):
            return event.launch.kernel
        plan = index.plans.get(event.plan)
        return plan.name or "plan" if plan else "unknown plan"

    def _event(
        self, step: int, name: str, good: Stepped | Launched, bad: Stepped | Launched
    ) -> list[Difference]:
        if isinstance(good, Launched) or isinstance(bad, Launched):
            assert isinstance(good, Launched)
            assert isinstance(bad, Launched)
            places = Place(good.step, -1, good.seq), Place(bad.step, -1, bad.seq)
            return list(self._launch(step, name, places, (good.launch, bad.launch)))
        found = list(self._requests(step, good.requests, bad.requests))
        if not any(difference.what == "prompt" for difference in found):
            found += self._inputs(good, bad)
        if found:
            return found
        plans = self.good.plans.get(good.plan), self.bad.plans.get(bad.plan)
        if plans[0] is None or plans[1] is None:
            return []
        last = self.bad.bundle.progress.submitted
        for number, pair in enumerate(zip(plans[0].launches, plans[1].launches, strict=False)):
            places = Place(good.step, good.plan, number), Place(bad.step, bad.plan, number)
            if last and (last.step, last.plan) == (bad.step, bad.plan) and number > last.launch:
                return [
                    Difference(
                        step=step,
                        plan=name,
                        what="end",
                        subject="of the run",
                        good=f"goes on with {pair[0].kernel}",
                        bad="ends there",
                        launch=number,
                        kernel=pair[0].kernel,
                        place=places[1],
                    )
                ]
            found = list(self._launch(step, name, places, pair))
            if found:
                return found
        sizes = [len(plan.launches) for plan in plans if plan is not None]
        if sizes[0] != sizes[1]:
            return [
                Difference(
                    step=step,
                    plan=name,
                    what="end",
                    subject=f"of {name}",
                    good=f"{sizes[0]} launches",
                    bad=f"{sizes[1]} launches",
                )
            ]
        return []

    # -- requests and inputs --------------------------------------------------------------------

    def _requests(
        self, step: int, good: Sequence[RequestRecord], bad: Sequence[RequestRecord]
    ) -> Iterator[Difference]:
        if len(good) != len(bad):
            yield Difference(
                step=step, what="request", subject="count", good=str(len(good)), bad=str(len(bad))
            )
        for row, (one, other) in enumerate(zip(good, bad, strict=False)):
            digests = one.digest, other.digest
            is_first = self._is_whole and one.id not in self._met
            self._met.add(one.id)
            if not are_comparable(*digests):
                self._tell_of_keys(*digests)
            elif digests[0] != digests[1]:
                what = "prompt" if is_first else "tokens"
                yield Difference(
                    step=step, what=what, subject=f"{row}", good=digests[0], bad=digests[1]
                )
                if is_first:  # all else that differs follows from it
                    continue
            for name in ("row", "first_position", "num_tokens", "blocks"):
                pair = getattr(one, name), getattr(other, name)
                if pair[0] != pair[1]:
                    yield Difference(
                        step=step,
                        what="request",
                        subject=f"{row}, {name}",
                        good=_short(pair[0]),
                        bad=_short(pair[1]),
                    )

    def _tell_of_keys(self, good: str, bad: str) -> None:
        """Say once that two digests are there and say nothing of each other."""
        gap = Gap.not_recorded(
            "whether requests had the same token ids",
            "the bundles come from two machines or users, whose digests have different keys",
        )
        if good and bad and gap not in self.unseen:
            self.unseen.append(gap)

    def _inputs(self, good: Stepped, bad: Stepped) -> Iterator[Difference]:
        sides = [
            {self._name_of(index, values.tensor): values for values in event.inputs}
            for index, event in ((self.good, good), (self.bad, bad))
        ]
        filled = {
            self._name_of(self.good, good.filled_by_device),
            self._name_of(self.bad, bad.filled_by_device),
        }
        for name in dict.fromkeys((*sides[0], *sides[1])):
            one, other = (side.get(name) for side in sides)
            if name in filled and (one is None or other is None):
                self.unseen.append(
                    Gap.not_recorded(f"{name} of step {bad.step}", "a run did not live to learn it")
                )
                continue
            self.counts["inputs"] += 1
            if one is None or other is None:
                told = ["nothing" if v is None else f"{v.dtype} {v.shape}" for v in (one, other)]
            elif (one.dtype, one.shape) != (other.dtype, other.shape):
                told = [f"{v.dtype} {_dims(v.shape)}" for v in (one, other)]
            elif one.data != other.data:
                at, told = _first_element(one, other)
                name = f"{name}{at}"
            else:
                continue
            yield Difference(step=good.step, what="input", subject=name, good=told[0], bad=told[1])

    def _name_of(self, index: BundleIndex, tensor: int) -> str:
        record = index.tensors.get(tensor)
        return record.name if record is not None else f"tensor {tensor}"

    # -- launches -------------------------------------------------------------------------------

    def _launch(
        self,
        step: int,
        plan: str,
        places: tuple[Place, Place],
        pair: tuple[LaunchRecord, LaunchRecord],
    ) -> Iterator[Difference]:
        good, bad = pair
        self.counts["launches"] += 1

        def differs(what: str, subject: str, one: object, other: object) -> Difference:
            return Difference(
                step=step,
                plan=plan,
                launch=places[1].launch,
                kernel=bad.kernel,
                place=places[1],
                what=what,
                subject=subject,
                good=_short(one),
                bad=_short(other),
            )

        if good.kernel != bad.kernel:
            yield differs("launch", "name", good.kernel, bad.kernel)
            return
        if good.grid != bad.grid:
            yield differs("grid", "", good.grid, bad.grid)
        if good.num_warps != bad.num_warps:
            yield differs("option", "num_warps", good.num_warps, bad.num_warps)
        for one, other in ((good.constants, bad.constants), (good.options, bad.options)):
            for name in dict.fromkeys((*one, *other)):
                if one.get(name) != other.get(name) and not is_of_device(name):
                    yield differs("option", name, one.get(name), other.get(name))
        sides = [
            {
                argument.name: self._argument(index, argument)
                for argument in (*launch.facts, *launch.arguments)
            }
            for index, launch in zip((self.good, self.bad), pair, strict=True)
        ]
        for name in dict.fromkeys((*sides[0], *sides[1])):
            self.counts["arguments"] += 1
            if sides[0].get(name) != sides[1].get(name):
                first, second = _only_differing(sides[0].get(name), sides[1].get(name))
                yield differs("argument", name, first, second)
        yield from self._results(places, differs)

    def _argument(self, index: BundleIndex, argument: ArgumentRecord) -> dict[str, Any]:
        """What is comparable of an argument: never an address or an identity."""
        if argument.tensor is None:
            return {"value": argument.value}
        tensor = index.tensors.get(argument.tensor)
        if tensor is None:
            return {"tensor": "unknown"}
        allocation = index.allocations.get(tensor.allocation)
        room = allocation.num_bytes if allocation is not None else None
        return {**_facts(tensor), "pointer": argument.value, "allocation bytes": room}

    def _results(self, places: tuple[Place, Place], differs: Any) -> Iterator[Difference]:
        sides = [
            {
                self._name_of(index, statistics.tensor): statistics
                for statistics in of.get(place, ())
            }
            for index, of, place in zip(
                (self.good, self.bad), self._statistics, places, strict=True
            )
        ]
        for name in [name for name in sides[0] if name in sides[1]]:
            one, other = sides[0][name], sides[1][name]
            self.counts["statistics"] += 1
            is_same = (
                one.digest == other.digest
                if self._is_same_device and are_comparable(one.digest, other.digest)
                else _close(one, other)
            )
            if not is_same:
                yield differs("statistics", name, _figures(one), _figures(other))


# -- facts as text --------------------------------------------------------------------------------


def _steps(index: BundleIndex) -> dict[int, list[Stepped | Launched]]:
    """By number, those left out that were launched ahead and then thrown away."""
    thrown = {event.step for event in index.events if _is_thrown_away(event)}
    steps: dict[int, list[Stepped | Launched]] = {}
    for event in index.events:
        if isinstance(event, Stepped | Launched) and event.step not in thrown:
            number = event.step - sum(step < event.step for step in thrown)
            steps.setdefault(number, []).append(event)
    return steps


def _is_thrown_away(event: AnyEvent) -> bool:
    """Whether all requests of a step had ended when its tokens were learned."""
    return (
        isinstance(event, Stepped)
        and bool(event.requests)
        and event.filled_by_device in [values.tensor for values in event.inputs]
        and not any(request.digest for request in event.requests)
    )


def _by_place(bundle: Bundle) -> dict[Place, list[Statistics]]:
    found: dict[Place, list[Statistics]] = {}
    for statistics in bundle.statistics:
        found.setdefault(statistics.place, []).append(statistics)
    return found


def _facts(tensor: TensorRecord) -> dict[str, Any]:
    names = ("name", "owner", "part", "dtype", "shape", "strides", "extent_bytes")
    return {name: getattr(tensor, name) for name in names}


def _only_differing(good: Any, bad: Any) -> tuple[str, str]:
    if good is None or bad is None:
        return ("absent" if good is None else "there"), ("absent" if bad is None else "there")
    keys = [key for key in dict.fromkeys((*good, *bad)) if good.get(key) != bad.get(key)]
    return tuple(
        ", ".join(
            f"{key} {_short(side.get(key))}" if key != "value" else _short(side.get(key))
            for key in keys
        )
        for side in (good, bad)
    )  # type: ignore[return-value]


def _first_element(good: Values, bad: Values) -> tuple[str, list[str]]:
    """Where two inputs differ first, and what is there."""
    kind = NUMPY_DTYPES.get(good.dtype.upper())
    count = int(np.prod(good.shape, dtype=np.int64))
    if kind is None or any(len(v.data) != count * np.dtype(kind).itemsize for v in (good, bad)):
        return "", [f"{len(v.data)} bytes" for v in (good, bad)]
    one, other = (np.frombuffer(v.data, kind).reshape(good.shape) for v in (good, bad))
    bits = one.view(f"V{one.itemsize}") != other.view(f"V{one.itemsize}")
    at = tuple(int(i) for i in np.argwhere(bits)[0])
    return f"[{', '.join(map(str, at))}]", [str(one[at]), str(other[at])]


def _close(good: Statistics, bad: Statistics) -> bool:
    if (good.num_nan, good.num_inf) != (bad.num_nan, bad.num_inf):
        return False
    room = FIGURE_TOLERANCE * max(good.rms, bad.rms)
    return all(
        abs(getattr(good, name) - getattr(bad, name)) <= room
        for name in ("low", "high", "mean", "rms")
    )


def _figures(statistics: Statistics) -> str:
    text = (
        f"{statistics.low:.6g}..{statistics.high:.6g}, mean {statistics.mean:.6g}, "
        f"rms {statistics.rms:.6g}"
    )
    for name in ("nan", "inf", "poisoned"):
        if count := getattr(statistics, f"num_{name}"):
            text += f", {count} {name}"
    if statistics.first_nonfinite is not None:
        text += f", first at {list(statistics.first_nonfinite)}"
    digest = statistics.digest.rpartition(":")[2]
    return f"{text}, digest {digest[:12]}"


def _around(good: Bundle, bad: Bundle) -> Iterator[str]:
    if good.device != bad.device:
        yield f"device: {good.device} in GOOD, {bad.device} in BAD"
    texts = [
        {
            (s.file.rpartition("/")[2].partition(".")[0].partition("-")[0], s.function): s.id
            for s in bundle.sources
        }
        for bundle in (good, bad)
    ]
    for key in sorted(texts[0]):
        if texts[0][key] != texts[1].get(key, texts[0][key]):
            yield f"source of {key[1]}: {texts[0][key][:12]} in GOOD, {texts[1][key][:12]} in BAD"
    for what in ("packages", "environment"):
        one, other = getattr(good, what), getattr(bad, what)
        for name in sorted({*one, *other}):
            # Where a run is recorded changes nothing.
            if one.get(name) != other.get(name) and name != "HYPO_RUN_DIR":
                yield f"{name}: {one.get(name)} in GOOD, {other.get(name)} in BAD"


def _dims(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _short(value: object) -> str:
    if isinstance(value, tuple):
        value = _dims(value)
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
