"""Sees torch read elements of a launch's output that nobody has written, in a run with `--suspect`.

`mark_undefined` has filled new memory of floats. Only tensors that a launch was given while they
held such elements are looked at.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from hypocenter.foreign.argument_facts import undefined_in
from hypocenter.foreign.caller import caller_of_now

#: Operations that read of a tensor what their other arguments choose.
_SELECTING = frozenset(
    {"aten::embedding", "aten::gather", "aten::index", "aten::index_select"}
    | {"aten::masked_select", "aten::take"}
)


class SeenReads:
    """The tensors that are looked at, by their storages; `tell` is told of the first read of each.

    It is given the number of the tensor, the operation and the line of the program.
    """

    def __init__(self, tell: Callable[[int, str, str], None]) -> None:
        self._tell = tell
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        #: In a launch, what torch reads is Triton's interpreter's business, or the recorder's.
        self.is_in_launch = False

    def look_at(self, tensor: Any, number: int) -> None:
        """A launch is given a tensor in which not everything was written."""
        self._numbers[tensor.untyped_storage()] = number

    @property
    def is_needed(self) -> bool:
        return not self.is_in_launch and len(self._numbers) > 0

    def note(
        self, operation: Any, args: tuple[Any, ...], keywords: dict[str, Any], result: Any
    ) -> None:
        """An operation of torch's has run.

        A read counts where one number comes of the whole tensor. Of any other result the part that
        was not written may be masked or cut off, as padding is.
        """
        name = str(operation._schema.name)
        if name in _SELECTING or not _is_one_number(result):
            return
        for tensor in _read_by(operation, args, keywords):
            number = self._numbers.get(tensor.untyped_storage())
            if number is not None and undefined_in(tensor, number, ""):
                del self._numbers[tensor.untyped_storage()]
                self._tell(number, name.removeprefix("aten::"), caller_of_now()[1])


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

    def hide() -> None:
        Watch.__torch_dispatch__ = hidden  # type: ignore[method-assign]

    return hide


def _is_one_number(result: Any) -> bool:
    """Whether an operation gave numbers alone, or tensors of one element."""
    parts = result if isinstance(result, list | tuple) else (result,)
    return bool(parts) and all(
        part.numel() == 1 if hasattr(part, "numel") else isinstance(part, int | float)
        for part in parts
    )


def _read_by(operation: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Iterator[Any]:
    """The tensors whose elements an operation reads: no views, nothing it writes."""
    for at, argument in enumerate(operation._schema.arguments):
        value = args[at] if at < len(args) else keywords.get(argument.name)
        if argument.alias_info is None:
            for part in value if isinstance(value, list | tuple) else (value,):
                if hasattr(part, "untyped_storage") and part.device.type in ("cpu", "cuda"):
                    yield part
