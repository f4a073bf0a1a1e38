"""What tensors held around launches: a part of it before one, or all before and after one."""

from __future__ import annotations

import math

import msgspec

from hypocenter.record.events import Values

#: Of one run: launches of which an outcome is kept.
MAX_OUTCOMES = 256
#: How often one is made again, and bytes of one element, at most.
MAX_AGAIN, MAX_ELEMENT_BYTES = 64, 16
_HEX = "0123456789abcdef"


class Snapshot(msgspec.Struct, frozen=True):
    """Contents of tensors right before launch `launch` of plan `plan` in step `step`."""

    step: int
    plan: int
    launch: int
    values: tuple[Values, ...]


class OtherBits(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that a launch left with other bits when it was made again.

    `element` is the first one that differs, counted row by row; `first` and `again` are its bytes
    in hexadecimal digits. `num_elements` differ in all.
    """

    tensor: int
    element: int
    num_elements: int
    first: str
    again: str


class CompiledCode(msgspec.Struct, frozen=True, kw_only=True):
    """What Triton made of a kernel: `binary` is the sha256 of what the GPU ran, "" if unknown.

    `texts` by Triton's names of its stages: ttir, and ptx or amdgcn.
    """

    binary: str = ""
    texts: dict[str, str] = {}


class LaunchOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A launch outside of plans, by `step` and the number of its event (`launch`).

    `given` holds all its tensors before it, and `gave` those that it changed, after it. It was
    made `num_again` times more, of which `num_other` left `others`.
    """

    step: int
    launch: int
    given: tuple[Values, ...]
    gave: tuple[Values, ...]
    num_again: int = 0
    num_other: int = 0
    others: tuple[OtherBits, ...] = ()
    code: CompiledCode = CompiledCode()

    @property
    def num_bytes(self) -> int:
        """What it takes: contents of tensors, and texts of code."""
        values = sum(len(values.data) for values in (*self.given, *self.gave))
        return values + sum(map(len, self.code.texts.values()))

    def problem(self) -> str:
        """What no run can have left, in words; "" where nothing is."""
        if not 0 <= self.num_other <= self.num_again <= MAX_AGAIN:
            return f"{self.num_other} of {self.num_again} launches made again differ"
        sizes = {values.tensor: math.prod(values.shape) for values in self.given}
        for other in self.others:
            if not 0 <= other.element < sizes.get(other.tensor, 0) or other.num_elements < 1:
                return f"element {other.element} of tensor {other.tensor} differs"
            for digits in (other.first, other.again):
                if len(digits) > 2 * MAX_ELEMENT_BYTES or not set(digits) <= set(_HEX):
                    return "bytes are no hexadecimal digits"
        if not set(self.code.binary) <= set(_HEX) or len(self.code.binary) > 64:
            return "a sha256 is none"
        return ""
