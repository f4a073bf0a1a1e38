"""What CPU kernels are written and compiled with; `code_cache.py` keeps their machine code.

Knows nothing of what a kernel computes; the vector words that kernels are written in are in
`vector.py`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import threading
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from importlib import metadata
from types import FunctionType
from typing import Any

import numba
from llvmlite import binding, ir
from numba import prange, types
from numba.core import cgutils
from numba.core.imputils import RefType, iternext_impl, lower_builtin
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_model

from hypocenter.config import Environment
from hypocenter.device import code_cache, instructions

# By default libgomp's idle threads spin for milliseconds, and on cores that others use too they
# keep the very thread they wait for from running: measured 3.6 tokens/s against 20.6 with this.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _limit_instructions(name: str) -> str:
    """Have numba compile for this machine less what HYPO_INSTRUCTIONS leaves out.

    Returns the path that is asked for, if it is one of this machine's.
    """
    if not name or platform.machine() not in ("x86_64", "AMD64"):
        return ""
    allowed = instructions.limited(name, binding.get_host_cpu_features())
    numba.config.CPU_NAME = binding.get_host_cpu_name()
    numba.config.CPU_FEATURES = ",".join(
        f"{'+' if has else '-'}{feature}" for feature, has in sorted(allowed.items())
    )
    return name


_asked_for = _limit_instructions(Environment.read().instructions)


def _load_tbb() -> bool:
    """Let numba find the TBB of this environment, which the system's loader does not know of.

    Its threads take work as they come, where OpenMP waits for each of them to do its share: on
    two cores of which another process wants one, long prompts are 13 % faster.
    """
    try:
        files = metadata.files("tbb") or []
        found = next(file for file in files if file.name in ("libtbb.so.12", "libtbb.12.dylib"))
        ctypes.CDLL(str(found.locate()), ctypes.RTLD_GLOBAL)
    except (metadata.PackageNotFoundError, StopIteration, OSError):
        return False
    return True


_has_tbb = _load_tbb()


def thread_pool() -> str:
    """The library whose threads run kernels: tbb where it is installed, or what was asked for."""
    asked: str = numba.config.THREADING_LAYER
    if asked != "default":
        return asked
    return "tbb" if _has_tbb else "omp or workqueue"


#: What others have of numba from here.
__all__ = ["binding", "cgutils", "ir", "models", "prange", "register_model", "types"]

#: Where threads that share the items of a kernel find what is open; `pool.py` says what it holds.
TICKET_SYMBOL = "hypo_ticket"
#: Bit of a ticket that says that there are no more items.
CLOSED = 1 << 63
#: Words from the ticket to the number of regions, and to how far the first of them is; words from
#: one region to the next.
NUM_REGIONS_OFFSET, REGIONS_OFFSET, REGION_WORDS = 48, 56, 8


class _Items(types.SimpleIteratorType):  # type: ignore[misc]
    """What is left of 0 .. count - 1, shared with other threads."""


_items = _Items("items", types.intp)


@register_model(_Items)
class _ItemsModel(models.StructModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: _Items) -> None:
        place = types.CPointer(types.intp)
        members = [
            ("count", types.intp), ("tag", types.intp), ("num_regions", types.intp),
            ("region", place), ("num_left", place),
        ]  # fmt: skip
        super().__init__(manager, kind, members)


def _ticket(builder: Any) -> Any:
    known = builder.module.globals
    if TICKET_SYMBOL in known:
        return known[TICKET_SYMBOL]
    return cgutils.add_global_variable(builder.module, ir.IntType(64), TICKET_SYMBOL)


@intrinsic  # type: ignore[untyped-decorator]
def items(typing: Any, count: Any) -> Any:
    """The items of a `shared` kernel that this thread takes: of its own region in rising order,
    then what is left of the others.

    Whoever calls the kernel leaves the thread's number where a result would go.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made, word = cgutils.create_struct_proxy(_items)(context, builder), ir.IntType(64)
        ticket = _ticket(builder)
        made.count, made.tag = args[0], builder.load_atomic(ticket, "seq_cst", 8)
        number = builder.gep(ticket, [ir.Constant(word, NUM_REGIONS_OFFSET)])
        made.num_regions = builder.load(number)
        thread = builder.load(builder.bitcast(builder.function.args[0], word.as_pointer()))
        made.region = cgutils.alloca_once_value(builder, thread)
        is_open = builder.icmp_signed(">=", made.tag, ir.Constant(word, 0))
        num_left = builder.select(is_open, made.num_regions, ir.Constant(word, 0))
        made.num_left = cgutils.alloca_once_value(builder, num_left)
        return made._getvalue()

    return _items(types.intp), build


