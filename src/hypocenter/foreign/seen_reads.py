"""Sees torch read elements of a launch's tensors that nobody has written, with `--suspect`.

`mark_undefined` has filled new memory of floats. Only tensors that a launch was given while they
held such elements are looked at, and what torch's operations make of them is followed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hypocenter.foreign.argument_facts import UNDEFINED
from hypocenter.foreign.caller import caller_of_now
from hypocenter.foreign.comparing.lineage import Lineage
from hypocenter.foreign.unwritten_masks import (
    CHOOSING,
    is_pointwise,
    name_of,
    result_mask,
)
from hypocenter.record.compared import SideOrigin

log = logging.getLogger("hypocenter.foreign")

#: Results that are followed at a time, and operations that are looked at in all.
MAX_FOLLOWED, MAX_NOTED = 512, 20_000
#: What makes a tensor without reading the one that it is like, or writes over all that was there.
_OVERWRITING = frozenset(
    {"fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"}
    | {"cauchy_", "geometric_", "log_normal_", "set_", "resize_"}
)
#: Of a tensor's place and layout, and not of what it holds.
_ABOUT = ("is_", "sym_", "_has_", "_is_", "size", "stride", "numel", "dim", "storage_offset")
#: Methods that read a tensor past torch's operations, and how such a read is told.
_DIRECT = {"__repr__": "print", "tolist": "tolist", "numpy": "numpy"}


@dataclass(frozen=True, slots=True)
class SeenRead:
    """`operation` has read `num_unwritten` of `num_elements` elements of a tensor, at `site`.

    `first` and `last` are indices of such. `is_decided`: one number came of it, or a comparison.
    """

    tensor: int
    operation: str
    site: str
    num_unwritten: int
    num_elements: int
    first: tuple[int, ...]
    last: tuple[int, ...]
    is_decided: bool

    def fields(self) -> dict[str, Any]:
        """Those of the event that tells of it."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class _Origin:
    """A tensor that a launch was given; `read` is the first read of it."""

    number: int
    layout: tuple[Any, Any, int]
    read: SeenRead | None = None
    is_done: bool = False


@dataclass(slots=True)
class _Followed:
    """A storage that holds what came of an origin: `mask` is flat, an entry for each element."""

    origin: _Origin
    mask: Any
    item_bytes: int


