"""GPUs as their drivers tell: NVIDIA's by a library that is not there, AMD's by files."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from hypocenter.base import cards
from hypocenter.base.cards import CardWatch, free_bytes_of


class Library:
    """Answers as NVML does for two GPUs, the second of which says no more than its name."""

    def __init__(self) -> None:
        self.ecc_errors = 2
        self.events = [(1, 8, 31), (1, 1, 5), (1, 8, 48)]
        self.is_open = True

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlShutdown(self) -> int:
        self.is_open = False
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number: int, device: Any) -> int:
        device._obj.value = number + 1
        return 0

    def nvmlDeviceGetName(self, device: Any, buffer: Any, size: int) -> int:
        buffer.value = b"Pretended %d" % device.value
        return 0

    def nvmlDeviceGetUUID(self, device: Any, buffer: Any, size: int) -> int:
        buffer.value = b"GPU-%d" % device.value
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:
        memory._obj[0], memory._obj[1] = 1000, 400
        return int(device.value == 2)

    def nvmlDeviceGetTotalEccErrors(self, device: Any, kind: int, since: int, number: Any) -> int:
        assert (kind, since) == (1, 0)
        number._obj.value = self.ecc_errors
        return int(device.value == 2)

    def nvmlDeviceGetClockInfo(self, device: Any, clock: int, number: Any) -> int:
        number._obj.value = {1: 1980, 2: 2619}[clock]
        return int(device.value == 2)

    def nvmlDeviceGetRemappedRows(self, device: Any, *rows: Any) -> int:
        for row, number in zip(rows, (3, 1, 0, 0), strict=True):
            row._obj.value = number
        return int(device.value == 2)

    def nvmlEventSetCreate(self, events: Any) -> int:
        events._obj.value = 77
        return 0

    def nvmlDeviceRegisterEvents(self, device: Any, kind: Any, events: Any) -> int:
        assert (kind.value, events.value) == (8, 77)
        return 0

    def nvmlEventSetWait_v2(self, events: Any, event: Any, milliseconds: int) -> int:
        if not self.events:
            return 10
        event._obj.device, event._obj.type, event._obj.data = self.events.pop(0)
        return 0

    def nvmlEventSetFree(self, events: Any) -> int:
        return 0


def root_with(tmp_path: Path, *files: str) -> Path:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    return tmp_path


def test_what_befell_an_nvidia_gpu_while_it_was_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    watch = CardWatch(root_with(tmp_path, "dev/nvidiactl"))
    library.ecc_errors = 5
    first, second = watch.end()
    assert (first.name, first.uuid) == ("Pretended 1", "GPU-1")
    assert (first.ecc_errors, first.new_ecc_errors, first.remapped_rows) == (5, 3, 4)
    assert (first.sm_mhz, first.memory_mhz, first.celsius) == (1980, 2619, None)
    assert (first.memory_bytes, first.free_bytes) == (1000, 400)
    assert first.xids == (31, 48)  # another kind of event is none
    assert (second.name, second.ecc_errors, second.xids) == ("Pretended 2", None, ())
    assert (second.memory_bytes, second.remapped_rows, second.sm_mhz) == (None, None, None)
    assert not library.is_open


def test_a_library_that_is_not_there_or_too_old_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_there(name: str) -> Any:
        raise OSError(name)

    root = root_with(tmp_path, "dev/nvidiactl")
    for library in (not_there, lambda name: object()):
        monkeypatch.setattr(ctypes, "CDLL", library)
        assert CardWatch(root).end() == ()


def test_without_a_driver_no_library_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("loaded"))
    assert CardWatch(tmp_path).end() == ()


def test_cards_of_amdgpu_by_their_files(tmp_path: Path) -> None:
    folder = tmp_path / "sys/class/drm/card1/device"
    folder.mkdir(parents=True)
    files = {
        "vendor": "0x1002\n", "unique_id": "8d12\n", "product_name": "AMD Instinct MI300X\n",
        "pp_dpm_sclk": "0: 132Mhz\n1: 2100Mhz *\n", "pp_dpm_mclk": "0: 900Mhz *\n",
        "mem_info_vram_total": "1000\n", "mem_info_vram_used": "300\n",
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "ras").mkdir()
    (folder / "ras/umc_err_count").write_text("ue: 4\nce: 9\n")
    other = tmp_path / "sys/class/drm/card0/device"
    other.mkdir(parents=True)
    (other / "vendor").write_text("0x10de\n")  # NVIDIA's, of which NVML tells
    watch = CardWatch(tmp_path)
    (folder / "ras/umc_err_count").write_text("ue: 6\nce: 9\n")
    [card] = watch.end()
    assert (card.name, card.uuid) == ("AMD Instinct MI300X", "8d12")
    assert (card.ecc_errors, card.new_ecc_errors) == (6, 2)
    assert (card.sm_mhz, card.memory_mhz) == (2100, 900)
    assert (card.memory_bytes, card.free_bytes) == (1000, 700)


def test_no_more_cards_than_there_is_room_for(tmp_path: Path) -> None:
    for number in range(cards.MAX_CARDS + 3):
        folder = tmp_path / f"sys/class/drm/card{number}/device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x1002\n")
    assert len(CardWatch(tmp_path).end()) == cards.MAX_CARDS


@pytest.mark.parametrize(
    ("device", "environ", "free"),
    [("cuda", {}, 400), ("cuda:1", {}, 900), ("cuda:1", {"CUDA_VISIBLE_DEVICES": "1,0"}, 400),
     ("cuda:7", {}, 400)],
)  # fmt: skip
def test_the_memory_that_is_free_on_a_gpu(
    tmp_path: Path, device: str, environ: dict[str, str], free: int
) -> None:
    for number, used in enumerate((600, 100)):
        folder = tmp_path / f"sys/class/drm/card{number}/device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x1002\n")
        (folder / "mem_info_vram_total").write_text("1000\n")
        (folder / "mem_info_vram_used").write_text(f"{used}\n")
    assert free_bytes_of(device, environ, tmp_path) == free
    assert free_bytes_of(device, environ, tmp_path / "nowhere") is None
