"""Traced launches: after each one the figures of what it wrote, and contents where they went wrong.

Of weights and tables it leaves figures, or a digest, when they are first read.

Slow by design: each launch is waited for. What is written lies in the folder of the recorder.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hypocenter.base.dtypes import Array, bf16_to_f32
from hypocenter.base.errors import UsageError
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, launch, memory
from hypocenter.record.contents import Snapshot
from hypocenter.record.events import Place, Statistics, Values
from hypocenter.record.keyed_digest import KeyedDigest
from hypocenter.record.recorder import Recorder, open_recorder
from hypocenter.record.ring import place_of
from hypocenter.record.trace_log import MAX_TENSOR_BYTES, TraceWriter
from hypocenter.settings.environment import trace_bytes

if TYPE_CHECKING:
    from hypocenter.device.launch import Launch

log = logging.getLogger("hypocenter.tracing")


#: Of one launch at most so many bytes of arguments are kept.
MAX_SNAPSHOT_BYTES = 16 << 20
#: After so many launches that spoilt something the later ones follow from the earlier ones.
MAX_FIRST = 4

#: Of a sketch (`record.events.Statistics`), and how many elements have signs of their own.
NUM_SKETCHES, _NUM_SIGNS = 8, 1 << 16

#: What fills undefined memory of a simulated GPU (`sim.memory.POISON`), as 16 and 32 bits.
_POISON = {2: 0xFFFF, 4: 0xFFFFFFFF}
_BITS = {2: np.uint16, 4: np.uint32}


@functools.lru_cache(maxsize=1)
def _tracer_of(recorder: Recorder) -> Tracer:
    return Tracer(recorder)


def open_tracer() -> Tracer:
    """The tracer of this process; raises UsageError when nothing is recorded."""
    recorder = open_recorder()
    if not isinstance(recorder, Recorder):
        raise UsageError(
            "launch mode traced writes into the folder of the run, but this run is not recorded; "
            "leave HYPO_RECORD away, or name a folder by HYPO_RUN_DIR"
        )
    try:
        return _tracer_of(recorder)
    except OSError as error:
        raise UsageError(
            f"launch mode traced cannot write into {recorder.folder}: {error.strerror or error}; "
            "name another folder by HYPO_RUN_DIR"
        ) from error


class Tracer:
    """Runs launches one by one and writes down what they did."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._writer = TraceWriter(recorder.folder, trace_bytes())
        self._num_first = 0
        self._has_warned = False
        self._spoilt: dict[int, int] = {}  # tensor to what was wrong with it when last seen
        self._known: set[int] = set()  # of the model's tensors those whose contents are told
        recorder.catalogue.reads_parts = True

    def walk(
        self, launches: Sequence[tuple[int, Launch]], header: memoryview, place_word: int
    ) -> None:
        """As `launch.walk`, looking at what each launch did."""
        place = place_of(place_word) or Place(0, 0, 0)
        # What no launch writes is a weight, or an input of the step.
        changing = {
            tensor.allocation.id for _, each in launches for _, tensor in _written_tensors(each)
        }
        for number, each in launches:
            run = functools.partial(launch.walk, ((number, each),), header, place_word)
            self._one(each, run, Place(place.step, place.plan, place.launch + number), changing)

    def _one(
        self, launch: Launch, run: Callable[[], None], place: Place, changing: set[int]
    ) -> None:
        counts = self._counts(launch)
        held = list(self._read_inputs(launch, changing))
        self._look_at_model(launch, changing, place)
        for name, tensor in _written_tensors(launch):
            number = self._recorder.catalogue.tensor(tensor)
            if number not in self._spoilt and _num_live(launch, name, counts) is None:
                # What is wrong with a cache before anybody has written to it is nobody's doing.
                self._spoilt[number] = self._figures(launch, name, tensor, counts, place)[1]
        self._write(
            self._writer.recent, Snapshot(place.step, place.plan, place.launch, tuple(held))
        )
        run()
        is_first = False
        for name, tensor in _written_tensors(launch):
            statistics, num_wrong = self._figures(launch, name, tensor, counts, place)
            if statistics is None:
                continue
            self._write(self._writer.statistics, statistics)
            is_live = _num_live(launch, name, counts) is not None
            is_first |= num_wrong > (0 if is_live else self._spoilt.get(statistics.tensor, 0))
            self._spoilt[statistics.tensor] = num_wrong
        if is_first and self._num_first < MAX_FIRST:
            self._num_first += 1
            self._write(
                self._writer.first, Snapshot(place.step, place.plan, place.launch, tuple(held))
            )
            self._read_too(launch, counts, place)

    def _write(self, write: Callable[[Any], None], record: Any) -> None:
        """What cannot be written is told once and left out; the run goes on."""
        try:
            write(record)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("this run is traced in part: %s", error.strerror or error)

    def _look_at_model(self, launch: Launch, changing: set[int], place: Place) -> None:
        """What weights and tables hold, when the first launch reads them."""
        for tensor in launch.tensors.values():
            if tensor.owner != "model" or tensor.allocation.id in changing:
                continue
            number = self._recorder.catalogue.tensor(tensor)
            if number in self._known:
                continue
            self._known.add(number)
            if hasattr(tensor.data, "parts"):
                statistics = _figures_of_packed(tensor, place, number)
            else:
                statistics, _ = self._figures(launch, "", tensor, None, place)
            if statistics is not None:
                self._write(self._writer.statistics, statistics)

    def _read_too(self, launch: Launch, counts: Array | None, place: Place) -> None:
        """The figures of what a launch has read: was it wrong already?"""
        written = {name for name, _ in _written_tensors(launch)}
        for name, tensor in launch.tensors.items():
            if name not in written:
                statistics, _ = self._figures(launch, name, tensor, counts, place)
                if statistics is not None:
                    self._write(self._writer.statistics, statistics)

    def _read_inputs(self, launch: Launch, changing: set[int]) -> Iterator[Values]:
        """What the arguments of a launch hold before it; without weights."""
        room = MAX_SNAPSHOT_BYTES
        index = {arg.name for arg in getattr(launch.contract, "args", ()) if arg.index is not None}
        for name, tensor in launch.tensors.items():
            if name not in index and tensor.allocation.id not in changing:
                continue
            values = _read(tensor, room)
            if values is not None:
                room -= values.nbytes
                number = self._recorder.catalogue.tensor(tensor)
                yield Values(number, tensor.dtype.name, values.shape, values.tobytes())

    def _counts(self, launch: Launch) -> Array | None:
        counts = launch.facts.get("counts")
        return copies.to_host(counts) if isinstance(counts, Tensor) else None

    def _figures(
        self, launch: Launch, name: str, tensor: Tensor, counts: Array | None, place: Place
    ) -> tuple[Statistics | None, int]:
        """The figures of a tensor's live rows, and how many of them are wrong."""
        values = _read(tensor, MAX_TENSOR_BYTES)
        if values is None:
            number = self._recorder.catalogue.tensor(tensor)
            return _figures_of_blocks(tensor, place, number), 0
        live = _num_live(launch, name, counts)
        if live is not None:
            values = values[: max(live, 0)]
        number = self._recorder.catalogue.tensor(tensor)
        return statistics_of(values, tensor.dtype, place, number)


