"""Builds bundles by hand: the records that a run would have left, with one thing wrong or nothing.

`Run` is a recorder for a run that never was; `decoder` a plan of real kernels over its tensors.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np

from hypocenter.contracts.registry import contract_of
from hypocenter.device.limits import named_gpu
from hypocenter.record.bundle import Bundle
from hypocenter.record.catalogue import sources_of
from hypocenter.record.events import (
    Allocated,
    AllocationRecord,
    AnyEvent,
    ArgumentRecord,
    Copied,
    Declaration,
    Freed,
    LaunchRecord,
    Place,
    PlanRecord,
    Reached,
    RequestRecord,
    SourceRecord,
    Stepped,
    TensorRecord,
    Values,
)
from hypocenter.record.fault_record import FaultRecord
from hypocenter.record.run_records import ModelRecord

BASE = 1 << 60
DEVICE = "sim:mi300x"
_WIDTH = {"F32": 4, "I32": 4, "F16": 2, "I16": 2, "I64": 8, "I8": 1, "U8": 1}
_NAMES = {"int32": "I32", "int16": "I16", "int64": "I64", "float32": "F32", "uint8": "U8"}
BLOCK, HEADS, DIM, VOCAB, POSITIONS, BLOCKS, ROWS = 16, 2, 32, 512, 64, 8, 4


class Run:
    """Collects records. Tensors are known by name; every allocation lies on pages of its own."""

    def __init__(self, device: str = DEVICE) -> None:
        self.device = device
        self.seq = 0
        self.step = 0
        self.events: list[AnyEvent] = []
        self.tensors: dict[str, TensorRecord] = {}
        self.plans: list[PlanRecord] = []
        self.sources: dict[str, SourceRecord] = {}
        self.contracts: dict[str, Declaration] = {}
        self._next = BASE
        self.num_allocations = 0

    def emit(self, kind: type[Any], /, **fields: Any) -> Any:
        self.seq += 1
        event = kind(seq=self.seq, step=self.step, **fields)
        self.events.append(event)
        return event

    def tensor(
        self, name: str, dtype: str, *shape: int, owner: str = "step", num_bytes: int | None = None,
        kind: str = "device", device: str = "", strides: tuple[int, ...] | None = None,
        address: int | None = None, of: str = "", offset: int = 0,
    ) -> TensorRecord:  # fmt: skip
        """A tensor in an allocation of its own, or a view `of` another one's."""
        width = _WIDTH[dtype]
        dense = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
        strides = strides or dense
        span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if of:
            memory = self.tensors[of].allocation
            start = self.tensors[of].address
        else:
            self.num_allocations += 1
            memory = self.num_allocations
            start = self._next if address is None else address
            size = span * width if num_bytes is None else num_bytes
            self._next += -(-size // (1 << 21)) * (1 << 21) + (1 << 21)
            self.emit(Allocated, allocation=AllocationRecord(
                id=memory, kind=kind, device=device or self.device, address=start, num_bytes=size,
                name=name, owner=owner, site=f"decoder.py:{10 * memory}",
            ))  # fmt: skip
        record = TensorRecord(
            id=len(self.tensors) + 1, name=name, owner=owner, dtype=dtype, shape=shape,
            strides=strides, offset=offset, allocation=memory, address=start + offset * width,
            extent_bytes=span * width,
        )  # fmt: skip
        self.tensors[name] = record
        return record

    def source(self, function: Any) -> str:
        """Notes the text of a kernel: a Triton function, or what begins at line 1 of a file."""
        if isinstance(function, str):
            name = function.split("def ")[1].split("(")[0]
            record = SourceRecord(
                id=_digest(function), function=name, file=f"{name}.py", first_line=1, text=function
            )
        else:
            record, *callees = sources_of(function)
            self.sources |= {one.id: one for one in callees}
        self.sources[record.id] = record
        return record.id

    def launch(
        self, kernel: str, facts: dict[str, Any], arguments: dict[str, Any] | None = None, *,
        source: Any = None, grid: tuple[int, ...] = (ROWS, HEADS), num_warps: int = 4, **more: Any,
    ) -> LaunchRecord:  # fmt: skip
        """A launch; tensors are given by name, in facts and arguments (`x_ptr` for x if None)."""
        if arguments is None:
            arguments = {f"{k}_ptr" if v in self.tensors else k: v for k, v in facts.items()}
        contract = contract_of(kernel, list(facts))
        if contract is not None:
            self.contracts[kernel] = contract.declaration
        return LaunchRecord(
            kernel=kernel, function=f"{kernel}_kernel", device=self.device, grid=grid,
            num_warps=num_warps,
            facts=tuple(map(self._argument, facts.items())),
            arguments=tuple(map(self._argument, arguments.items())),
            source=self.source(source) if source else "", **more,
        )  # fmt: skip

    def _argument(self, pair: tuple[str, Any]) -> ArgumentRecord:
        name, value = pair
        if isinstance(value, str) and value in self.tensors:
            return ArgumentRecord(name, self.tensors[value].id)
        return ArgumentRecord(name, None, value)

    def plan(self, *launches: LaunchRecord) -> int:
        number = len(self.plans) + 1
        self.plans.append(PlanRecord(id=number, name=f"plan {number}", device=self.device,
                                     launches=launches))  # fmt: skip
        return number

    def run(
        self, plan: int, inputs: dict[str, Any], requests: tuple[RequestRecord, ...] = (),
        graph: int = 0,
    ) -> Stepped:  # fmt: skip
        self.step += 1
        values = []
        for name, given in inputs.items():
            array = np.asarray(given)
            if array.dtype == np.int64 and self.tensors[name].dtype != "I64":
                array = array.astype(np.int32)
            values.append(Values(self.tensors[name].id, _NAMES[array.dtype.name], array.shape,
                                 array.tobytes()))  # fmt: skip
        stepped: Stepped = self.emit(
            Stepped, plan=plan, graph=graph, inputs=tuple(values), requests=requests
        )
        return stepped

    def free(self, name: str, site: str = "cache.py:99") -> None:
        self.emit(Freed, allocation=self.tensors[name].allocation, site=site)

    def copy_out(self, name: str) -> None:
        tensor = self.tensors[name]
        self.emit(Copied, direction="out", tensor=tensor.id, address=tensor.address,
                  num_bytes=tensor.extent_bytes)  # fmt: skip

    def bundle(self, fault: FaultRecord | None = None, **fields: Any) -> Bundle:
        """All of it; the fault is a crash unless said otherwise, the last plan wholly submitted."""
        fault = fault or FaultRecord(kind="none", message="")
        if "progress" not in fields and self.step and self.plans:
            last = next(e for e in reversed(self.events) if isinstance(e, Stepped))
            plan = self.plans[last.plan - 1]
            fields["progress"] = Reached(Place(last.step, last.plan, len(plan.launches) - 1))
        limits = msgspec.to_builtins(named_gpu(self.device.removeprefix("sim:")))
        kind = {"none": "suspect", "differs": "suspect", "nonfinite": "suspect"}
        return Bundle(
            kind=kind.get(fault.kind, fault.kind), device=self.device, limits=limits, fault=fault,
            tensors=tuple(self.tensors.values()), plans=tuple(self.plans),
            sources=tuple(self.sources.values()), contracts=self.contracts,
            events=tuple(self.events), **fields,
        )  # fmt: skip


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def crash(address: int | None = None, call: str = "copy_out") -> FaultRecord:
    """The end of a process on an AMD GPU: the page of the fault in the driver's own line."""
    page = None if address is None else address // 4096 * 4096
    return FaultRecord(
        kind="crash", call=call, signal=6, address=page, address_bytes=4096,
        message="Memory access fault by GPU node-1 on address "
        f"{page or 0:#x}. Reason: Page not present or supervisor privilege.",
    )  # fmt: skip


def tensors_of_decoder(run: Run, **other: dict[str, Any]) -> None:
    """The tensors of a small decoder; `other` has fields of `Run.tensor` by tensor name."""
    width = HEADS * DIM
    for name, dtype, *shape in (
        ("table", "F32", VOCAB, width), ("token_ids", "I32", ROWS), ("positions", "I32", ROWS),
        ("slots", "I32", ROWS), ("sequence_rows", "I32", ROWS), ("counts", "I32", 2),
        ("block_tables", "I32", 2, BLOCKS), ("x", "F32", ROWS, width), ("q", "F32", ROWS, width),
        ("k", "F32", ROWS, width), ("v", "F32", ROWS, width), ("cos", "F32", POSITIONS, DIM // 2),
        ("sin", "F32", POSITIONS, DIM // 2), ("k_cache", "F32", BLOCKS, HEADS, DIM, BLOCK),
        ("v_cache", "F32", BLOCKS, HEADS, BLOCK, DIM), ("out", "F32", ROWS, width),
    ):  # fmt: skip
        fields = dict(other.get(name, {}))
        run.tensor(name, fields.pop("dtype", dtype), *fields.pop("shape", shape), **fields)


def decoder(run: Run, *, x_stride: int = HEADS * DIM, wide: bool = False) -> int:
    """A plan of four real kernels; returns its id."""
    from hypocenter.kernels.attention.kv_write_gpu import kv_write_kernel
    from hypocenter.kernels.attention.rope_gpu import rope_kernel

    half = DIM // 2
    rope = {"x": "q", "positions": "positions", "cos": "cos", "sin": "sin", "counts": "counts",
            "num_heads": HEADS, "head_dim": DIM}  # fmt: skip
    return run.plan(
        run.launch("lookup", {"table": "table", "out": "x", "token_ids": "token_ids",
                              "counts": "counts"}),
        run.launch(
            "rope", rope,
            {"x_ptr": "q", "counts_ptr": "counts", "positions_ptr": "positions", "cos_ptr": "cos",
             "sin_ptr": "sin", "head_dim": DIM, "half": half, "x_stride": x_stride},
            source=rope_kernel,
            constants={"NEIGHBOURS": True, "OVERLAPS": False, "WIDE": False, "BLOCK": half},
        ),
        run.launch(
            "kv_write",
            {"k_cache": "k_cache", "v_cache": "v_cache", "k": "k", "v": "v", "slots": "slots",
             "counts": "counts"},
            {"k_ptr": "k", "v_ptr": "v", "counts_ptr": "counts", "slots_ptr": "slots",
             "k_cache_ptr": "k_cache", "v_cache_ptr": "v_cache", "num_heads": HEADS,
             "head_dim": DIM, "block_size": BLOCK, "value_pitch": DIM, "k_stride": HEADS * DIM,
             "v_stride": HEADS * DIM},
            source=kv_write_kernel, constants={"OVERLAPS": False, "WIDE": wide, "BLOCK": DIM},
        ),
        run.launch(
            "attention",
            {"k_cache": "k_cache", "v_cache": "v_cache", "q": "q", "out": "out",
             "block_tables": "block_tables", "sequence_rows": "sequence_rows",
             "positions": "positions", "counts": "counts", "num_heads": HEADS, "scale": 0.2,
             "window": 0, "softcap": 0.0, "sinks": None, "value_dim": DIM},
        ),
    )  # fmt: skip


def inputs(**other: Any) -> dict[str, Any]:
    """What the host writes for a prompt of three tokens of request 7, whose block is number 2."""
    tables = np.full((2, BLOCKS), -1, np.int32)
    tables[0, 0] = 2
    return {
        "token_ids": [5, 6, 7], "positions": [0, 1, 2], "slots": [32, 33, 34],
        "sequence_rows": [0, 0, 0], "block_tables": tables, "counts": [3, 1], **other,
    }  # fmt: skip


REQUEST = RequestRecord(id=7, row=0, first_position=0, num_tokens=3, blocks=(2,))


def background() -> Bundle:
    """The case of the background documents: positions of 2 bytes, and a fault at a copy."""
    run = Run()
    tensors_of_decoder(run, positions={"dtype": "I16"})
    step(run, decoder(run), positions=np.array([0, 1, 2], np.int16))
    run.copy_out("out")
    return run.bundle(
        crash(run.tensors["cos"].address + 0x10000 * 2 * DIM),
        command=("/usr/bin/python3", "-m", "hypocenter", "run", "/data/model.gguf", "-p",
                 "<16 characters>"),
        started="2026-11-20T03:12:45+00:00", python="3.11.7",
        platform="Linux-6.8.0-x86_64-with-glibc2.39", driver="amdgpu 6.7.0",
        packages={"hypocenter": "0.1.0", "numpy": "2.4.6", "triton": "3.9.0"},
        model=ModelRecord(name="model.gguf", architecture="llama", quantisation="Q8_0"),
        environment={"HIP_VISIBLE_DEVICES": "1"},
    )  # fmt: skip


def step(run: Run, plan: int, graph: int = 0, **other: Any) -> Stepped:
    return run.run(plan, inputs(**other), (REQUEST,), graph)
