"""GPUs of this machine as their drivers tell of them: who they are, and whether they are well.

NVIDIA's by NVML (the library of its driver; the NVML API reference has its functions), AMD's by
the files of amdgpu in /sys (the kernel's guide to amdgpu). No GPU is opened, so that nothing of
it is used. AMD's files were read from that guide, and not on such a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

MAX_CARDS, MAX_XIDS = 16, 64
#: Variables that hide some GPUs of a machine and number the others.
_VISIBLE = {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"}
_MAX_CHARS = 96
_NVML = "libnvidia-ml.so.1"
#: NVML's numbers: nvmlMemoryErrorType_t, nvmlEccCounterType_t, nvmlClockType_t, and an event type.
_UNCORRECTED, _SINCE_START = 1, 0
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_EVENT_XID = 8


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU of `vendor` nvidia or amd; "" and None where its driver does not say.

    `ecc_errors` counts errors of memory that could not be corrected since the driver was loaded,
    `new_ecc_errors` those while it was watched. `remapped_rows` were taken out of use for good.
    `xids` are the numbers of NVIDIA's errors while it was watched.
    """

    index: int
    vendor: str = ""
    name: str = ""
    #: As compilers call it, sm_90; "" of AMD's, whose files do not say.
    arch: str = ""
    uuid: str = ""
    serial: str = ""
    bus: str = ""
    ecc_errors: int | None = None
    new_ecc_errors: int | None = None
    remapped_rows: int | None = None
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    celsius: int | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    xids: tuple[int, ...] = ()


