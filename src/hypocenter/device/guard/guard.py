"""Guarded variants of Triton kernels: accesses outside a tensor are masked off and reported.

A variant is made from the kernel's source (`derive.py`) and is an ordinary kernel again. What
has no guarded form is refused (Unguardable). Launching is the business of `launch.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypocenter.base.errors import HypoError, LaunchRejected, UsageError
from hypocenter.base.refusals import Refused
from hypocenter.base.tensor import span_of
from hypocenter.device.guard.derive import OURS, SLOTS, Derivation
from hypocenter.device.guard.rows import rows_of
from hypocenter.device.guard.source import is_jit
from hypocenter.record.guard_faults import AccessFault, GuardSite

__all__ = ["GROUP_BYTES", "SLOTS", "Guarded", "extent_bytes", "guard"]

#: Lanes whose elements lie in one aligned group of so many bytes share a verdict: the widest load.
GROUP_BYTES = 16


# The format is that of ops_gpu.py.
_OFFSET_BITS = 36
_PROGRAM_BITS = 26
_NULL_BIT = 1 << 62
_FAULT_BIT = 1 << 63


@dataclass(frozen=True, eq=False)
class Guarded:
    """A guarded kernel. Launch `fn` with the kernel's own arguments, `extents(…)` and the slots.

    The slots (keyword `guard__slots`) are `num_slots` int64 words that were zero before the launch.
    """

    name: str
    fn: Any
    pointers: tuple[str, ...]
    with_rows: tuple[str, ...]
    sites: tuple[GuardSite, ...]
    num_slots: int

    @property
    def extra_types(self) -> dict[str, str]:
        """Triton's types of the parameters that `fn` has on top, for compiling without a launch."""
        ours = [f"{OURS}{p}_bytes" for p in self.pointers]
        ours += [f"{OURS}{p}_rows" for p in self.with_rows]
        return {**dict.fromkeys(ours, "i64"), SLOTS: "*i64"}

    def extents(self, arguments: Mapping[str, Any]) -> dict[str, int]:
        """Bytes that each pointer argument may touch, and rows, as keyword arguments of `fn`.

        From shape and strides of the views (torch or numpy); None has no bytes. Raises
        LaunchRejected for anything else and for negative strides.
        """
        found = {
            f"{OURS}{p}_bytes": extent_bytes(arguments[p], self.name, p) for p in self.pointers
        }
        for p in self.with_rows:
            rows = rows_of(arguments[p])
            assert rows is not None, (
                f"{p} of {self.name} has no rows, and this form divides by them"
            )
            found[f"{OURS}{p}_rows"] = rows.word
        return found

    def decode(self, slots: Any, grid: Sequence[int]) -> list[AccessFault]:
        """The faults in one launch's slots, which lie on the host; see `decode_slots`."""
        return decode_slots(self.name, self.sites, slots, grid)


