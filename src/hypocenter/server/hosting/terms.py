"""What is said of each model that a server has; reads no file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hypocenter.base.errors import UsageError
from hypocenter.settings.adapters import read_choice
from hypocenter.settings.config import EngineConfig

MAX_MODELS = 1000
_MAX_SECONDS = 1e6


@dataclass(frozen=True, kw_only=True)
class ModelTerms:
    """A model's file, and how it is served."""

    path: str
    #: By which clients call it; empty: by the name of its file.
    names: tuple[str, ...] = ()
    engine: EngineConfig
    #: Of replicas: a worker, or group of ranks, on each. Empty: one, on the engine's.
    devices: tuple[str, ...] = ()
    #: Whether it is loaded at the start, and never unloaded to make room or because nobody asks.
    is_pinned: bool = False
    #: After so many seconds without a request it is unloaded; None: it stays.
    idle_seconds: float | None = None
    #: Requests that may wait for it.
    max_queued: int = 512

    def __post_init__(self) -> None:
        if self.idle_seconds is not None and not 0 < self.idle_seconds <= _MAX_SECONDS:
            raise UsageError(
                f"--sleep-idle-seconds is {self.idle_seconds:g}, but must be above 0 and at most "
                f"{_MAX_SECONDS:g}, or -1: never"
            )
        if not 0 <= self.max_queued <= 1 << 20:
            raise UsageError(f"--max-queued is {self.max_queued}, but must be from 0 to {1 << 20}")

    @property
    def all_names(self) -> tuple[str, ...]:
        return self.names or (Path(self.path).stem,)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """By which clients call the model with one of its adapters."""
        return tuple(read_choice(text).name for text in self.engine.lora)

    @property
    def num_open(self) -> int:
        """The most answers that may be open: those that run at once, and those that wait."""
        num_replicas = max(len(self.devices), 1)
        return self.engine.max_batch_requests * num_replicas + self.max_queued

    def is_in_the_way_of(self, other: ModelTerms) -> bool:
        """Whether both cannot be loaded at once: on a GPU a cache of no given size takes the rest
        of its memory."""
        here, there = self._gpus(), other._gpus()
        takes_all = self.engine.kv_tokens is None or other.engine.kv_tokens is None
        return takes_all and bool(here & there)

    def _gpus(self) -> set[str]:
        devices = self.devices or (self.engine.device,)
        names = (device if ":" in device else f"{device}:0" for device in devices)
        return {name for name in names if name.startswith(("cuda:", "hip:"))}


def require_own_names(models: Iterable[ModelTerms]) -> None:
    """Raises UsageError where two models have one name, or there are too many."""
    owners: dict[str, str] = {}
    num_models = 0
    for terms in models:
        num_models += 1
        own = {*terms.all_names}
        for name in terms.adapter_names:
            if name in own:
                raise UsageError(
                    f"{terms.path} and an adapter of it have the name {name!r}; give the adapter "
                    "another one by --lora NAME=FILE"
                )
        for name in (*terms.all_names, *terms.adapter_names):
            if (other := owners.setdefault(name, terms.path)) != terms.path:
                raise UsageError(
                    f"two models have the name {name!r}, {other} and {terms.path}; give one of "
                    "them aliases of its own in the file of --config"
                )
    if num_models > MAX_MODELS:
        raise UsageError(f"{num_models} models are named, but at most {MAX_MODELS} are served")