class CardWatch:
    """Watches the GPUs of a machine from its making on; `root` is where /sys and /dev are."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._nvml = _Nvml.open(root)
        self._before = {card.index: card.ecc_errors for card in self.now()}

    def now(self) -> tuple[Card, ...]:
        """Each GPU as it is now; empty where there is none, or no driver that tells."""
        cards = [*(self._nvml.cards() if self._nvml is not None else ())]
        cards += _amd_cards(self._root, len(cards))
        return tuple(cards[:MAX_CARDS])

    def end(self) -> tuple[Card, ...]:
        """Each GPU now, with what befell it meanwhile; nothing is watched any more."""
        cards = []
        xids = self._nvml.xids() if self._nvml is not None else {}
        for card in self.now():
            before, new = self._before.get(card.index), None
            if before is not None and card.ecc_errors is not None:
                new = card.ecc_errors - before
            seen = tuple(xids.get(card.uuid, ()))[:MAX_XIDS]
            cards.append(msgspec.structs.replace(card, new_ecc_errors=new, xids=seen))
        self.close()
        return tuple(cards)

    def close(self) -> None:
        """Nothing is watched any more; a second time does nothing."""
        if self._nvml is not None:
            self._nvml.close()
        self._nvml = None

    def __enter__(self) -> CardWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cards_now(root: Path = Path("/")) -> tuple[Card, ...]:
    """Each GPU of the machine as it is now; empty where there is none, or no driver that tells."""
    return CardWatch(root).end()


def gpu_vendors(root: Path = Path("/")) -> list[str]:
    """Vendors whose driver is loaded, by the device nodes that it makes."""
    dev = root / "dev"
    nodes = {"amd": dev / "kfd", "nvidia": dev / "nvidiactl"}
    return [vendor for vendor, node in nodes.items() if node.exists()]


def free_bytes_of(device: str, environ: Mapping[str, str], root: Path = Path("/")) -> int | None:
    """How much of a GPU's memory nobody uses; None where no driver says.

    `device` is cuda, cuda:1, hip, hip:0. Where variables of the environment number GPUs anew it is
    the least of all of them: which one is meant is not known without opening it.
    """
    free = {card.index: card.free_bytes for card in cards_now(root) if card.free_bytes is not None}
    number = device.partition(":")[2] or "0"
    if number.isdigit() and int(number) in free and not _VISIBLE.intersection(environ):
        return free[int(number)]
    return min(free.values(), default=None)


class _Event(ctypes.Structure):
    """nvmlEventData_t."""

    _fields_ = [
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class _PciInfo(ctypes.Structure):
    """nvmlPciInfo_t."""

    _fields_ = [
        ("legacy", ctypes.c_char * 16),
        ("numbers", ctypes.c_uint * 5),
        ("bus", ctypes.c_char * 32),
    ]


class _Nvml:
    """NVIDIA's library; each question that it does not answer is one not told."""

    def __init__(self, library: Any) -> None:
        self._library = library
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        self._devices = []
        for number in range(min(count.value, MAX_CARDS)):
            device = ctypes.c_void_p()
            if not library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)):
                self._devices.append((number, device))
        self._events: ctypes.c_void_p | None = ctypes.c_void_p()
        if library.nvmlEventSetCreate(ctypes.byref(self._events)):
            self._events = None
            return
        for _, device in self._devices:
            library.nvmlDeviceRegisterEvents(device, ctypes.c_ulonglong(_EVENT_XID), self._events)

    @classmethod
    def open(cls, root: Path) -> _Nvml | None:
        if not (root / "dev/nvidiactl").exists() and not (root / "dev/dxg").exists():
            return None
        try:
            library = ctypes.CDLL(_NVML)
            if library.nvmlInit_v2():
                return None
        except (OSError, AttributeError):  # not there, or none
            return None
        try:
            return cls(library)
        except AttributeError:  # older than what is asked of it
            library.nvmlShutdown()
            return None

    def close(self) -> None:
        if self._events is not None:
            self._library.nvmlEventSetFree(self._events)
        self._library.nvmlShutdown()

    def cards(self) -> Iterator[Card]:
        for number, device in self._devices:
            memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
            has_memory = not self._ask("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
            rows = [ctypes.c_uint() for _ in range(4)]
            has_rows = not self._ask("nvmlDeviceGetRemappedRows", device, *map(ctypes.byref, rows))
            info = _PciInfo()
            self._ask("nvmlDeviceGetPciInfo_v3", device, ctypes.byref(info))
            yield Card(
                index=number,
                vendor="nvidia",
                arch=self._arch(device),
                name=self._text("nvmlDeviceGetName", device),
                uuid=self._text("nvmlDeviceGetUUID", device),
                serial=self._text("nvmlDeviceGetSerial", device),
                bus=info.bus.decode(errors="replace"),
                ecc_errors=self._number(
                    "nvmlDeviceGetTotalEccErrors", device, _UNCORRECTED, _SINCE_START
                ),
                remapped_rows=rows[0].value + rows[1].value if has_rows else None,
                sm_mhz=self._number("nvmlDeviceGetClockInfo", device, _CLOCK_SM),
                memory_mhz=self._number("nvmlDeviceGetClockInfo", device, _CLOCK_MEMORY),
                celsius=self._number("nvmlDeviceGetTemperature", device, 0),
                memory_bytes=int(memory[0]) if has_memory else None,
                free_bytes=int(memory[1]) if has_memory else None,
            )

    def xids(self) -> dict[str, list[int]]:
        """The errors since this was opened, by the ids of GPUs."""
        found: dict[str, list[int]] = {}
        event = _Event()
        for _ in range(MAX_XIDS if self._events is not None else 0):
            if self._ask("nvmlEventSetWait_v2", self._events, ctypes.byref(event), 0):
                break
            if event.type == _EVENT_XID:
                uuid = self._text("nvmlDeviceGetUUID", ctypes.c_void_p(event.device))
                found.setdefault(uuid, []).append(int(event.data))
        return found

    def _ask(self, function: str, *args: Any) -> int:
        try:
            return int(getattr(self._library, function)(*args))
        except AttributeError:
            return -1

    def _arch(self, device: Any) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        numbers = ctypes.byref(major), ctypes.byref(minor)
        failed = self._ask("nvmlDeviceGetCudaComputeCapability", device, *numbers)
        return "" if failed else f"sm_{major.value}{minor.value}"

    def _text(self, function: str, device: Any) -> str:
        buffer = ctypes.create_string_buffer(_MAX_CHARS)
        failed = self._ask(function, device, buffer, _MAX_CHARS)
        return "" if failed else buffer.value.decode(errors="replace")

    def _number(self, function: str, device: Any, *which: int) -> int | None:
        number = ctypes.c_ulonglong()
        return None if self._ask(function, device, *which, ctypes.byref(number)) else number.value


def _amd_cards(root: Path, first: int) -> list[Card]:
    """Cards of amdgpu: files of /sys/class/drm, one folder a card."""
    folders = sorted(
        folder
        for folder in (root / "sys/class/drm").glob("card*/device")
        if re.fullmatch(r"card\d+", folder.parent.name) and _line(folder / "vendor") == "0x1002"
    )
    cards = []
    for number, folder in enumerate(folders[:MAX_CARDS], first):
        errors = re.search(r"ue: *(\d+)", _text(folder / "ras/umc_err_count"))
        total, used = (_read_number(folder / f"mem_info_vram_{part}") for part in ("total", "used"))
        cards.append(
            Card(
                index=number,
                vendor="amd",
                name=_line(folder / "product_name"),
                uuid=_line(folder / "unique_id"),
                serial=_line(folder / "serial_number"),
                bus=folder.resolve().name,
                ecc_errors=int(errors[1]) if errors else None,
                sm_mhz=_clock(folder / "pp_dpm_sclk"),
                memory_mhz=_clock(folder / "pp_dpm_mclk"),
                memory_bytes=total,
                free_bytes=total - used if total is not None and used is not None else None,
            )
        )
    return cards


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")[:4096]
    return ""


def _line(path: Path) -> str:
    return " ".join(_text(path).split())[:_MAX_CHARS]


def _read_number(path: Path) -> int | None:
    text = _line(path)
    return int(text) if text.isascii() and text.isdigit() else None


def _clock(path: Path) -> int | None:
    """The rate that is marked as the one in use: `1: 1700Mhz *`."""
    found = re.search(r"(\d+) *[Mm][Hh]z *\*", _text(path))
    return int(found[1]) if found else None
