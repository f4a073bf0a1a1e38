"""Which devices are open, whose memory lies where on them, and the order of work in their streams.

Allocates and copies nothing: `memory.py` and `copies.py` do.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from hypocenter.base.errors import BadSetting
from hypocenter.base.package import caller_outside
from hypocenter.device.stream_order import StreamClocks, Ticks, Writes
from hypocenter.record.recorder import current, open_recorder
from hypocenter.settings.environment import launch_blocking

if TYPE_CHECKING:
    from hypocenter.device.backend import Backend, Room

_event_ids = itertools.count(1)
_backends: dict[str, Backend] = {}
# Who has the memory at an address, for messages of backends, which know no tensors.
_names: WeakKeyDictionary[Backend, dict[int, str]] = WeakKeyDictionary()
_orders: WeakKeyDictionary[Backend, StreamClocks] = WeakKeyDictionary()
# The stream that the caller is in, where that is not the default one.
_streams: dict[str, str] = {}

_DOOR = tuple(f"device/{name}.py" for name in ("devices", "copies", "inputs", "memory"))


def open_device(name: str) -> str:
    """Make the device `name` (cpu, cuda, hip, cuda:1, sim:mi300x) ready; returns its full name.

    A device is opened once per process, and with the first one its record. Raises UsageError when
    it is not to be had.
    """
    recorder = open_recorder()
    if name == "cpu" or name in _backends:
        if recorder.is_on:
            recorder.device(name, _backends[name].limits if name in _backends else None)
        return name
    if name.startswith("sim:"):
        from hypocenter.device.limits import simulated_name

        simulated_name(name)  # a misspelt name is told before anything about Triton
        from hypocenter.device.sim.sim import open_sim

        backend: Backend = open_sim(name, blocking=launch_blocking() is not None)
    elif name.startswith("emu:"):
        from hypocenter.device.limits import simulated_name

        simulated_name(name)
        from hypocenter.device.amd.emu import open_emu

        backend = open_emu(name, blocking=launch_blocking() is not None)
    elif name.split(":")[0] in ("cuda", "hip"):
        from hypocenter.device.gpu.torch_gpu import open_gpu

        backend = open_gpu(name)
    else:
        raise BadSetting("device", name, "must be cpu, cuda, hip, sim:NAME or emu:NAME")
    _register(name, backend)
    return name


def use_backend(backend: Backend) -> None:
    """Make a backend known under its name, in place of one opened before."""
    _register(backend.name, backend)


def _register(name: str, backend: Backend) -> None:
    names: dict[int, str] = {}
    _names[backend], _orders[backend] = names, StreamClocks()
    backend.name_of = functools.partial(_device_at, names)
    _backends[name] = backend
    current().device(name, backend.limits)


def backend_of(device: str) -> Backend:
    """The opened device of that name; the CPU has none."""
    return _backends[device]


def room_of(device: str) -> Room | None:
    """What a GPU may still be asked for; None of the CPU and where the host stands for a GPU."""
    return None if device == "cpu" else _backends[device].room()


def backend_captures(device: str) -> bool:
    """Whether plans of a device become graphs."""
    return device != "cpu" and _backends[device].captures


def name_at(device: str, address: int) -> str:
    """Tensor and owner of the allocation that begins at `address`, or the address itself."""
    return _device_at(names_of(device), address)


def _device_at(names: dict[int, str], address: int) -> str:
    return names.get(address, hex(address))


def names_of(device: str) -> dict[int, str]:
    """Address to tensor and owner of each allocation of an open device."""
    return _names[_backends[device]]


def order_of(device: str) -> StreamClocks:
    """The order of work on an open device."""
    return _orders[_backends[device]]


def is_open(device: str) -> bool:
    """Whether it is a GPU, real or simulated, that this process has opened."""
    return device in _backends


def has_wide_tiles(device: str) -> bool:
    """Whether an open device takes tiles for GPUs with much shared memory."""
    return device in _backends and _backends[device].has_wide_tiles


def open_names() -> tuple[str, ...]:
    """Names of the open devices, without the CPU."""
    return tuple(_backends)


@dataclass(slots=True, eq=False)
class DeviceEvent:
    """A place in a stream of a device; `handle` is the device's own."""

    id: int
    device: str
    handle: Any = None
    before: Ticks = field(default_factory=dict)


@contextlib.contextmanager
def stream(device: str, name: str) -> Iterator[None]:
    """Launches and copies in the block go to the stream `name`, which waits for no other."""
    before = _streams.get(device, "")
    with _backends[device].stream(name):
        _streams[device] = name
        try:
            yield
        finally:
            _streams[device] = before


def record_event(device: str) -> DeviceEvent:
    """An event at the end of the current stream of `device`."""
    event = DeviceEvent(next(_event_ids), device)
    _tell_event("record", event)
    event.handle = call_device(device, "record")
    event.before = _orders[_backends[device]].record_event(stream_of(device))
    return event


def wait_event(device: str, event: DeviceEvent) -> None:
    """What follows in the current stream of `device` runs after `event`."""
    _tell_event("wait", event)
    call_device(device, "wait", event.handle)
    _orders[_backends[device]].waits(stream_of(device), event.before)


def synchronise(device: str) -> None:
    """Wait for everything that was launched on `device`."""
    _tell_event("synchronise", DeviceEvent(0, device))
    call_device(device, "synchronise")
    _orders[_backends[device]].host_waited(None)


def stream_of(device: str) -> str:
    """The stream that the caller is in; empty for the default one."""
    return _streams.get(device, "")


def _tell_event(action: str, event: DeviceEvent) -> None:
    current().record_stream_event(action, event.id, stream_of(event.device), call_site())


def will_run(device: str, writes: Writes) -> None:
    """Launches that make these writes are about to be asked for in the current stream."""
    if device != "cpu":
        _orders[_backends[device]].wrote(writes, stream_of(device))


def call_device(device: str, call: str, *args: Any, **keywords: Any) -> Any:
    """A call of a device; what it reports is noted."""
    return record_errors(getattr(_backends[device], call), *args, **keywords)


def record_errors(call: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """`call` with these arguments; an error of it is told to the recorder on its way up."""
    try:
        return call(*args, **keywords)
    except Exception as error:
        current().record_failure(error)
        raise


def call_site() -> str:
    """File and line of the nearest caller outside the files of this door."""
    return caller_outside(*_DOOR)