def extent_bytes(array: Any, kernel: str = "kernel", parameter: str = "argument") -> int:
    """Bytes from the first element of a view to the end of its last one; gaps count as inside."""
    if array is None:
        return 0
    if hasattr(array, "element_size"):  # torch
        if array.is_contiguous():
            return int(array.nbytes)
        strides, element_bytes = array.stride(), array.element_size()
    elif hasattr(array, "strides") and hasattr(array, "itemsize"):  # numpy: strides in bytes
        if array.flags.c_contiguous:
            return int(array.nbytes)
        strides, element_bytes = [s // array.itemsize for s in array.strides], array.itemsize
    else:
        unknown = Refused(
            argument=parameter,
            what=f"is a {type(array).__name__}, whose extent is not known",
            way_out="guarded launches take tensors and None",
        )
        raise LaunchRejected(kernel, unknown)
    if min(strides, default=0) < 0:
        what = f"has negative strides {tuple(strides)}"
        raise LaunchRejected(kernel, Refused(argument=parameter, what=what, way_out="copy it"))
    return int(span_of(array.shape, strides) * element_bytes)


def guard(
    jit_function: Any,
    pointers: Iterable[str],
    *,
    group_bytes: int = GROUP_BYTES,
    with_rows: Iterable[str] = (),
) -> Guarded:
    """Derive the guarded variant of a @triton.jit kernel.

    `pointers`: the parameters that get tensors, those too that may be None. `with_rows`: those of
    them that get views whose rows are known (`rows_of`). `group_bytes`: see
    `guard.ops_gpu._allowed_lanes`; 0 makes every load scalar. Raises Unguardable for a construct
    without guarded form, UsageError when `jit_function` or `pointers` is not what it should be.
    """
    if not is_jit(jit_function):
        raise UsageError(
            f"{jit_function!r} is no @triton.jit function; of an autotuned kernel give its .fn"
        )
    wanted = set(pointers)
    known = inspect.signature(jit_function.fn).parameters
    if missing := wanted - known.keys():
        raise UsageError(
            f"{jit_function.fn.__name__} has no parameter {', '.join(sorted(missing))}; "
            f"it has {', '.join(known)}"
        )
    rows = frozenset(with_rows)
    derivation = Derivation(tuple(p for p in known if p in wanted), group_bytes, rows)
    fn = derivation.kernel(jit_function)
    return Guarded(
        name=jit_function.fn.__name__,
        fn=fn,
        pointers=derivation.pointers,
        with_rows=tuple(p for p in derivation.pointers if p in rows),
        sites=tuple(derivation.sites),
        # Even, so that the slots of launches that lie side by side are aligned alike.
        num_slots=derivation.num_slots + derivation.num_slots % 2,
    )


def decode_slots(
    kernel: str, sites: Sequence[GuardSite], words: Any, grid: Sequence[int]
) -> list[AccessFault]:
    """The faults in the words of one launch, in the order of the sites.

    `words`: one-dimensional int64 on the host (numpy, torch on the CPU, or a list). Raises
    HypoError for a word that no guarded kernel writes: the slots were overwritten.
    """
    values: list[int] = words if isinstance(words, list) else words.tolist()
    if not any(values):
        return []
    faults = []
    for site in sites:
        for i, parameter in enumerate(site.parameters):
            if word := values[site.slot + i] & (2**64 - 1):
                faults.append(_decode(kernel, site, parameter, word, grid))
    return faults


def _decode(
    kernel: str, site: GuardSite, parameter: str, word: int, grid: Sequence[int]
) -> AccessFault:
    if not word & _FAULT_BIT:
        raise HypoError(
            f"{kernel}: slot {site.slot} of a guarded launch holds {word:#x}, which no guard "
            "writes; something else writes to the slots, or they were not zero before the launch"
        )
    offset = word & ((1 << _OFFSET_BITS) - 1)
    offset -= (offset >> (_OFFSET_BITS - 1)) << _OFFSET_BITS
    number = word >> _OFFSET_BITS & ((1 << _PROGRAM_BITS) - 1)
    x, y, z = (*grid, 1, 1)[:3]
    exact = x * y * z <= 1 << _PROGRAM_BITS
    program = (number % x, number // x % y, number // (x * y)) if exact else None
    return AccessFault(
        kernel=kernel,
        site=site,
        parameter=parameter,
        null=bool(word & _NULL_BIT),
        byte_offset=offset,
        program=program,
    )


def describe(fault: AccessFault) -> str:
    """One sentence and the call chain, innermost first, a line each."""
    site = fault.site
    if fault.null:
        what = f"{fault.parameter}, which is null or empty, at byte {fault.byte_offset}"
    else:
        further = " or further" if fault.is_far else ""
        what = f"byte {fault.byte_offset}{further} of {fault.parameter}, outside its tensor"
    where = f"program {fault.program}" if fault.program else "a program (the grid is too large)"
    lines = [f"{fault.kernel}: {site.operation} of {what}, in {where}: {site.expression}"]
    lines += [f"  {call.file}:{call.line} in {call.function}" for call in site.calls]
    return "\n".join(lines)
