"""What the recorder needs of a launch and of a plan, which `device/` makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hypocenter.base.tensor import Tensor


class Launchable(Protocol):
    """What is recorded of a launch, which `device/launch.py` makes.

    `facts` are its arguments by the names of its contract, `given` as its kernel takes them.
    """

    kernel: str
    function: Any
    jit: Any
    device: str
    contract: Any
    facts: Mapping[str, Any]
    given: tuple[Any, ...]
    options: Mapping[str, Any]
    site: str
    caller: str

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...


class Planned(Protocol):
    """What is recorded of a plan, which `device/plan.py` makes: launches that run in order.

    `host_launches` are those of the CPU that some of them make. `graph` is the number of the graph
    that the next run replays, or 0; `tag` tells its marks from those of other plans.
    """

    name: str
    tag: int

    @property
    def device(self) -> str: ...

    @property
    def launches(self) -> Sequence[Launchable]: ...

    @property
    def host_launches(self) -> Sequence[Launchable]: ...

    @property
    def graph(self) -> int: ...

    @property
    def marks(self) -> Sequence[Any]: ...
