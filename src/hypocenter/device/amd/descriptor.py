"""The kernel descriptor of an AMD code object: 64 bytes from which a wave is set up.

Source: LLVM's user guide of the AMDGPU backend, "Kernel KernelDescriptor", with the tables of
COMPUTE_PGM_RSRC1, 2 and 3.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from hypocenter.device.amd.targets import AmdTarget

DESCRIPTOR_BYTES = 64
_FIELDS = struct.Struct("<IIIIq20sIIIHHI")
#: Scalar registers that each enabled pointer or size takes, in the order in which they are set up.
USER_SGPRS = (
    ("private_segment_buffer", 4),
    ("dispatch_ptr", 2),
    ("queue_ptr", 2),
    ("kernarg_segment_ptr", 2),
    ("dispatch_id", 2),
    ("flat_scratch_init", 2),
    ("private_segment_size", 1),
)


@dataclass(frozen=True, slots=True)
class KernelDescriptor:
    """One kernel's descriptor, by field; sizes in bytes, `entry` from the descriptor itself.

    `user_sgprs` are the pointers that are enabled, in order; what is preloaded of the kernarg
    follows them. `wavefront` is lanes a wave, `workitem_ids` how many vector registers hold ids.
    """

    group_bytes: int
    private_bytes: int
    kernarg_bytes: int
    entry: int
    rsrc1: int
    rsrc2: int
    rsrc3: int
    user_sgprs: tuple[str, ...]
    wavefront: int
    uses_dynamic_stack: bool
    #: Of the kernarg: 4-byte words that are preloaded, and the word that is the first.
    preload_words: int
    preload_first: int
    is_cdna: bool

    @property
    def num_vgprs(self) -> int:
        """Vector registers a lane, accumulators among them on CDNA."""
        granule = 8 if self.is_cdna or self.wavefront == 32 else 4
        return ((self.rsrc1 & 0x3F) + 1) * granule

    @property
    def accum_offset(self) -> int:
        """The vector register that is the first accumulator; CDNA only."""
        return ((self.rsrc3 & 0x3F) + 1) * 4 if self.is_cdna else self.num_vgprs

    @property
    def num_user_sgprs(self) -> int:
        return self.rsrc2 >> 1 & 0x1F

    @property
    def has_scratch(self) -> bool:
        return bool(self.rsrc2 & 1)

    @property
    def workgroup_ids(self) -> tuple[bool, bool, bool]:
        """Which of the block's x, y, z stand in scalar registers."""
        x, y, z = (bool(self.rsrc2 >> bit & 1) for bit in (7, 8, 9))
        return x, y, z

    @property
    def has_workgroup_info(self) -> bool:
        return bool(self.rsrc2 >> 10 & 1)

    @property
    def workitem_ids(self) -> int:
        """How many of the thread's x, y, z are set up, 1 to 3."""
        return (self.rsrc2 >> 11 & 3) + 1

    @property
    def float_mode(self) -> int:
        """Rounding and denormals of the register MODE, bits 0 to 7."""
        return self.rsrc1 >> 12 & 0xFF

    @property
    def has_dx10_clamp(self) -> bool:
        """A clamp of NaN is 0; on gfx12, which has no such bit, always."""
        return bool(self.rsrc1 >> 21 & 1)

    @property
    def clamps_overflow(self) -> bool:
        """FP16_OVFL: what is too large for 16 or 8 bits becomes the largest number there is."""
        return bool(self.rsrc1 >> 26 & 1)

    @property
    def has_ieee(self) -> bool:
        """Signalling NaN are quieted; bit 23 until gfx11."""
        return bool(self.rsrc1 >> 23 & 1)


def read_descriptor(data: bytes, target: AmdTarget) -> KernelDescriptor:
    """The descriptor in 64 bytes; raises ValueError for another number of bytes."""
    if len(data) != DESCRIPTOR_BYTES:
        raise ValueError(f"a kernel descriptor has {DESCRIPTOR_BYTES} bytes, not {len(data)}")
    group, private, kernarg, _, entry, _, rsrc3, rsrc1, rsrc2, properties, preload, _ = (
        _FIELDS.unpack(data)
    )
    return KernelDescriptor(
        group_bytes=group,
        private_bytes=private,
        kernarg_bytes=kernarg,
        entry=entry,
        rsrc1=rsrc1,
        rsrc2=rsrc2,
        rsrc3=rsrc3,
        user_sgprs=tuple(name for bit, (name, _) in enumerate(USER_SGPRS) if properties >> bit & 1),
        wavefront=32 if properties >> 10 & 1 else 64,
        uses_dynamic_stack=bool(properties >> 11 & 1),
        preload_words=preload & 0x7F,
        preload_first=preload >> 7,
        is_cdna=target.is_cdna,
    )
