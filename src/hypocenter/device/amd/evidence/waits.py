"""Waits that machine code lacks: found by reading it, on every way through it.

Loads arrive later than the instructions behind them, unless a counter is waited for. The emulator's
memory is immediate, so no run of it shows a wait that is missing; this pass does. Told are three:

- a register is used, or written by something else, while a load into it is still under way;
- a write to LDS is still under way at a barrier behind which LDS is read;
- a load puts words straight into LDS, LDS is read behind it, and no such read has a wait for loads
  between. Where one has, a read without may be of words that were there before.

Source: "Data Dependency Resolution" of the CDNA3 manual, "S_WAITCNT" of the RDNA3 manual, the wait
counters of the RDNA4 manual, and "Memory Model" of LLVM's guide of the AMDGPU backend. What is left
out: what another kernel reads, and EXPCNT, which counts exports and LDS as an operand. Neither is
modelled: such an instruction stops the machine by its name.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hypocenter.device.amd import instruction_rows as r
from hypocenter.device.amd.decode import FAMILIES, Instruction
from hypocenter.device.amd.evidence.registers import RegisterUses, uses_of
from hypocenter.device.amd.evidence.unset import register_name
from hypocenter.device.amd.lower import Lowered

_NULL = 124


class Lack(enum.Enum):
    """What is done before a wait."""

    READ = enum.auto()
    WRITE = enum.auto()
    BARRIER = enum.auto()
    LOCAL = enum.auto()


@dataclass(frozen=True, slots=True)
class MissingWait:
    """An instruction that comes too early: `issued` is still under way, by one of `counters`.

    `register` is AMD's name of one that both have; "" at a barrier and where LDS is read.
    """

    lack: Lack
    at: Instruction
    issued: Instruction
    counters: tuple[str, ...]
    register: str = ""


@dataclass(frozen=True, slots=True)
class _Stream:
    """Of a counter what comes back in its order; `ordered` is false where nothing does."""

    counter: str
    name: str
    is_ordered: bool = True


@dataclass(frozen=True, slots=True)
class _Family:
    """Counters of an architecture: for loads and stores of memory, LDS and scalar loads.

    No more than `limits` can be under way: then the next one waits to be issued.
    """

    loads: str
    stores: str
    local: str
    scalar: str
    limits: dict[str, int]


_FAMILIES = {
    "cdna": _Family("vmcnt", "vmcnt", "lgkmcnt", "lgkmcnt", {"vmcnt": 63, "lgkmcnt": 15}),
    "rdna3": _Family(
        "vmcnt", "vscnt", "lgkmcnt", "lgkmcnt", {"vmcnt": 63, "vscnt": 63, "lgkmcnt": 63}
    ),
    "rdna4": _Family(
        "loadcnt",
        "storecnt",
        "dscnt",
        "kmcnt",
        {"loadcnt": 63, "storecnt": 63, "dscnt": 63, "kmcnt": 31},
    ),
}
#: One counter each, whose number stands in the instruction.
_SINGLE = {
    f"S_WAIT{between}_{counter.upper()}" if between else f"S_WAIT_{counter.upper()}": counter
    for between, counters in (
        ("CNT", ("vmcnt", "vscnt", "lgkmcnt")),
        ("", ("loadcnt", "storecnt", "dscnt", "kmcnt")),
    )
    for counter in counters
}


def counters_left(each: Instruction, family: str) -> dict[str, int]:
    """How many of each counter's are left at most after an instruction; empty for most."""
    number, name = each.get("simm16"), each.name
    if name == "S_WAITCNT":
        if family == "cdna":
            return {"vmcnt": number & 15 | (number >> 14 & 3) << 4, "lgkmcnt": number >> 8 & 15}
        return {"vmcnt": number >> 10 & 63, "lgkmcnt": number >> 4 & 63}
    if name == "S_WAIT_IDLE":
        return dict.fromkeys(_FAMILIES[family].limits, 0)
    if name in ("S_WAIT_LOADCNT_DSCNT", "S_WAIT_STORECNT_DSCNT"):
        first = "loadcnt" if "LOAD" in name else "storecnt"
        return {first: number >> 8 & 63, "dscnt": number & 63}
    counter = _SINGLE.get(name)
    if counter is None or each.get("sdst") not in (0, _NULL):
        return {}
    return {counter: number}