@lower_builtin("iternext", _Items)  # type: ignore[untyped-decorator]
@iternext_impl(RefType.UNTRACKED)  # type: ignore[untyped-decorator]
def _next_item(context: Any, builder: Any, signature: Any, args: Any, result: Any) -> None:
    """The next item of the region that this thread is at, or of the next that has one left.

    Neighbours lie one behind the other in memory, which is read faster in one stream. A word for
    each region, which begins with the tag of the launch, or it is an older one's, counts the items
    that are taken.
    """
    mine = cgutils.create_struct_proxy(_items)(context, builder, value=args[0])
    word = ir.IntType(64)
    zero, one, low = (ir.Constant(word, value) for value in (0, 1, 0xFFFFFFFF))
    regions = builder.gep(_ticket(builder), [ir.Constant(word, REGIONS_OFFSET)])
    more, look, take, leave, done = (
        builder.append_basic_block(name) for name in ("more", "look", "take", "leave", "done")
    )
    builder.branch(more)
    builder.position_at_end(more)
    num_left = builder.load(mine.num_left)
    builder.cbranch(builder.icmp_signed(">", num_left, zero), look, done)
    builder.position_at_end(look)
    region = builder.load(mine.region)
    next_region = builder.add(region, one)
    first, end = (
        builder.udiv(builder.mul(mine.count, at), mine.num_regions) for at in (region, next_region)
    )
    place = builder.gep(regions, [builder.mul(region, ir.Constant(word, REGION_WORDS))])
    seen = builder.load_atomic(place, "seq_cst", 8)
    is_older = builder.icmp_unsigned("!=", builder.and_(seen, builder.not_(low)), mine.tag)
    known = builder.select(is_older, mine.tag, seen)
    item = builder.add(first, builder.and_(known, low))
    builder.cbranch(builder.icmp_signed("<", item, end), take, leave)
    builder.position_at_end(take)
    swapped = builder.cmpxchg(place, seen, builder.add(known, one), "seq_cst")
    builder.cbranch(builder.extract_value(swapped, 1), done, look)
    builder.position_at_end(leave)
    is_last = builder.icmp_unsigned("==", next_region, mine.num_regions)
    builder.store(builder.select(is_last, zero, next_region), mine.region)
    builder.store(builder.sub(num_left, one), mine.num_left)
    builder.branch(more)
    builder.position_at_end(done)
    found, valid = builder.phi(word), builder.phi(ir.IntType(1))
    for value, is_there, block in ((zero, False, more), (item, True, take)):
        found.add_incoming(value, block)
        valid.add_incoming(ir.Constant(ir.IntType(1), is_there), block)
    result.set_valid(valid)
    result.yield_(found)


_OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False, "fastmath": False}


class CpuKernel:
    """One kernel source compiled twice: `serial` takes all items of its `prange`, `shared`, which
    several threads run at once, those that no other has taken (`pool.py`).

    Both do an item by the same body, so their results are bitwise equal.
    """

    def __init__(self, function: Callable[..., None], **options: Any) -> None:
        self.name = function.__name__.strip("_").removesuffix("_cpu")
        self.serial = _compile_on_demand(function, "serial", **options)
        self._function, self._options = function, options

    @cached_property
    def shared(self) -> Any:
        """The same code, in which the name `prange` means something else."""
        function = self._function
        sharing = {**function.__globals__, "prange": items}
        twin = FunctionType(function.__code__, sharing, function.__name__)
        # numba names machine code by this and a number that begins anew in each process: of two
        # functions of one name that come out of the cache, one would be called for both.
        twin.__qualname__, twin.__module__ = f"{function.__qualname__}_shared", function.__module__
        return _compile_on_demand(twin, "shared", **self._options)


def cpu_kernel(function: Callable[..., None]) -> CpuKernel:
    """Make a kernel of a function whose outer loop is a `prange` over independent items.

    It allocates nothing, so numba counts no references: that would be an atomic step per array and
    call, which are many in a kernel.
    """
    return CpuKernel(function, _nrt=False)


def allocating_kernel(function: Callable[..., None]) -> CpuKernel:
    """As `cpu_kernel`, for one that makes arrays of its own."""
    return CpuKernel(function)


