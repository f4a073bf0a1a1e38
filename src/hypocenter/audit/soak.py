"""Memory over many requests: what is allocated, how much at most, and whether any of it stays."""

from __future__ import annotations

import gc
import mmap
import resource
import time
from collections.abc import Sequence
from pathlib import Path

from hypocenter.audit.executed import Stretch
from hypocenter.audit.ways import Ways
from hypocenter.base.tensor import DType
from hypocenter.base.wording import bytes_text
from hypocenter.device import devices, memory
from hypocenter.record.events import Allocated, Freed
from hypocenter.verify.outcome import Mistake, PlantedError, Stage, verdict_of

NAME = "memory"
ASKS = "does the engine give back all memory that requests take?"
#: By so much a process may grow over the second half of a soak whose requests are all alike: pages
#: that allocators of Python and NumPy keep.
ALLOWED_GROWTH_BYTES = 8 << 20
#: Tokens of a request, and of its answer.
_ASKED, _ANSWERED = 4, 4
_PAGE_BYTES = resource.getpagesize()


def soak(ways: Ways, num_rounds: int, num_together: int) -> Stage:
    """Run rounds of requests, after one that warms up, and look at what is left of them."""
    started = time.perf_counter()
    cache = ways.llm.engine.cache
    _round(ways, num_together, 0)
    free_before, kept = cache.num_free_blocks, list[str]()
    resident = num_allocated = 0
    for number in range(num_rounds):
        if number == num_rounds // 2:  # pools of allocators have their size by now
            gc.collect()
            resident = resident_bytes()
        stretch = _round(ways, num_together, number + 1)
        kept += kept_allocations(stretch)
        num_allocated += sum(isinstance(event, Allocated) for event in stretch.events)
        del stretch  # what is read of the record is not the engine's
    gc.collect()
    growth = resident_bytes() - resident
    lost = free_before - cache.num_free_blocks
    mistakes = leaks(kept, lost, growth)
    planted = _plant(ways, lost)
    return Stage(
        name=NAME,
        asks=ASKS,
        verdict=verdict_of(mistakes, planted, num_rounds),
        things="rounds of requests",
        num_covered=num_rounds,
        num_all=num_rounds,
        num_checks=3 * num_rounds,
        canary=planted,
        findings=tuple(mistakes),
        details={
            "requests": num_rounds * num_together,
            "allocations": num_allocated,
            "growth_bytes": growth,
            "allowed_growth_bytes": ALLOWED_GROWTH_BYTES,
            "peak_host_bytes": peak_bytes(),
            "device_room": _room_text(ways.runner.config.device),
        },
        seconds=time.perf_counter() - started,
    )


def leaks(kept: Sequence[str], num_lost_blocks: int, growth_bytes: int) -> list[Mistake]:
    """What is said of memory that requests have left behind."""
    found = [Mistake(f"{name} was allocated while requests ran, and never freed") for name in kept]
    if num_lost_blocks:
        found.append(Mistake(f"{num_lost_blocks} blocks of the KV cache were not given back"))
    if growth_bytes > ALLOWED_GROWTH_BYTES:
        limit = bytes_text(ALLOWED_GROWTH_BYTES)
        what = f"the process grew by {bytes_text(growth_bytes)}, and {limit} is allowed"
        found.append(Mistake(what))
    return found


def kept_allocations(stretch: Stretch) -> list[str]:
    """Allocations of a stretch that it did not free."""
    freed = {event.allocation for event in stretch.events if isinstance(event, Freed)}
    return [
        f"{e.allocation.name} ({e.allocation.owner}, {bytes_text(e.allocation.num_bytes)})"
        for e in stretch.events
        if isinstance(e, Allocated) and e.allocation.id not in freed
    ]


def _round(ways: Ways, num_together: int, seed: int) -> Stretch:
    requests = [
        ways.answering(
            ways.ids(_ASKED, 100 * seed + number), _ANSWERED, temperature=0.8, seed=number
        )
        if ways.writes
        else ways.reading(ways.ids(_ASKED, 100 * seed + number))
        for number in range(num_together)
    ]
    return ways.quietly(requests)


def _plant(ways: Ways, lost: int) -> PlantedError:
    """A tensor that nobody frees, a block that is not given back, and growth of twice what is
    allowed, which is taken for a moment."""
    device, mark = ways.runner.config.device, ways.record.mark()
    tensor = memory.allocate("planted", "audit", DType.I32, (1024,), device=device)
    seen = int(bool(leaks(kept_allocations(ways.record.since(mark)), 0, 0)))
    if device != "cpu":
        memory.free(tensor)
    seen += bool(leaks((), lost + 1, 0))
    before = resident_bytes()
    # An allocator could give memory that it has kept.
    with mmap.mmap(-1, 2 * ALLOWED_GROWTH_BYTES) as held:
        for at in range(0, len(held), _PAGE_BYTES):
            held[at] = 1
        seen += bool(leaks((), 0, resident_bytes() - before))
    planted = "a tensor and a block that are kept, and growth of twice the threshold"
    return PlantedError(planted, 3, seen)


def resident_bytes() -> int:
    """Memory of this process that is there now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def peak_bytes() -> int:
    """The most that it had at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _room_text(device: str) -> str:
    room = devices.room_of(device)
    if room is None:
        return "the host's memory"
    return f"{bytes_text(room.available_bytes)} of {bytes_text(room.limit_bytes)} left"