#: What is under way: instruction and stream, to how many younger ones its stream has.
_State = dict[tuple[int, _Stream], int]


class _Code:
    """A kernel's instructions, with what each reads, writes, waits for and issues."""

    def __init__(self, lowered: Lowered, arch: str, num_lanes: int) -> None:
        self.instructions = lowered.instructions
        self.family = FAMILIES[arch]
        self.counters = _FAMILIES[self.family]
        first_rows: dict[int, int] = {}
        for row, number in enumerate(lowered.instruction_of):
            first_rows.setdefault(number, row)
        self.kinds: list[int] = []
        self.uses: list[RegisterUses] = []
        self.next: list[tuple[int, ...]] = []
        self.issues: list[tuple[_Stream, ...]] = []
        self.waits = [counters_left(each, self.family) for each in self.instructions]
        self.loads_to_lds: list[int] = []
        self.writes_lds: list[bool] = []
        self.reads_lds: list[bool] = []
        for number, each in enumerate(self.instructions):
            row = first_rows[number]
            head = lowered.code[row]
            kind = int(head[r.KIND])
            self.kinds.append(kind)
            self.uses.append(uses_of(lowered.code[row : row + int(head[r.PARTS])], num_lanes))
            action, is_local = int(head[r.ACTION]), kind == r.LOCAL
            if kind == r.MEMORY and action == r.TO_LOCAL:
                self.loads_to_lds.append(number)
            self.writes_lds.append(is_local and action != r.LOAD)
            self.reads_lds.append(is_local and action != r.STORE)
            self.issues.append(self._streams_of(each, kind, action, bool(head[r.RETURNS])))
            target = int(head[r.TARGET])
            owner = lowered.instruction_of[target] if kind == r.BRANCH and target >= 0 else None
            self.next.append(self._next(number, each, kind, owner))

    def _next(
        self, number: int, each: Instruction, kind: int, target: int | None
    ) -> tuple[int, ...]:
        behind = (number + 1,) if number + 1 < len(self.instructions) else ()
        if kind == r.BRANCH:
            to = () if target is None else (target,)
            return to if each.name == "S_BRANCH" else (*behind, *to)
        if kind in (r.END, r.TRAP, r.UNKNOWN):
            return ()
        # Behind a call all has arrived: the first thing that a function does is to wait.
        if kind == r.JUMP and each.name == "S_SETPC_B64":
            return ()
        return behind

    def _streams_of(
        self, each: Instruction, kind: int, action: int, returns: bool
    ) -> tuple[_Stream, ...]:
        counters = self.counters
        if kind == r.SCALAR_LOAD:
            return (_Stream(counters.scalar, "scalar", is_ordered=False),)
        if kind == r.LOCAL or (kind == r.LANES_OP and each.format == "DS"):
            return (_Stream(counters.local, "lds"),)
        if kind == r.MEMORY:
            is_load = action in (r.LOAD, r.TO_LOCAL) or returns
            counter = counters.loads if is_load else counters.stores
            if each.format in ("FLAT", "VFLAT") and each.name.startswith("FLAT"):
                streams = _Stream(counter, "flat", False), _Stream(counters.local, "flat", False)
                return tuple(dict.fromkeys(streams))
            return (_Stream(counter, "memory"),)
        if kind == r.NOTHING and each.name.startswith(("BUFFER_", "GLOBAL_")):
            # Caches that are flushed are counted with loads, those written back with stores.
            return _Stream(counters.loads, "memory"), _Stream(counters.stores, "memory")
        return ()


def missing_waits(
    lowered: Lowered, arch: str, num_lanes: int, entries: Sequence[int] = (0,)
) -> list[MissingWait]:
    """What is used too early, in the order of the code: of each load, or write to LDS, the first.

    `entries` are the instructions at which a wave may begin.
    """
    if not lowered.instructions:
        return []
    code = _Code(lowered, arch, num_lanes)
    before: dict[int, _State] = {entry: {} for entry in entries}
    todo, queued = deque(entries), set(entries)
    while todo:
        number = todo.popleft()
        queued.discard(number)
        state = _after(code, number, before[number])
        for follower in code.next[number]:
            held = before.get(follower)
            if held is None:
                before[follower] = dict(state)
            elif not _join(held, state):
                continue
            if follower not in queued:
                queued.add(follower)
                todo.append(follower)
    found: dict[int, MissingWait] = {}
    for number in sorted(before):
        for each in _early(code, number, before[number]):
            found.setdefault(each.issued.pc, each)
    for issuer in code.loads_to_lds:
        if issuer in before and (reader := _reads_without_wait(code, issuer)) is not None:
            issued, at = code.instructions[issuer], code.instructions[reader]
            found[issued.pc] = MissingWait(Lack.LOCAL, at, issued, (code.counters.loads,))
    return sorted(found.values(), key=lambda each: each.at.pc)


