"""What the CUDA and HIP runtimes, and their drivers, say in words: told apart by number and kind.

The words are theirs; nothing here reads a sentence of ours. Numbers: `cudaError_t` of CUDA's
driver_types.h, which `hipError_t` took over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hypocenter.base.errors import ErrorKind

# Raised by something that ran: the call that returns one of these found it and did not make it.
_FOUND_LATER = frozenset({700, 710, 714, 715, 716, 717, 718, 719})
_ENDLESS = 702
# The card's own checks of its memory and of its links to others failed.
_HARDWARE = frozenset({214, 220})
_OUT_OF_MEMORY = 2
# No code of the kernel for this architecture was to be had.
_NO_CODE = frozenset({98, 209})
# Lower case, for errors that reach us without a number.
_SENTENCES: Mapping[str, int] = {
    "invalid argument": 1,
    "out of memory": 2,
    "invalid configuration argument": 9,
    "invalid device function": 98,
    "invalid device pointer": 17,
    "no kernel image is available": 209,
    "no binary for gpu": 209,
    "unable to find code object": 209,
    "device kernel image is invalid": 200,
    "invalid resource handle": 400,
    "named symbol not found": 500,
    "illegal memory access": 700,
    "too many resources requested": 701,
    "out of resources": 701,
    "launch timed out": 702,
    "device-side assert": 710,
    "hardware stack error": 714,
    "illegal instruction": 715,
    "misaligned address": 716,
    "operation not supported on global/shared address space": 717,
    "invalid program counter": 718,
    "unspecified launch failure": 719,
    "operation not permitted when stream is capturing": 900,
    "operation failed due to a previous error during capture": 901,
    "operation would result in a merge of separate capture sequences": 902,
    "capture was not ended in the same stream as it began": 903,
    "capturing stream has unjoined work": 904,
    "dependency created on uncaptured work in another stream": 905,
    "operation would make the legacy stream depend on a capturing blocking stream": 906,
    "operation not permitted on an event last recorded in a capturing stream": 907,
    "attempt to terminate a thread-local capture sequence from another thread": 908,
    "uncorrectable ecc error": 214,
    "uncorrectable nvlink error": 220,
}
_KINDS: tuple[tuple[re.Pattern[str], ErrorKind], ...] = (
    (
        re.compile(r"uncorrectable (?:ECC|NVLink) error|(?:ECC|Nvlink)Uncorrectable", re.I),
        ErrorKind.HARDWARE,
    ),
    (re.compile(r"out ?of ?memory|MemoryAllocation", re.I), ErrorKind.OUT_OF_MEMORY),
    (
        re.compile(
            r"no kernel image|no binary for gpu|NoBinaryForGpu|NoKernelImage|"
            r"unable to find code object|invalid device function|InvalidDeviceFunction",
            re.I,
        ),
        ErrorKind.NO_CODE,
    ),
    (re.compile(r"launch timed out|LaunchTime[oO]ut"), ErrorKind.ENDLESS),
    (
        re.compile(
            r"illegal (?:memory|address|instruction)|misaligned ?address|access fault|"
            r"launch ?failure|hardware stack error|device-side assert|"
            r"not supported on global/shared address space|invalid program counter|"
            # The driver's own names, as CuPy and JAX have them, and numba's words.
            r"CUDA_ERROR_(?:ILLEGAL|MISALIGNED|LAUNCH_FAILED|HARDWARE_STACK|ASSERT|INVALID_PC)|"
            r"CUDA_ERROR_INVALID_ADDRESS_SPACE|\[7(?:00|1[0-9])\] Call to cu\w+ results in",
            re.I,
        ),
        ErrorKind.FOUND_LATER,
    ),
)


def kind_of_code(code: int) -> ErrorKind:
    """What an error of this number is about."""
    if code in _FOUND_LATER:
        return ErrorKind.FOUND_LATER
    if code in _NO_CODE:
        return ErrorKind.NO_CODE
    if code in _HARDWARE:
        return ErrorKind.HARDWARE
    special = {_OUT_OF_MEMORY: ErrorKind.OUT_OF_MEMORY, _ENDLESS: ErrorKind.ENDLESS}
    return special.get(code, ErrorKind.OTHER)


def kind_of_text(text: str) -> ErrorKind:
    """What an error is about that a runtime, a driver or torch told of in these words."""
    return next((kind for words, kind in _KINDS if words.search(text)), ErrorKind.OTHER)


def is_without_driver(text: str) -> bool:
    """Whether Triton looked for a GPU and found none (triton/runtime/driver.py)."""
    return "0 active drivers" in text


#: In the exception, or in the statement, with which a program ends at NaN or infinity.
_OF_NUMBERS = re.compile(
    r"(?<![a-z])(nans?|is_?nan|is_?inf|is_?finite|infs?|infinity|non-?finite|finite)(?![a-z])",
    re.IGNORECASE,
)


def is_of_numbers(text: str) -> bool:
    """Whether what ended a program is about NaN or infinity."""
    return bool(_OF_NUMBERS.search(text))


#: How torch's anomaly mode ends a program (torch/csrc/autograd/engine.cpp).
_OF_ANOMALY_MODE = re.compile(r"Function '[^']*' returned nan values in its \d+th output")


def is_of_anomaly_mode(text: str) -> bool:
    """Whether torch ended the program at a gradient, since the program had asked it to look."""
    return bool(_OF_ANOMALY_MODE.search(text))


def kind_of_end(outcome: str, call: str) -> ErrorKind:
    """What the exception `outcome`, with which a program ends in `call`, is about."""
    kind = kind_of_text(outcome)
    is_plain = kind is ErrorKind.OTHER and is_of_numbers(f"{outcome} {call}")
    return ErrorKind.NOT_A_NUMBER if is_plain else kind


def is_of_capture(code: int | None) -> bool:
    """Whether an error of this number is about a graph that is being captured."""
    return code is not None and 900 <= code <= 908


#: How the errors of runtimes begin: in torch, Triton and ggml.
_RUNTIMES = ("Triton Error", "CUDA error", "HIP error", "ROCm error")


def code_in(text: str) -> int | None:
    """The number of the error that an exception of torch or Triton tells of; None for others."""
    if not any(words in text for words in _RUNTIMES):
        return None
    lowered = text.lower()
    found = [code for sentence, code in _SENTENCES.items() if sentence in lowered]
    return found[0] if found else 999
