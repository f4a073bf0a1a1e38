"""The processes that hold a model together, each with a GPU, as one of them sees the others.

torch.distributed carries what they exchange: NCCL or RCCL on GPUs, gloo for simulated ones. Sums
may be launches of ours (`SumByLaunches`). They meet by a file and talk over the loopback interface,
so they are of one machine.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hypocenter.base.errors import DeviceFault, MissingPackage, UsageError
from hypocenter.settings.config import is_simulated

if TYPE_CHECKING:
    from hypocenter.base.tensor import Tensor
    from hypocenter.device.launch import Launch

#: Whoever waits longer in the library for another rank reports it; loading and compiling are within
#: it. A launch of ours waits until the other process has ended.
_DEADLINE = timedelta(minutes=10)


class SumByLaunches(Protocol):
    """A sum over all ranks that is a launch of ours, and no call of the library."""

    def launch(self, x: Tensor) -> Launch | None:
        """The launch of x = the sum of x of all ranks; None: it has none for such an x."""
        ...

    def let_go(self) -> None:
        """End the waits of its launches, which any thread may ask for."""
        ...


class Group:
    """Rank `rank` of `num_ranks`. Every rank makes the same calls in the same order.

    Calls take arrays of torch, or of NumPy where the GPU is simulated, and run in the current
    stream: on a GPU they return before it is done.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        meeting_place: str,
        device: str,
        explain: Callable[[str, Exception], Exception] | None = None,
    ) -> None:
        """Waits until all ranks have come. `meeting_place`: a file in a folder of their own.

        `explain` makes an error of ours of what the library reports of a call. Raises
        MissingPackage without torch, UsageError where it has no library for that device.
        """
        self.rank, self.num_ranks, self._device = rank, num_ranks, device
        self._explain = explain or self._fault
        #: Where there is one, as between two GPUs that reach each other's memory.
        self.peer_sum: SumByLaunches | None = None
        self._closing, self._is_closed = threading.Lock(), False
        try:
            import torch
            import torch.distributed as distributed
        except ImportError as error:
            raise MissingPackage("tensor_parallel", "torch") from error
        self._torch, self._distributed = torch, distributed
        #: It got another name in torch 2.13, which warns of the old one.
        named = "all_gather_single"
        named = named if hasattr(distributed, named) else "all_gather_into_tensor"
        self._gather: Callable[..., Any] = getattr(distributed, named)
        self._is_simulated = is_simulated(device)
        library = "gloo" if self._is_simulated else "nccl"
        if not distributed.is_available() or not getattr(distributed, f"is_{library}_available")():
            raise UsageError(f"tensor_parallel needs torch with {library}; this one has none")
        if distributed.is_initialized():
            raise UsageError("tensor_parallel: a process holds one such model at a time; close it")
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
        distributed.init_process_group(
            library,
            store=torch.distributed.FileStore(meeting_place, num_ranks),  # type: ignore[attr-defined]
            rank=rank,
            world_size=num_ranks,
            timeout=_DEADLINE,
        )

    def all_reduce(self, x: Any) -> None:
        """x = the sum of x of all ranks, in place."""
        self._do("all_reduce", self._distributed.all_reduce, self._tensor(x))

    def all_gather(self, part: Any, parts: Any) -> None:
        """parts = part of each rank, one behind the other."""
        self._do("all_gather", self._gather, self._tensor(parts), self._tensor(part))

    def broadcast(self, values: Any) -> None:
        """values = those of the first rank."""
        self._do("broadcast", self._distributed.broadcast, self._tensor(values), 0)

    def swap(self, data: bytes) -> tuple[bytes, ...]:
        """What each rank gives here, by rank, as many bytes each; it waits for all of them."""
        place = "cpu" if self._is_simulated else f"cuda:{self._device.partition(':')[2] or 0}"

        def gather() -> bytes:
            own = self._torch.frombuffer(bytearray(data), dtype=self._torch.uint8).to(place)
            gathered = own.new_empty(self.num_ranks * len(data))
            self._gather(gathered, own)
            told = bytes(gathered.cpu().numpy())
            if self._is_closed:  # then it waited for nobody
                raise RuntimeError("the group was left")
            return told

        told: bytes = self._do("all_gather", gather)
        return tuple(told[at : at + len(data)] for at in range(0, len(told), len(data)))

    def agrees(self, is_so: bool) -> bool:
        """Whether it is so for all ranks; each of them asks."""
        return all(word[0] for word in self.swap(bytes([is_so])))

    def add_by(self, sums: SumByLaunches | None) -> None:
        """Add by these launches from now on; None: by the library."""
        with self._closing:
            self.peer_sum = sums
            if sums is not None and self._is_closed:
                sums.let_go()

    def abort(self) -> None:
        """Have calls that wait for a rank end, as a rank that died never answers.

        Between simulated ones they end by themselves when a process does.
        """
        if not self._is_simulated:
            self.close()

    def close(self) -> None:
        """Leave at once. What still waits for another rank ends without an answer.

        On a GPU it returns when no graph that has calls of the group is left.
        """
        with self._closing:
            self._is_closed = True
            if self.peer_sum is not None:
                self.peer_sum.let_go()
            if not self._distributed.is_initialized():
                return
            if self._is_simulated:
                self._distributed.destroy_process_group()
            else:
                self._distributed.distributed_c10d._abort_process_group()

    def _do(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except (RuntimeError, ValueError) as error:  # the second of a group that was left
            raise self._explain(name, error) from error

    def _fault(self, call: str, error: Exception) -> Exception:
        reason = f"{str(error).splitlines()[0]}" if str(error) else type(error).__name__
        return DeviceFault(self._device, call, reason, is_asynchronous=False)

    def _tensor(self, values: Any) -> Any:
        if isinstance(values, np.ndarray):
            return self._torch.from_numpy(values)
        return values