def _record_name(record: Any) -> tuple[str, tuple[str, ...]]:
    """What stands for a record type in the names of machine code: a hash of its fields.

    By itself numba takes a number that begins anew in each process, so code for two layouts that
    two processes have compiled could come out of the cache under one name.
    """
    return "Record", (hashlib.sha256(record.name.encode()).hexdigest()[:16],)


types.Record.mangling_args = property(_record_name)


def threads_entry(function: Callable[..., None]) -> Any:
    """Make a function whose `prange` numba's own threads share: how threads get into a step."""
    return _compile_on_demand(function, "threads", parallel=True, _nrt=False)


def inline(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that kernels call; LLVM inlines it where that pays. It allocates nothing."""
    return numba.njit(_nrt=False, **_OPTIONS)(function)  # type: ignore[no-any-return]


def always_inline(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `inline`, for a function whose vectors must stay in registers between its calls."""
    return numba.njit(_nrt=False, forceinline=True, **_OPTIONS)(function)  # type: ignore[no-any-return]


def inline_allocating(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `inline`, for a function that makes arrays or is given some by one that does."""
    return numba.njit(**_OPTIONS)(function)  # type: ignore[no-any-return]


def word(build: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that kernels call out of one that types it and emits its LLVM code."""
    return intrinsic(build)  # type: ignore[no-any-return]


def literal_word(build: Callable[..., Any]) -> Callable[..., Any]:
    """As `word`, for one that wants arguments which are written out as constants."""
    return intrinsic(prefer_literal=True)(build)  # type: ignore[no-any-return]


def literal(count: Any) -> int:
    """A count that the kernel's source states; 0 sends numba to ask again with its value."""
    return getattr(count, "literal_value", 0)


def kernel_entry(function: Any, args: Sequence[Any]) -> tuple[int, tuple[Any, ...]]:
    """Address of the machine code of a compiled kernel for these arguments, and their types.

    It takes two addresses, for a result and an exception, then each argument flattened, and
    returns 0 when all is well.
    """
    kinds = tuple(map(function.typeof_pyval, args))
    compiled = function.overloads[kinds]
    address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return int(address), kinds


_of_thread = threading.local()


def set_num_threads(num_threads: int) -> None:
    """Bound the threads of the parallel kernels that the calling thread launches."""
    if num_threads == getattr(_of_thread, "num_threads", None):
        return  # numba takes its time, before each step
    num_threads = min(num_threads, max_num_threads())
    numba.set_num_threads(num_threads)
    # Each item is some microseconds of work: a thread that comes late leaves more to the others.
    numba.set_parallel_chunksize(1)
    _of_thread.num_threads = num_threads


def num_threads() -> int:
    """Threads that kernels which the calling thread launches may use."""
    known: int | None = getattr(_of_thread, "num_threads", None)
    return int(numba.get_num_threads()) if known is None else known


def max_num_threads() -> int:
    """Threads in numba's pool: the cores of this process, or NUMBA_NUM_THREADS."""
    return int(numba.config.NUMBA_NUM_THREADS)


@cache
def cpu_features() -> frozenset[str]:
    """Names of the instruction-set features that kernels are compiled for, as LLVM spells them.

    Read from numba's code generator, so NUMBA_CPU_NAME and NUMBA_CPU_FEATURES are honoured.
    """
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return frozenset(word[1:] for word in features.split(",") if word.startswith("+"))


def cpu_name() -> str:
    """The processor that kernels are compiled for, as LLVM spells it: znver4."""
    _, name, _ = cpu_target.target_context.codegen().magic_tuple()
    return str(name)


def instruction_set() -> str:
    """By which instructions kernels multiply and add: the fastest of those they may use.

    avx512-bf16, avx512-vnni, avx512, avx-vnni, avx2, neon or plain. Sums of codes, and those of
    products of two bf16, are the same on all of them (`vdpbf16ps` was held against that on Intel's
    alone); other floats are where there is a fused step.
    """
    with_bf16 = _asked_for == "avx512-bf16" or instructions.is_fast_in_bf16(cpu_name())
    return instructions.fastest(cpu_features(), with_bf16=with_bf16)


def _compile_on_demand(function: Callable[..., Any], form: str, **options: Any) -> Any:
    dispatcher = numba.njit(**_OPTIONS, **options)(function)
    # What words emit depends on the path, which the features of a processor do not tell alone.
    code_cache.keep(dispatcher, function, f"{form}-{instruction_set()}")
    return dispatcher
