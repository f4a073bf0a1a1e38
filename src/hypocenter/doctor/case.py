"""A bundle as the doctor reads it: its tables joined, its steps in order. Judges nothing."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from hypocenter.base.dtypes import NUMPY_DTYPES, Array
from hypocenter.base.errors import ErrorKind
from hypocenter.doctor.beside.host_text import HostTexts, host_texts
from hypocenter.doctor.diagnosis import Claim, FailedComparison, GpuSight
from hypocenter.doctor.difference import RunDiff
from hypocenter.doctor.examining.time_limit import TimeLimit
from hypocenter.doctor.kernel_text import Access, accesses, parameters_stored
from hypocenter.record.bundle import Bundle
from hypocenter.record.bundle_index import BundleIndex, LaunchMade
from hypocenter.record.engine_events import Event
from hypocenter.record.events import (
    LaunchRecord,
    Place,
    PlanRecord,
    SourceRecord,
    Stepped,
    TensorRecord,
    Values,
)
from hypocenter.record.gap import Gap

_E = TypeVar("_E", bound=Event)
#: Of weights, as GGUF names them, and of the cache.
_LAYER = re.compile(r"^(?:blk|[kv]_cache)\.([0-9]{1,6})\b")
#: Launches whose tensors are remembered: those of a plan are asked for with every step.
_MAX_REMEMBERED = 4096


class Case:
    """Look-ups over one bundle. `good` is a bundle of a run without the fault, to compare with."""

    def __init__(
        self,
        bundle: Bundle,
        good: Bundle | None = None,
        *,
        allow_source: bool = False,
        limit: TimeLimit | None = None,
    ) -> None:
        self.bundle, self.good, self.allow_source = bundle, good, allow_source
        self.limit = limit or TimeLimit()
        self.index = index = BundleIndex(bundle)
        self.tensors, self.plans, self.sources = index.tensors, index.plans, index.sources
        self.allocations, self.freed = index.allocations, index.freed
        self.steps = index.events_of(Stepped)
        self._writes: dict[object, frozenset[str]] = {}
        self._arrays: dict[tuple[int, tuple[int, ...]], Array] = {}
        #: By identity, with the launch, so that no other can come to have it.
        self._tensors_of: dict[int, tuple[LaunchRecord, Mapping[str, TensorRecord]]] = {}
        #: The comparison with the good run, once a rung has made it.
        self.good_diff: RunDiff | None = None
        #: What the rungs have said so far.
        self.claims: list[Claim] = []
        #: Where GPUs stood by their own dumps, once a rung has looked.
        self.sights: list[GpuSight] = []
        #: What the program itself found unequal, once a rung has looked.
        self.compared: FailedComparison | None = None
        #: What could not be looked at; rungs add to it.
        self.unseen: dict[Gap, None] = dict.fromkeys(bundle.missing)

    @functools.cached_property
    def good_case(self) -> Case | None:
        """The good run as this one is read; None where there is none."""
        return Case(self.good, allow_source=self.allow_source) if self.good is not None else None

    def leave_unseen(self, gap: Gap) -> None:
        """Say once what could not be looked at."""
        self.unseen[gap] = None

    @property
    def is_foreign(self) -> bool:
        """Whether a program was recorded that is not this package's, and of it launches alone."""
        return self.bundle.is_foreign

    @property
    def kind(self) -> str:
        """The symptom's kind; an error that a device found in what it had run counts as a crash."""
        fault = self.bundle.fault
        is_late = fault.kind == "error" and fault.error_kind is ErrorKind.FOUND_LATER
        return "crash" if is_late else fault.kind

    @property
    def symptoms(self) -> tuple[str, ...]:
        """Kinds that a cause may explain: what a program itself found wrong may be any value."""
        fault = self.bundle.fault
        is_own = self.kind == "error" and fault.is_statement
        return (self.kind, "none") if is_own else (self.kind,)

    # -- launches -------------------------------------------------------------------------------

    @property
    def launches(self) -> tuple[LaunchMade, ...]:
        return self.index.launches

    def plan_of(self, place: Place) -> PlanRecord | None:
        return self.plans.get(place.plan)

    def event_of(self, use: LaunchMade) -> Stepped | None:
        """The step that made a launch."""
        return next((event for event in self.steps if event.seq == use.seq), None)

    def layer_of(self, use: LaunchMade) -> int | None:
        """The layer that a launch is of: that of its weights or cache, or of the last one before
        in its plan that has any."""
        plan = self.plans.get(use.place.plan) if use.place is not None else None
        if plan is None or use.place is None:
            return None
        for launch in reversed(plan.launches[: use.place.launch + 1]):
            for tensor in self.tensors_of(launch).values():
                if (found := _LAYER.search(tensor.name)) is not None:
                    return int(found[1])
        return None

    # -- arguments ------------------------------------------------------------------------------

    def parameter_of(self, launch: LaunchRecord, fact: str) -> str:
        """The kernel's name for a contract's argument: the parameter that has the same tensor."""
        wanted = next((given for given in launch.facts if given.name == fact), None)
        if wanted is not None and wanted.tensor is not None:
            for arg in launch.arguments:
                if arg.tensor == wanted.tensor:
                    return arg.name
        names = {arg.name for arg in launch.arguments}
        return next((name for name in (f"{fact}_ptr", fact) if name in names), fact)

    def fact_of(self, launch: LaunchRecord, parameter: str) -> str:
        """The contract's name for a kernel's parameter; the parameter's own where there is none."""
        wanted = next((arg for arg in launch.arguments if arg.name == parameter), None)
        if wanted is not None and wanted.tensor is not None:
            for fact in launch.facts:
                if fact.tensor == wanted.tensor:
                    return fact.name
            memory = self.tensors.get(wanted.tensor)
            for fact in launch.facts:  # an array of a packed weight
                whole = self.tensors.get(fact.tensor) if fact.tensor is not None else None
                if whole and memory and memory.part and whole.allocation == memory.allocation:
                    return fact.name
        bare = parameter.removesuffix("_ptr")
        return bare if any(fact.name == bare for fact in launch.facts) else parameter

    def tensor_of(self, launch: LaunchRecord, name: str) -> TensorRecord | None:
        """The tensor passed for a parameter or for a contract's argument."""
        for fact in (*launch.facts, *launch.arguments):
            if fact.name == name and fact.tensor is not None:
                return self.tensors.get(fact.tensor)
        return None

    def tensors_of(self, launch: LaunchRecord) -> Mapping[str, TensorRecord]:
        """Every tensor of a launch, by the contract's name where it has one."""
        kept = self._tensors_of.get(id(launch))
        if kept is None:
            kept = launch, self._find_tensors(launch)
            if len(self._tensors_of) < _MAX_REMEMBERED:
                self._tensors_of[id(launch)] = kept
        return kept[1]

    def _find_tensors(self, launch: LaunchRecord) -> dict[str, TensorRecord]:
        seen: set[int] = set()
        tensors: dict[str, TensorRecord] = {}
        # A kernel may call one thing by the name that the contract has for another.
        for name, number in (
            (fact.name, fact.tensor) for fact in (*launch.facts, *launch.arguments)
        ):
            is_new = number not in seen and name not in tensors
            if number is not None and number in self.tensors and is_new:
                seen.add(number)
                tensors[name] = self.tensors[number]
        return tensors

    def written_by(self, launch: LaunchRecord) -> frozenset[str]:
        """Names, as in `tensors_of`, of the tensors that a launch may write."""
        key = (launch.kernel, launch.source, launch.facts)
        if key not in self._writes:
            self._writes[key] = self._written_by(launch)
        return self._writes[key]

    def _written_by(self, launch: LaunchRecord) -> frozenset[str]:
        declaration = self.bundle.declaration(launch)
        arguments = declaration.arguments if declaration else ()
        written = frozenset(argument.name for argument in arguments if argument.is_written)
        source = self.sources.get(launch.source)
        if written or source is None:
            return written
        stored = parameters_stored(source)
        return frozenset(self.fact_of(launch, name) for name in stored)

    @functools.cached_property
    def computed(self) -> frozenset[int]:
        """The ids of all tensors that some launch of the run may write."""
        found = {
            tensor.id
            for use in self.launches
            for name, tensor in self.tensors_of(use.launch).items()
            if name in self.written_by(use.launch)
        }
        return frozenset(found)

    @functools.cached_property
    def host(self) -> HostTexts:
        """What of the engine's own Python is not as in the good run; nothing without one."""
        return host_texts(self.good, self.bundle) if self.good is not None else HostTexts()

    # -- source ---------------------------------------------------------------------------------

    def access(self, launch: LaunchRecord, fact: str, operation: str = "") -> Access | None:
        """The first line of the kernel that reads or writes through an argument.

        `operation` load or store picks among them; without a match any will do.
        """
        source = self.sources.get(launch.source)
        if source is None:
            return None
        found = accesses(source, self.parameter_of(launch, fact), self._callees)
        wanted = [access for access in found if access.operation == operation]
        return next(iter((*wanted, *found)), None)

    @functools.cached_property
    def _callees(self) -> dict[str, SourceRecord]:
        return {source.function: source for source in self.bundle.sources}

    # -- values ---------------------------------------------------------------------------------

    def input_of(self, event: Stepped, name: str) -> Array | None:
        """What the host put into the tensor of that name in a step."""
        for values in event.inputs:
            tensor = self.tensors.get(values.tensor)
            if tensor is not None and tensor.name == name:
                return self.full_array(values, tensor.shape)
        return None

    def full_array(self, values: Values, shape: tuple[int, ...]) -> Array:
        """Recorded values in the leading part of `shape`, zeros behind; made once."""
        key = (id(values), shape)
        if key not in self._arrays:
            given = array_of(values)
            whole = given
            if given.shape != shape and given.ndim == len(shape):
                whole = np.zeros(shape, given.dtype)
                part = tuple(slice(0, min(n, m)) for n, m in zip(given.shape, shape, strict=True))
                whole[part] = given[part]
            self._arrays[key] = whole
        return self._arrays[key]


def array_of(values: Values) -> Array:
    """The recorded elements; read-only. A dtype that numpy lacks gives its bytes."""
    dtype = NUMPY_DTYPES.get(values.dtype.upper())
    if dtype is None:
        return np.frombuffer(values.data, np.uint8)
    return np.frombuffer(values.data, dtype).reshape(values.shape)
