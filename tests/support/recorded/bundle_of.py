"""Test-side bundles: what a recorder would leave of a plan's launches, made by hand."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hypocenter.base.tensor import Tensor
from hypocenter.device import copies
from hypocenter.device.launch import Launch
from hypocenter.record.bundle import Bundle
from hypocenter.record.events import (
    Allocated,
    AllocationRecord,
    AnyEvent,
    ArgumentRecord,
    LaunchRecord,
    Place,
    PlanRecord,
    Reached,
    SourceRecord,
    Stepped,
    TensorRecord,
    Values,
)
from hypocenter.record.fault_record import FaultRecord
from hypocenter.record.ring import read_run
from hypocenter.record.trace_log import read_trace

Array = np.ndarray[Any, Any]


class Recording:
    """Collects records of tensors, sources and plans."""

    def __init__(self) -> None:
        self.tensors: dict[int, tuple[Tensor, TensorRecord]] = {}
        self.sources: dict[str, SourceRecord] = {}
        self.events: list[AnyEvent] = []
        self.plans: list[PlanRecord] = []
        self._allocations: set[int] = set()

    def tensor(self, tensor: Tensor, part: int | None = None) -> int:
        key = id(tensor) + (0 if part is None else 1 + part)
        if key not in self.tensors:
            memory_of = tensor.allocation
            if memory_of.id not in self._allocations:
                self._allocations.add(memory_of.id)
                allocation = AllocationRecord(
                    id=memory_of.id, kind="device", device=memory_of.device,
                    address=memory_of.address, num_bytes=memory_of.num_bytes, name=tensor.name,
                    owner=tensor.owner, site=memory_of.site,
                )  # fmt: skip
                self.event(Allocated, step=0, allocation=allocation)
            record = TensorRecord(
                id=len(self.tensors) + 1, name=tensor.name, owner=tensor.owner,
                dtype=tensor.dtype.name, shape=tensor.shape, strides=tensor.strides,
                offset=tensor.offset, allocation=memory_of.id, address=tensor.address,
                extent_bytes=tensor.extent_bytes, part="" if part is None else f"part {part}",
            )  # fmt: skip
            self.tensors[key] = tensor, record
        return self.tensors[key][1].id

    def event(self, kind: Any, **fields: Any) -> None:
        self.events.append(kind(seq=len(self.events) + 1, **fields))

    def source(self, jit: Any) -> str:
        from triton.language import constexpr  # those that record no kernel need no Triton

        text = inspect.getsource(jit.fn)
        key = hashlib.sha256(text.encode()).hexdigest()
        if key not in self.sources:
            names = {**jit.fn.__globals__, **inspect.getclosurevars(jit.fn).nonlocals}
            used = jit.fn.__code__.co_names
            callees = [names[n] for n in used if type(names.get(n)) is type(jit)]
            constants = {n: names[n].value for n in used if isinstance(names.get(n), constexpr)}
            self.sources[key] = SourceRecord(
                id=key, function=jit.__name__, file=inspect.getsourcefile(jit.fn) or "",
                first_line=jit.fn.__code__.co_firstlineno, text=text,
                callees=tuple(self.source(one) for one in callees), constants=constants,
            )  # fmt: skip
        return key

    def launch(self, launch: Launch) -> LaunchRecord:
        """By the addresses of its arguments; packed weights are not what these tests launch."""
        names = [name for name in launch.jit.arg_names if name not in launch.options]
        by_address = {tensor.address: tensor for tensor in launch.tensors.values()}
        arguments = [
            ArgumentRecord(name, tensor=self.tensor(by_address[value.address]))
            if hasattr(value, "address")
            else ArgumentRecord(name, value=value)
            for name, value in zip(names, launch.args, strict=True)
        ]
        facts = [
            ArgumentRecord(name, tensor=self.tensor(fact))
            if isinstance(fact, Tensor)
            else ArgumentRecord(name, value=fact)
            for name, fact in launch.facts.items()
        ]
        constants = {n: launch.options[n] for n in launch.jit.arg_names if n in launch.options}
        return LaunchRecord(
            kernel=launch.kernel, function=launch.jit.__name__, device=launch.device,
            grid=tuple(launch.options["grid"]), num_warps=launch.options["num_warps"],
            arguments=tuple(arguments), facts=tuple(facts), constants=constants,
            source=self.source(launch.jit),
        )  # fmt: skip

    def plan(self, launches: Sequence[Launch], name: str = "step") -> int:
        records = tuple(self.launch(launch) for launch in launches)
        number = len(self.plans) + 1
        self.plans.append(
            PlanRecord(id=number, name=name, device=records[0].device, launches=records)
        )
        return number

    def step(self, step: int, plan: int, inputs: Mapping[Tensor, Array]) -> None:
        values = tuple(
            Values(self.tensor(tensor), tensor.dtype.name, array.shape, array.tobytes())
            for tensor, array in inputs.items()
        )
        self.event(Stepped, step=step, plan=plan, inputs=values, requests=())

    def bundle(self, submitted: Place | None = None, **more: Any) -> Bundle:
        return Bundle(
            kind="crash", fault=FaultRecord(kind="crash", message="test"),
            device=self.plans[0].device if self.plans else "", plans=tuple(self.plans),
            tensors=tuple(record for _, record in self.tensors.values()),
            sources=tuple(self.sources.values()), events=tuple(self.events),
            progress=Reached(submitted), **more,
        )  # fmt: skip


def bundle_of_run(folder: Path, kind: str = "crash") -> Bundle:
    """What the recorder of a process has written so far, as a bundle."""
    run, trace = read_run(folder), read_trace(folder)
    return Bundle(
        kind=kind, fault=FaultRecord(kind=kind, message="test"), progress=run.progress,
        device=run.devices[0].name if run.devices else "", tensors=run.tensors, plans=run.plans,
        sources=run.sources, contracts=run.contracts, events=run.events, checks=run.checks,
        statistics=trace.statistics, snapshots=trace.snapshots,
        missing=run.missing + trace.missing,
    )  # fmt: skip


def inputs_of(*tensors: Tensor) -> dict[Tensor, Array]:
    """Tensors with what they hold now, as the inputs of a step."""
    return {tensor: copies.to_host(tensor) for tensor in tensors}