def _num_live(launch: Launch, name: str, counts: Array | None) -> int | None:
    ask = getattr(launch.contract, "num_live", None)
    if ask is None or counts is None:
        return None
    found: int | None = ask(name, counts, launch.facts)
    return found


def _written_tensors(launch: Launch) -> list[tuple[str, Tensor]]:
    names = getattr(launch.contract, "written", ())
    return [(name, tensor) for name, tensor in launch.tensors.items() if name in names]


def _read(tensor: Tensor, room: int) -> Array | None:
    """A tensor's elements in its shape; None for packed weights and for more than `room` bytes."""
    if tensor.dtype.is_quantised or tensor.extent_bytes > min(room, MAX_TENSOR_BYTES):
        return None
    # What was freed, or reaches beyond its memory, is for others to say.
    if tensor.shape and (tensor.is_contiguous or tensor.device == "cpu"):
        return copies.peek(tensor)
    span = tensor.extent_bytes // tensor.dtype.block_bytes
    whole = Tensor(
        tensor.name,
        tensor.owner,
        tensor.dtype,
        (span,),
        (1,),
        tensor.offset,
        tensor.allocation,
        tensor.data,
    )
    flat = copies.peek(whole)
    if flat is None:
        return None
    steps = [stride * flat.itemsize for stride in tensor.strides]
    return np.array(np.lib.stride_tricks.as_strided(flat, tensor.shape, steps))


def _figures_of_packed(tensor: Tensor, place: Place, number: int) -> Statistics | None:
    """A packed weight by the digest of its arrays alone; None for what is too large to be read.

    Numbers beside them are arguments of the launch, and recorded as such.
    """
    allocation, digest = tensor.allocation, KeyedDigest()
    parts = [part for part in tensor.data.parts if getattr(part, "ndim", 0) or _is_placed(part)]
    sizes = [part.num_bytes if _is_placed(part) else part.nbytes for part in parts]
    if sum(sizes) > MAX_TENSOR_BYTES:
        return None
    for part, num_bytes in zip(parts, sizes, strict=True):
        if not _is_placed(part):
            digest.add(np.ascontiguousarray(part).tobytes())
            continue
        offset = part.address - allocation.address
        view = Tensor("", "", DType.U8, (num_bytes,), (1,), offset, allocation, None)
        data = copies.peek(view)
        if data is None:
            return None
        digest.add(data.tobytes())
    return _digest_alone(digest, place, number)