@dataclass(slots=True)
class SeenReads:
    """The tensors that are looked at, by their storages; `tell` is told of the first read of each,
    and of the first one that came to one number."""

    tell: Callable[[SeenRead], None]
    #: Whether operations are seen in this process.
    is_watching: ClassVar[bool] = False
    #: Called when there is something to look at.
    on_look: ClassVar[Callable[[], None]] = staticmethod(lambda: None)
    #: In a launch, what torch reads is Triton's interpreter's business, or the recorder's.
    is_in_launch: bool = False
    #: What came of the results of kernels that cast a pointer.
    lineage: Lineage = field(default_factory=lambda: Lineage(lambda: SeenReads.on_look()))
    _is_quiet: bool = False
    _num_noted: int = 0
    _origins: Any = field(default_factory=weakref.WeakKeyDictionary)
    _followed: Any = field(default_factory=weakref.WeakKeyDictionary)

    def look_at(self, tensor: Any, number: int) -> None:
        """A launch is given a tensor in which not everything was written."""
        layout = tensor.size(), tensor.stride(), tensor.storage_offset()
        self._origins[tensor.untyped_storage()] = _Origin(number, layout)
        SeenReads.on_look()

    def forget(self, tensor: Any) -> None:
        """A launch is given a tensor: what it holds from now on is the launch's business."""
        self._followed.pop(tensor.untyped_storage(), None)

    def origin_of(self, result: Any, other: Any) -> SideOrigin:
        """Where the other side of a comparison with a launch's result comes from."""
        return self.lineage.origin_of(result, other, is_watching=self.is_watching)

    @property
    def is_needed(self) -> bool:
        has_any = bool(self._origins or self._followed) or self.lineage.is_on
        return has_any and not (self.is_in_launch or self._is_quiet)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Within, torch reads for a method that is told of itself."""
        self._is_quiet = True
        try:
            yield
        finally:
            self._is_quiet = False

    def note(
        self, operation: Any, args: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        """An operation of torch's has run."""
        if self.lineage.is_on:
            self.lineage.note(operation, args, keywords, result)
        name = name_of(operation)
        if name.endswith("_like") or name.startswith(("new_", *_ABOUT)):
            return
        found = {
            id(tensor): seen
            for tensor in _read_by(operation, args, keywords)
            if (seen := self._unwritten(tensor)) is not None
        }
        written = list(_written_by(operation, args, keywords))
        if not found and not any(w.untyped_storage() in self._followed for w in written):
            return
        self._num_noted += 1
        masks = {key: mask for key, (mask, _, _) in found.items()}
        mask = self._mask_of_result(operation, args, keywords, result, masks) if found else None
        if found and (mask is None or bool(mask.any())):
            _, origin, tensor = next(iter(found.values()))
            is_elementwise = hasattr(result, "numel") and is_pointwise(operation)
            is_decided = _is_one_number(result) and not is_elementwise
            self._tell(origin, tensor, name, is_decided=is_decided and name not in CHOOSING)
        self._follow(mask, found, result, written)

    def note_direct(self, tensor: Any, name: str) -> None:
        """A method has read a whole tensor."""
        if self.lineage.is_on:
            self.lineage.note_direct(tensor, name)
        if (seen := self._unwritten(tensor)) is not None:
            self._tell(seen[1], tensor, name, is_decided=False)

    def _unwritten(self, tensor: Any) -> tuple[Any, _Origin, Any] | None:
        """The mask of a tensor that holds what nobody wrote, whose it is, and the tensor."""
        storage = tensor.untyped_storage()
        followed = self._followed.get(storage)
        if followed is not None and followed.item_bytes == tensor.element_size():
            mask = _view(followed.mask, tensor)
            return (mask, followed.origin, tensor) if bool(mask.any()) else None
        origin = self._origins.get(storage)
        if origin is None or origin.is_done or followed is not None:
            return None
        mask = _never_written(tensor)
        return (mask, origin, tensor) if bool(mask.any()) else None

    def _mask_of_result(
        self,
        operation: Any,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        result: Any,
        masks: dict[int, Any],
    ) -> Any:
        if self._num_noted > MAX_NOTED:
            return None
        try:
            return result_mask(operation, args, keywords, result, masks)
        except (RuntimeError, IndexError, TypeError, ValueError, AttributeError) as error:
            # A form of the operation that is not known: it is told of, and not followed.
            log.info("%s is not followed: %s", name_of(operation), error)
            return None

    def _follow(
        self, mask: Any, found: dict[int, tuple[Any, _Origin, Any]], result: Any, written: list[Any]
    ) -> None:
        """Keep which elements of a result hang on what nobody wrote."""
        origins = [origin for _, origin, _ in found.values() if not origin.is_done]
        parts = result if isinstance(result, list | tuple) else (result,)
        for part in (*parts, *written):
            if not hasattr(part, "untyped_storage"):
                continue
            is_known = mask is not None and mask.shape == part.shape and bool(origins)
            known = self._followed.get(part.untyped_storage())
            if known is None or known.item_bytes != part.element_size():
                known = self._new_followed(part, mask, origins[0]) if is_known else None
            if known is not None:
                region = _view(known.mask, part)
                region.copy_(mask) if is_known else region.fill_(False)

    def _new_followed(self, part: Any, mask: Any, origin: _Origin) -> _Followed | None:
        """None where nothing is to be followed: what is new was written whole."""
        storage, width = part.untyped_storage(), part.element_size()
        is_marked = storage in self._origins  # by its memory, which an operation in place leaves
        if len(self._followed) >= MAX_FOLLOWED or not (is_marked or bool(mask.any())):
            return None
        whole = part.as_strided((storage.nbytes() // width,), (1,), 0)
        flat = _never_written(whole) if is_marked else mask.new_zeros(whole.shape)
        self._followed[storage] = made = _Followed(origin, flat, width)
        return made

    def _tell(self, origin: _Origin, tensor: Any, operation: str, *, is_decided: bool) -> None:
        if origin.is_done or (origin.read is not None and not is_decided):
            return
        site = caller_of_now()[1]
        if (before := origin.read) is not None:
            facts = before.num_unwritten, before.num_elements, before.first, before.last
        else:
            facts = _facts(origin, tensor)
        origin.read = SeenRead(origin.number, operation, site, *facts, is_decided=is_decided)
        origin.is_done = is_decided
        self.tell(origin.read)


def watch_reads(
    torch: Any,
    seen: Callable[[], SeenReads | None],
    attempt: Callable[..., None],
    run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None,
) -> Callable[[], None]:
    """Have each operation of this thread noted, below autograd, from now on.

    `seen` is asked each time: nothing is looked at until a launch is recorded. `run` runs an
    operation, where somebody else looks at it too. What is returned is to be called once the
    program has loaded torch.compile.
    """
    mode: Any = torch.utils._python_dispatch.TorchDispatchMode
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not is_interpreted and not hasattr(mode, "ignore_compile_internals"):
        return lambda: None  # an older torch, which would compile nothing

    class Watch(mode):  # type: ignore[misc]
        @classmethod
        def ignore_compile_internals(cls) -> bool:
            """Else torch.compile would compile nothing; older versions of torch do not ask."""
            return True

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            keywords = kwargs or {}
            result = func(*args, **keywords) if run is None else run(func, args, keywords)
            if (looking := seen()) is not None and looking.is_needed:
                attempt(looking.note, func, args, keywords, result)
            return result

    hidden: Any = Watch.__torch_dispatch__
    plain = getattr(hidden, "__wrapped__", None)
    if plain is not None and "torch._dynamo" not in sys.modules:
        # Torch hides the method from its compiler, for which it loads that at the first operation:
        # seconds, in a program that compiles nothing.
        Watch.__torch_dispatch__ = plain  # type: ignore[method-assign]
    Watch().__enter__()
    watch_methods(torch, seen, attempt)

    def hide() -> None:
        Watch.__torch_dispatch__ = hidden  # type: ignore[method-assign]

    return hide


def watch_methods(
    torch: Any, seen: Callable[[], SeenReads | None], attempt: Callable[..., None]
) -> None:
    """Have reads noted that are made past torch's operations; those are seen by somebody else."""
    SeenReads.is_watching = True
    for method, name in _DIRECT.items():
        _watch_method(torch.Tensor, method, name, seen, attempt)


def _watch_method(
    kind: Any,
    method: str,
    name: str,
    seen: Callable[[], SeenReads | None],
    attempt: Callable[..., None],
) -> None:
    """Note a method that reads a tensor whole, and none of the operations that it is made of."""
    original = getattr(kind, method)

    @functools.wraps(original)
    def read(self: Any, *args: Any, **options: Any) -> Any:
        looking = seen()
        if looking is None or not looking.is_needed:
            return original(self, *args, **options)
        with looking.quiet():
            attempt(looking.note_direct, self, name)
            return original(self, *args, **options)

    setattr(kind, method, read)


def _is_one_number(result: Any) -> bool:
    """Whether an operation gave numbers alone, or tensors of one element."""
    parts = result if isinstance(result, list | tuple) else (result,)
    return bool(parts) and all(
        part.numel() == 1 if hasattr(part, "numel") else isinstance(part, int | float)
        for part in parts
    )


def _read_by(operation: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Iterator[Any]:
    """The tensors whose elements an operation reads: no views, nothing it writes over."""
    is_over = name_of(operation) in _OVERWRITING
    for at, argument in enumerate(operation._schema.arguments):
        value = args[at] if at < len(args) else keywords.get(argument.name)
        alias = argument.alias_info
        is_changed = alias is not None and alias.is_write and argument.name == "self"
        if alias is None or (is_changed and not is_over):
            yield from _tensors(value)


def _written_by(operation: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Iterator[Any]:
    for at, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[at] if at < len(args) else keywords.get(argument.name))


def _tensors(value: Any) -> Iterator[Any]:
    for part in value if isinstance(value, list | tuple) else (value,):
        if hasattr(part, "untyped_storage") and part.device.type in ("cpu", "cuda"):
            yield part


def _view(flat: Any, tensor: Any) -> Any:
    """The part of a storage's mask that a tensor lies on."""
    return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _never_written(tensor: Any) -> Any:
    """The mask of elements that hold what new memory was filled with."""
    width, byte = tensor.element_size(), sys.modules["torch"].uint8
    held = tensor.detach().contiguous().reshape(-1).view(byte).reshape(-1, width)
    return (held == UNDEFINED).all(1).reshape(tensor.shape)


def _facts(origin: _Origin, tensor: Any) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """How many of the elements that `tensor` covers of an origin were not written, of how many
    that has, and the first and last of them."""
    size, stride, offset = origin.layout
    storage = tensor.untyped_storage()
    whole = tensor.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
    touched = (whole == whole).new_zeros(whole.shape, dtype=(whole == whole).dtype)
    _view(touched, tensor).copy_(_never_written(tensor))
    shown = touched.as_strided(size, stride, offset)
    places = shown.nonzero()
    if not len(places):  # a part that the launch was not given
        return 0, shown.numel(), (), ()
    first, last = (tuple(places[end].tolist()) for end in (0, -1))
    return len(places), shown.numel(), first, last
