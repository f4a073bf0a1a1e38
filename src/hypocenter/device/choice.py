"""Which device `auto` stands for: a GPU that torch can drive and that has room, else the CPU.

It asks drivers and reads torch's version; no GPU is opened and torch is not imported.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hypocenter.base.cards import Card, cards_now, gpu_vendors
from hypocenter.base.errors import UsageError
from hypocenter.base.wording import bytes_text
from hypocenter.device.limits import TABLE
from hypocenter.settings.config import AUTO, EngineConfig, is_simulated
from hypocenter.settings.environment import Environment

#: What torch calls the GPUs of a vendor, and the variables that hide some of them.
_DEVICE = {"nvidia": "cuda", "amd": "hip"}
_BUILDS = {"cuda": "NVIDIA", "hip": "AMD", "": "CPU"}
_VISIBLE = {
    "nvidia": ("CUDA_VISIBLE_DEVICES",),
    "amd": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}
MAX_REPLICAS = 64
#: Beside the weights: a driver's context, kernels, buffers of steps, and the least of a cache.
_OTHER_BYTES = 1 << 30
_OF_PARTS = re.compile(r"-[0-9]{5}-of-([0-9]{5})\.gguf$")
_NAMES = {"nvidia": "NVIDIA", "amd": "AMD"}


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """A device, and why it is this one. `has_gpu`: whether the machine has a GPU, taken or not."""

    device: str
    reason: str
    has_gpu: bool = True

    def __str__(self) -> str:
        return f"device {self.device}: {self.reason}"


def with_device(
    path: Path, config: EngineConfig, *, num_replicas: int = 1
) -> tuple[EngineConfig, DeviceChoice | None]:
    """The configuration with a device that is there in place of `auto`, and why that one.

    None where a device was named. A GPU must have room for the model's files and a GiB, and so
    must those that follow it where `num_replicas` need one each. Raises UsageError where they do
    not, BadSetting for settings that the device cannot follow.
    """
    if config.device != AUTO:
        return config, None
    if config.float_products == "bf16":
        choice = DeviceChoice("cpu", "products in bf16 run there only", has_gpu=False)
    else:
        num_parts = config.tensor_parallel
        needed_bytes = _file_bytes(path) // num_parts + _OTHER_BYTES
        choice = choose_device(needed_bytes, num_parts * num_replicas)
        if num_replicas > 1 and choice.device == "cpu" and choice.has_gpu:
            raise UsageError(
                f"--replicas is {num_replicas}: {choice.reason}; take fewer, or name --device cpu"
            )
    return replace(config, device=choice.device), choice


def with_replicas(
    config: EngineConfig,
    num_replicas: int,
    *,
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> tuple[EngineConfig, tuple[str, ...]]:
    """What each of so many replicas is run with, and the device of each.

    GPUs in a row from the one that is named, as many for each as hold the model together. A CPU's
    cores are divided, and what its KV cache may take. Raises UsageError where there are too few.
    """
    if not 1 <= num_replicas <= MAX_REPLICAS:
        raise UsageError(f"--replicas is {num_replicas}, but must be from 1 to {MAX_REPLICAS}")
    device, num_parts = config.device, config.tensor_parallel
    if num_replicas == 1 or is_simulated(device):
        return config, (device,) * num_replicas
    if device == "cpu":
        num_cores = len(os.sched_getaffinity(0))
        if num_replicas > num_cores:
            raise UsageError(
                f"--replicas is {num_replicas}, but must be at most {num_cores}, the "
                "CPUs that this process may use"
            )
        num_threads = config.num_threads or num_cores // num_replicas
        share = config.cpu_memory_fraction / num_replicas
        config = replace(config, num_threads=num_threads, cpu_memory_fraction=share)
        return config, (device,) * num_replicas
    build, _, index = device.partition(":")
    first, num_needed = int(index or 0), num_replicas * num_parts
    own = [card for card in cards_now(root) if _DEVICE[card.vendor] == build]
    num_here = len(_visible(own, environ)) if own else 0
    if first + num_needed > num_here:
        of_parts = f" with -tp {num_parts}" if num_parts > 1 else ""
        from_first = f" from {device} on" if first else ""
        most = max((num_here - first) // num_parts, 0)
        if most:
            way_out = f"take at most {most}"
        else:
            way_out = "take a smaller -tp" if num_here > first else "take --device cpu"
        raise UsageError(
            f"--replicas is {num_replicas}{of_parts}: that takes {num_needed} GPUs{from_first}, "
            f"but {max(num_here - first, 0)} are here; {way_out}"
        )
    devices = (f"{build}:{first + number * num_parts}" for number in range(num_replicas))
    return config, tuple(devices)


def _file_bytes(path: Path) -> int:
    """Of a model's file, and of all its parts where it is split."""
    name = _OF_PARTS.sub(r"-*-of-\1.gguf", glob.escape(path.name))
    return sum(part.stat().st_size for part in path.parent.glob(name) if part.is_file())