def _figures_of_blocks(tensor: Tensor, place: Place, number: int) -> Statistics | None:
    """A KV cache of blocks by the digest of its bytes alone; None for other tensors and for what
    is too large to be read."""
    are_blocks = tensor.dtype.is_quantised and not hasattr(tensor.data, "parts")
    if not are_blocks or tensor.extent_bytes > MAX_TENSOR_BYTES:
        return None
    data = copies.peek(memory.as_bytes(tensor))
    return None if data is None else _digest_alone(KeyedDigest(data.tobytes()), place, number)


def _digest_alone(digest: KeyedDigest, place: Place, number: int) -> Statistics:
    return Statistics(
        place=place,
        tensor=number,
        digest=digest.text(),
        low=0.0,
        high=0.0,
        mean=0.0,
        rms=0.0,
        num_nan=0,
        num_inf=0,
        is_digest_alone=True,
    )


def _is_placed(part: Any) -> bool:
    """Whether an array of a packed weight lies on a device."""
    return hasattr(part, "address")


def statistics_of(values: Array, dtype: DType, place: Place, tensor: int) -> tuple[Statistics, int]:
    """Figures of `values` (16-bit floats as their bits), and how many elements are wrong.

    Wrong are NaN, undefined memory (which is NaN to a kernel) and +infinity; -infinity is what a
    mask writes.
    """
    num_poisoned = 0
    raw = np.ascontiguousarray(values)
    floats = raw
    if dtype is DType.F16:
        floats = raw.view(np.float16)
    elif dtype is DType.BF16:
        floats = bf16_to_f32(raw.view(np.uint16))
    num_nan = num_inf = num_below = num_wrong = 0
    first: tuple[int, ...] | None = None
    finite = floats
    if floats.dtype.kind == "f":
        num_poisoned = int((raw.view(_BITS[raw.itemsize]) == _POISON[raw.itemsize]).sum())
        is_finite = np.isfinite(floats)
        num_nan = int(np.isnan(floats).sum())
        num_inf = int(floats.size - is_finite.sum()) - num_nan
        num_below = int(np.isneginf(floats).sum())
        num_wrong = num_nan + num_inf - num_below
        if num_nan or num_inf:
            at = np.unravel_index(int((~is_finite).argmax()), floats.shape)
            first = tuple(int(i) for i in at)
            finite = floats[is_finite]
    finite = finite.astype(np.float64).reshape(-1)
    count = max(finite.size, 1)
    record = Statistics(
        place=place,
        tensor=tensor,
        digest=KeyedDigest(raw.tobytes()).text(),
        low=float(finite.min(initial=math.inf)) if finite.size else 0.0,
        high=float(finite.max(initial=-math.inf)) if finite.size else 0.0,
        mean=float(finite.sum() / count),
        rms=math.sqrt(float((finite * finite).sum() / count)),
        num_nan=num_nan,
        num_inf=num_inf,
        num_poisoned=num_poisoned,
        num_below=num_below,
        first_nonfinite=first,
        sketch=_sketch(floats),
    )
    return record, num_wrong


def _sketch(values: Array) -> tuple[float, ...]:
    """NUM_SKETCHES sums of the finite elements with fixed signs, over the root of their number."""
    flat = np.nan_to_num(values.reshape(-1), copy=True, nan=0.0, posinf=0.0, neginf=0.0)
    if not flat.size:
        return ()
    sums = np.zeros(NUM_SKETCHES)
    for start in range(0, flat.size, _NUM_SIGNS):
        part = flat[start : start + _NUM_SIGNS].astype(np.float64)
        signs = _signs()[:, : part.size]
        # Blocks of signs that repeat would hide elements that change places between blocks.
        sums += np.roll(signs @ part, start // _NUM_SIGNS)
    return tuple(float(number) for number in sums / math.sqrt(flat.size))


@functools.cache
def _signs() -> Array:
    """Signs [NUM_SKETCHES, _NUM_SIGNS], the same in every run and version."""
    bits = hashlib.shake_256(b"hypocenter sketch").digest(NUM_SKETCHES * _NUM_SIGNS // 8)
    ones = np.unpackbits(np.frombuffer(bits, np.uint8)).reshape(NUM_SKETCHES, _NUM_SIGNS)
    return 2.0 * ones - 1.0