def _join(held: _State, more: _State) -> bool:
    """Add what is under way on another way to the same place; whether anything is new."""
    is_new = False
    for key, younger in more.items():
        known = held.get(key)
        if known is None or younger < known:
            held[key], is_new = younger, True
    return is_new


def _after(code: _Code, number: int, before: _State) -> _State:
    """What is under way behind an instruction."""
    state = before
    if left := code.waits[number]:
        # Of a stream in order the oldest arrive first: what has `left` younger ones is there.
        state = {key: age for key, age in state.items() if age < left.get(key[1].counter, 1 << 30)}
    if code.kinds[number] == r.JUMP and code.instructions[number].name == "S_SWAPPC_B64":
        return {}
    if streams := code.issues[number]:
        limits = code.counters.limits
        aged = {}
        for (issuer, stream), age in state.items():
            age += stream.is_ordered and stream in streams
            if age < limits[stream.counter]:
                aged[issuer, stream] = age
        if code.uses[number].writes or code.writes_lds[number]:
            for stream in streams:
                aged[number, stream] = 0
        state = aged
    return state


def _early(code: _Code, number: int, state: _State) -> Iterator[MissingWait]:
    """What is too early about one instruction."""
    uses, at = code.uses[number], code.instructions[number]
    by_issuer: dict[int, list[_Stream]] = {}
    for issuer, stream in state:
        by_issuer.setdefault(issuer, []).append(stream)
    for issuer, streams in sorted(by_issuer.items()):
        issued, counters = code.instructions[issuer], tuple(each.counter for each in streams)
        arriving = code.uses[issuer].writes
        in_order = any(each.is_ordered and each in code.issues[number] for each in streams)
        if clash := arriving & uses.reads:
            yield MissingWait(Lack.READ, at, issued, counters, _name_of(clash))
        elif (clash := arriving & uses.writes) and not in_order:
            yield MissingWait(Lack.WRITE, at, issued, counters, _name_of(clash))
        elif code.writes_lds[issuer] and _is_barrier(code, number) and _reads_behind(code, number):
            yield MissingWait(Lack.BARRIER, at, issued, counters)


def _name_of(bits: int) -> str:
    return register_name((bits & -bits).bit_length() - 1)


def _is_barrier(code: _Code, number: int) -> bool:
    """Where a wave says that it is there."""
    name = code.instructions[number].name
    return name.startswith("S_BARRIER_SIGNAL") or name == "S_BARRIER"


def _reads_behind(code: _Code, number: int) -> bool:
    """Whether LDS is read on some way from an instruction on."""
    return any(code.reads_lds[each] for each in _behind(code, [number]))


def _reads_without_wait(code: _Code, issuer: int) -> int | None:
    """The first instruction that reads LDS behind a load into it, where no wait for loads stands
    before any that does."""
    counter = code.counters.loads
    limit = code.counters.limits[counter]
    early = _behind(code, [issuer], ends=lambda each: code.waits[each].get(counter, limit) < limit)
    waits = [each for each in early if code.waits[each].get(counter, limit) < limit]
    if any(code.reads_lds[each] for each in _behind(code, waits)):
        return None
    return min((each for each in early if code.reads_lds[each]), default=None)


def _behind(
    code: _Code, starts: Sequence[int], ends: Callable[[int], bool] = lambda _: False
) -> set[int]:
    """Instructions that may follow some others; what follows one that `ends` the way does not."""
    todo = list(starts)
    seen: set[int] = set()
    while todo:
        for follower in code.next[todo.pop()]:
            if follower not in seen:
                seen.add(follower)
                if not ends(follower):
                    todo.append(follower)
    return seen
