"""Errors of the CUDA and HIP runtimes by name, and who is to blame for them; needs neither.

Numbers and names: `cudaError_t` of CUDA's driver_types.h, `hipError_t` of hip_runtime_api.h. HIP
took over CUDA's numbers and most of its names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hypocenter.base.errors import DeviceFault, ErrorKind, HypoError, LaunchRejected
from hypocenter.base.refusals import Refused, ResourceExceeded, RuntimeRefused
from hypocenter.record.runtime_text import code_in, kind_of_code

#: What Triton's launcher says of an address that the driver does not know, by its place.
_POINTER = re.compile(r"Pointer argument \(at \d+\) cannot be accessed from Triton")

# Number to the part of the name behind cudaError and hipError, where both have the same one.
_NAMES: Mapping[int, str] = {
    1: "InvalidValue",
    9: "InvalidConfiguration",
    17: "InvalidDevicePointer",
    35: "InsufficientDriver",
    98: "InvalidDeviceFunction",
    100: "NoDevice",
    101: "InvalidDevice",
    201: "InvalidContext",
    214: "ECCUncorrectable",
    218: "InvalidPtx",
    304: "OperatingSystem",
    600: "NotReady",
    700: "IllegalAddress",
    701: "LaunchOutOfResources",
    710: "Assert",
    719: "LaunchFailure",
    720: "CooperativeLaunchTooLarge",
    801: "NotSupported",
    900: "StreamCaptureUnsupported",
    901: "StreamCaptureInvalidated",
    906: "StreamCaptureImplicit",
    907: "CapturedEvent",
    999: "Unknown",
}
_CUDA_NAMES: Mapping[int, str] = {
    2: "MemoryAllocation",
    3: "InitializationError",
    46: "DevicesUnavailable",
    200: "InvalidKernelImage",
    201: "DeviceUninitialized",
    209: "NoKernelImageForDevice",
    220: "NvlinkUncorrectable",
    222: "UnsupportedPtxVersion",
    400: "InvalidResourceHandle",
    500: "SymbolNotFound",
    702: "LaunchTimeout",
    714: "HardwareStackError",
    715: "IllegalInstruction",
    716: "MisalignedAddress",
    717: "InvalidAddressSpace",
    718: "InvalidPc",
}
_HIP_NAMES: Mapping[int, str] = {
    2: "OutOfMemory",
    3: "NotInitialized",
    200: "InvalidImage",
    209: "NoBinaryForGpu",
    400: "InvalidHandle",
    500: "NotFound",
    702: "LaunchTimeOut",
}


@dataclass(frozen=True, slots=True)
class RuntimeFault:
    """An error of the runtime."""

    code: int
    name: str
    sentence: str
    kind: ErrorKind

    @property
    def is_found_later(self) -> bool:
        """Whether something that ran has made it, and not the call that returned it."""
        return self.kind in (ErrorKind.FOUND_LATER, ErrorKind.ENDLESS, ErrorKind.HARDWARE)

    def __str__(self) -> str:
        return f"{self.name} ({self.code}): {self.sentence}"


def runtime_fault(vendor: str, error: BaseException) -> RuntimeFault | None:
    """The error of the runtime behind an exception of torch or Triton; None when there is none.

    `vendor`: cuda or hip. torch's AcceleratorError (2.8 and newer) has the number, Triton's and
    older ones have the sentence only.
    """
    text = str(error)
    code = getattr(error, "error_code", None)
    if not isinstance(code, int) or isinstance(code, bool):
        code = code_in(text)
    if code is None:
        return None
    # torch's advice after the first line ("For debugging consider ...") is not the reason.
    line = text.strip().split("\n")[0]
    sentence = line.split("error:")[-1].split("]:")[-1].strip()
    return RuntimeFault(code, error_name(vendor, code), sentence, kind_of_code(code))


def launch_failure(
    device: str, product: str, error: Exception, kernel: str, shape: str, *, is_maker: bool
) -> HypoError | None:
    """What an exception from a launch means; None when it is no error of the runtime.

    `device` as users write it, `product` the GPU's own name, `shape` the grid and block as text.
    `is_maker`: everything before this launch was waited for, so a fault is its own.
    """
    if hasattr(error, "required") and hasattr(error, "limit"):  # Triton's OutOfResources
        exceeded = ResourceExceeded(
            resource=str(getattr(error, "name", "it")),
            needed=int(error.required),
            limit=int(error.limit),
            gpu=product,
            shape=shape,
            way_out="use smaller tiles or fewer stages",
        )
        return LaunchRejected(kernel, exceeded)
    if isinstance(error, ValueError):
        is_pointer = _POINTER.search(str(error)) is not None
        return LaunchRejected(kernel, Refused(what=f"{error} {shape}")) if is_pointer else None
    fault = runtime_fault(device.partition(":")[0], error)
    if fault is None:
        return None
    if not fault.is_found_later:
        refused = RuntimeRefused(
            code=fault.code,
            name=fault.name,
            sentence=fault.sentence,
            shape=shape,
            is_no_code=fault.kind is ErrorKind.NO_CODE,
        )
        return LaunchRejected(kernel, refused)
    call = failed_launch(kernel, shape) if is_maker else f"launch of {kernel} {shape}"
    return DeviceFault(
        device, call, str(fault), is_asynchronous=not is_maker, kernel=kernel, kind=fault.kind
    )


def failed_launch(kernel: str, shape: str) -> str:
    """The call to blame when a launch itself is at fault."""
    return f"Kernel '{kernel}' launch failed {shape}"


def error_name(vendor: str, code: int) -> str:
    """cudaErrorIllegalAddress, hipErrorIllegalAddress, ...; an unknown number stays a number."""
    own = _HIP_NAMES if vendor == "hip" else _CUDA_NAMES
    return f"{vendor}Error{own.get(code) or _NAMES.get(code) or code}"
