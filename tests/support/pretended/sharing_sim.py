"""A simulated GPU that gives its memory to other users of this process, as to other processes."""

from __future__ import annotations

from hypocenter.device.sim.sim import SimGpu

NAME = "sim:h200"


class SharingSim(SimGpu):
    """A simulated GPU whose memory another user of this process maps, as another process would."""

    def allocate_shared(self, num_bytes: int) -> tuple[int, bytes]:
        address = self.allocate(num_bytes)
        return address, address.to_bytes(64, "little")

    def map_shared(self, handle: bytes, num_bytes: int) -> int:
        return int.from_bytes(handle, "little")
