"""Has machine code see what the handler of a dispatch mode of the program's asks for.

While such a handler runs, torch leaves out all keys above that of modes, and so the machine code.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

_HANDLER = "__torch_dispatch__"


def see_below_modes(
    torch: Any, below: Callable[[], AbstractContextManager[None]]
) -> Callable[[], None]:
    """Have the handler of each mode that is entered run within `below()`; returns what undoes it.

    Where another mode is below it, what it asks for goes to that one first.
    """
    base: Any = torch.utils._python_dispatch.TorchDispatchMode
    enter = base.__enter__

    @functools.wraps(enter)
    def enter_mode(mode: Any) -> Any:
        if _HANDLER not in vars(mode):
            handle = getattr(mode, _HANDLER)

            @functools.wraps(handle)
            def handle_below(_: Any, *args: Any, **options: Any) -> Any:
                with below():
                    return handle(*args, **options)

            setattr(mode, _HANDLER, types.MethodType(handle_below, mode))
        return enter(mode)

    base.__enter__ = enter_mode

    def undo() -> None:
        base.__enter__ = enter

    return undo
