"""The sum over two GPUs that write into each other's memory: a launch instead of a library's call.

It takes a fraction of NCCL's time for the few rows of a decode. Both orders of two summands give
the same bits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Apart, Arg, Rule
from hypocenter.device import copies, memory
from hypocenter.device.group import Group
from hypocenter.device.launch import Launch, prepare_gpu, run
from hypocenter.device.peers import Lane, LaneKind, StopWord, open_lanes, stop_word

_X = Arg("x", (DType.F32,), "num_tokens, width", "both")
_TURNS = Arg("turns", (DType.I32,), "num_programs", "both")
_STOP = Arg("stop", (DType.I32,), "1")
_FITS = Rule("num_tokens * width <= side_size", "must fit into a side of the lane")
_HAVE_TURNS = "all programs must have a turn"
#: Values of a program. A program's part of a lane is the same in all launches, so these are, too.
_PACKETS_OF_PROGRAM, _CHUNK = 512, 4096
BY_PACKETS = Contract(
    "sum_by_packets",
    *(_X, _TURNS, _STOP, _FITS),
    Rule(f"num_tokens * width <= num_programs * {_PACKETS_OF_PROGRAM}", _HAVE_TURNS),
    Arg("here", (DType.I64,), "2, side_size", alignment_bytes=8),
    Arg("there", (DType.I64,), "2, side_size", "write", alignment_bytes=8),
    Apart("there", "here"),
)
BY_CHUNKS = Contract(
    "sum_by_chunks",
    *(_X, _TURNS, _STOP, _FITS),
    Rule(f"num_tokens * width <= num_programs * {_CHUNK}", _HAVE_TURNS),
    Arg("here", (DType.F32,), "2, side_size"),
    Arg("there", (DType.F32,), "2, side_size", "write"),
    Arg("flags_here", (DType.I32,), "2, num_programs"),
    Arg("flags_there", (DType.I32,), "2, num_programs", "write"),
    Apart("there", "here"),
)
#: Values that a side of a lane holds; above the first, half as many bytes take less time.
_MOST_PACKETS, _MOST_VALUES = 1 << 17, 1 << 23
_NUM_CHUNKS = _MOST_VALUES // _CHUNK
#: What lies on each of the two GPUs.
LANES = {
    "packets": LaneKind(DType.I64, (2, _MOST_PACKETS)),
    "values": LaneKind(DType.F32, (2, _MOST_VALUES)),
    "flags": LaneKind(DType.I32, (2, _NUM_CHUNKS)),
}
#: Looks at memory between those at the host's word, some 40 ms. After 256 the GPUs held each other
#: up by turns: all programs read that word one after the other, while the other GPU waited.
_LOOKS = 1 << 16
#: How long the first sums, with which both make sure that they reach each other, may take with all
#: that is compiled for them.
_DEADLINE_SECONDS = 30.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PeerSum:
    """What launches of both kernels share, on one of the two GPUs."""

    device: str
    packets: Lane
    values: Lane
    flags: Lane
    packet_turns: Tensor
    value_turns: Tensor
    stop: StopWord

    @classmethod
    def on(cls, device: str, lanes: Mapping[str, Lane], stop: StopWord) -> PeerSum:
        """Makes one with `LANES` between the two, before the first turn."""
        packets = _turns(device, _MOST_PACKETS // _PACKETS_OF_PROGRAM)
        return cls(device, **lanes, packet_turns=packets, value_turns=_turns(device), stop=stop)

    def launch(self, x: Tensor) -> Launch | None:
        """The launch of x += the other GPU's x, f32 [num_tokens, width]; None: x is too large."""
        from hypocenter.kernels.collective import peer_sum_gpu

        if x.num_elements <= _MOST_PACKETS:
            arguments = self._arguments(x, self.packets, self.packet_turns)
            sizes: tuple[int, ...] = (x.num_elements, self.packets.here.shape[1])
            kernel, contract = peer_sum_gpu.sum_by_packets_kernel, BY_PACKETS
            options = _options(x.num_elements, _PACKETS_OF_PROGRAM, num_warps=4)
        elif x.num_elements <= _MOST_VALUES:
            flags = self.flags
            arguments = self._arguments(x, self.values, self.value_turns)
            arguments |= {"flags_here": flags.here, "flags_there": flags.there}
            sizes = (x.num_elements, self.values.here.shape[1], flags.here.shape[1])
            kernel, contract = peer_sum_gpu.sum_by_chunks_kernel, BY_CHUNKS
            options = _options(x.num_elements, _CHUNK, num_warps=8)
        else:
            return None
        return prepare_gpu(
            kernel, (*arguments.values(), *sizes), options, contract, arguments, self.device
        )

    def _arguments(self, x: Tensor, lane: Lane, turns: Tensor) -> dict[str, Tensor]:
        """The arguments, in the order of both kernels' parameters."""
        here, there = lane.here, lane.there
        return {"x": x, "here": here, "there": there, "turns": turns, "stop": self.stop.tensor}

    def let_go(self) -> None:
        """End the waits of what is launched and will be: its sums are of no use then."""
        self.stop.set()


def open_peer_sum(group: Group, device: str) -> None:
    """Give `group` sums by launches, where it is of two NVIDIA GPUs that reach each other's memory.

    They add something first, and stay with the library where that goes wrong. Both ranks make this
    call.
    """
    # Another GPU's writes are seen by a running kernel in memory of a kind that AMD's has to ask
    # for, and none was here to try it.
    if group.num_ranks != 2 or not device.startswith("cuda"):
        return
    lanes = open_lanes(group, device, LANES)
    stop = stop_word(device)
    if not group.agrees(stop is not None) or lanes is None or stop is None:
        return
    found = PeerSum.on(device, lanes, stop)
    group.add_by(found)  # so a rank that is lost ends its waits
    if group.agrees(_adds_up(found, group.rank)):
        return
    group.add_by(None)
    log.warning("%s: what GPUs write to each other does not arrive; NCCL carries all", device)


def _adds_up(found: PeerSum, rank: int) -> bool:
    """Whether sums of a few rows and of many are right, twice on each side."""
    given = np.arange(_MOST_PACKETS + 4096, dtype=np.float32)
    waited = threading.Timer(_DEADLINE_SECONDS, found.let_go)
    waited.daemon = True
    waited.start()
    is_right = True
    try:
        for num_values in (4096 + 256, len(given)):
            x = memory.allocate("x", "peers", DType.F32, (1, num_values), device=found.device)
            for turn in range(4):
                copies.to_device(x, given[None, :num_values] + np.float32(turn + rank))
                launch = found.launch(x)
                assert launch is not None, "both sizes are below the most"
                run([launch])
                expected = 2 * given[None, :num_values] + np.float32(2 * turn + 1)
                is_right &= bool(np.array_equal(copies.to_host(x), expected))
            memory.free(x)
    finally:
        waited.cancel()
        waited.join()
    return is_right and not found.stop.is_set


def _turns(device: str, num_programs: int = _NUM_CHUNKS) -> Tensor:
    return memory.allocate("turns", "peers", DType.I32, (num_programs,), device=device)


def _options(num_values: int, block: int, num_warps: int) -> dict[str, Any]:
    grid = (-(-num_values // block),)
    return {"grid": grid, "num_warps": num_warps, "BLOCK": block, "LOOKS": _LOOKS}