def choose_device(
    needed_bytes: int = 0,
    num_gpus: int = 1,
    *,
    environ: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> DeviceChoice:
    """The first GPU with room for `needed_bytes`, as torch numbers them, else the CPU.

    HYPO_DEVICE overrules. A model on `num_gpus` needs that room on each of as many in a row.
    `root` is where /dev and /sys are. Raises UsageError for a bad HYPO_DEVICE.
    """
    if asked := Environment.read(environ).device:
        return DeviceChoice(asked, "HYPO_DEVICE says so", has_gpu=asked != "cpu")
    cards = cards_now(root)
    if not cards:
        vendors = " and ".join(_NAMES[vendor] for vendor in gpu_vendors(root))
        if vendors:
            return DeviceChoice("cpu", f"the driver of {vendors} is loaded, but reports no GPU")
        return DeviceChoice("cpu", "no GPU driver is loaded", has_gpu=False)
    build = _torch_build()
    if build is None:
        why = f"{_name(cards[0])} is here, but torch is not: pip install 'hypocenter[gpu]'"
        return DeviceChoice("cpu", why)
    own = [card for card in cards if _DEVICE[card.vendor] == build]
    if not own:
        why = f"{_name(cards[0])} is here, but torch is the {_BUILDS[build]} build"
        return DeviceChoice("cpu", why)
    if not (visible := _visible(own, environ)):
        hiding = next(name for name in _VISIBLE[own[0].vendor] if name in environ)
        return DeviceChoice("cpu", f"{hiding}={environ[hiding]} hides every GPU")
    return _with_room(visible, build, needed_bytes, num_gpus)


def _with_room(cards: Sequence[Card], build: str, needed_bytes: int, num_gpus: int) -> DeviceChoice:
    """The first of these cards, in torch's order, that is known to kernels and has room."""
    if num_gpus > len(cards):
        return DeviceChoice("cpu", f"{num_gpus} GPUs are asked for, but {len(cards)} are here")
    known = [not card.arch or card.arch in TABLE for card in cards]
    room = [card.free_bytes is None or card.free_bytes >= needed_bytes for card in cards]
    for first in range(len(cards) - num_gpus + 1):
        several = slice(first, first + num_gpus)
        if all(known[several]) and all(room[several]):
            device = f"{build}:{first}" if first else build
            return DeviceChoice(device, f"{_name(cards[first])}{_free(cards[first])}")
    if not any(known):
        return DeviceChoice("cpu", f"no kernel is built for {_name(cards[0])}, {cards[0].arch}")
    most = max(cards, key=lambda card: card.free_bytes or 0)
    of_each = f" on each of {num_gpus}" if num_gpus > 1 else ""
    return DeviceChoice(
        "cpu", f"the model takes {bytes_text(needed_bytes)}{of_each}; {_name(most)}{_free(most)}"
    )


def _name(card: Card) -> str:
    return card.name or f"a GPU of {_NAMES[card.vendor]}"


def _free(card: Card) -> str:
    if card.free_bytes is None or card.memory_bytes is None:
        return ""
    return f", {bytes_text(card.free_bytes)} of {bytes_text(card.memory_bytes)} free"


def _visible(cards: Sequence[Card], environ: Mapping[str, str]) -> list[Card]:
    """The cards that a runtime shows, in its order.

    A list of numbers or ids selects and orders; what follows a name that is none counts as hidden
    (CUDA C++ Programming Guide, "CUDA_VISIBLE_DEVICES").
    """
    shown = list(cards)
    for name in _VISIBLE[cards[0].vendor]:
        if name not in environ:
            continue
        chosen: list[Card] = []
        for word in environ[name].split(","):
            card = _card_of(word.strip(), shown)
            if card is None:
                break
            chosen.append(card)
        shown = chosen
    return shown


def _card_of(word: str, cards: Sequence[Card]) -> Card | None:
    if word.isascii() and word.isdigit():
        return cards[int(word)] if int(word) < len(cards) else None
    if not word or word == "-1":
        return None
    # A part of a card (MIG) is told by the id of its own, which says nothing of the card.
    return next((card for card in cards if card.uuid.startswith(word)), None) or (
        cards[0] if word.startswith("MIG-") else None
    )


def _torch_build() -> str | None:
    """`cuda`, `hip`, or "" for a build without GPUs; None where torch is not installed."""
    if (loaded := sys.modules.get("torch")) is not None:
        version = vars(loaded.version)
    else:
        found = importlib.util.find_spec("torch")
        if found is None or found.origin is None:
            return None
        file = Path(found.origin).parent / "version.py"
        # It is a list of constants; importing torch itself takes seconds.
        version = runpy.run_path(str(file)) if file.is_file() else {}
    return "hip" if version.get("hip") else "cuda" if version.get("cuda") else ""
