"""The worker that has the model, the spare one that takes its place, and the keeper of weights.

A start takes seconds before a model is looked at: Python, its packages and the GPU's context. The
spare has them behind it. The keeper has a GPU's weights and KV cache in memory that others map. It
runs none of our kernels, so it outlives what workers die of. There the spare has the kernels and
graphs as well, over the same memory, and stands by. On a CPU it has neither the model nor memory
for a KV cache: the cache folder has the weights (`model/tensors/packed_weights.py`).

Workers leave each other blocks of the KV cache: on a CPU in memory that the server has, on a GPU
where they lie, and the server has what tells of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec

from hypocenter.base.errors import NotShareable, StaleLayout
from hypocenter.server.operating.log import tell
from hypocenter.server.worker_life import KEEPER, Orders, WorkerLife
from hypocenter.settings.cache_folder import forget_blocks_of
from hypocenter.watch.child import Ended
from hypocenter.wire.messages import (
    NO_REQUEST,
    Failed,
    KeptWeights,
    Loading,
    Ready,
    ServedModel,
    StandingBy,
    ToServer,
    WeightsWhole,
)

#: Of the process that waits to take over.
SpareState = Literal["none", "without a model", "loading", "standing by"]

#: Spares in a row that may end while they wait; then there is none until a worker is ready again.
_MAX_LOST_SPARES = 3


class BlockMemory:
    """Memory that workers map one after the other; nothing of it is read here."""

    def __init__(self) -> None:
        self._file: int | None = None

    @property
    def path(self) -> str:
        """For a process of the same user, while this one lives; empty where there is no such thing.

        A file descriptor has no name that could stay behind.
        """
        if self._file is None and hasattr(os, "memfd_create"):
            self._file = os.memfd_create("hypocenter-blocks")
        return "" if self._file is None else f"/proc/{os.getpid()}/fd/{self._file}"

    def forget(self) -> None:
        """Nobody is to read what is there, and its room is given back."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class WorkerLine:
    """Starts workers, one after the other; `current` is the one that has the model or gets it.

    `on_message` hears the current one; `on_late` is called when it is past a deadline, and
    `on_ended` when it is gone, or when the weights that it waits for cannot be loaded. `on_left` is
    that of `WorkerLife`. `numbers` are those of its processes, shared where there are several
    lines.
    """

    def __init__(
        self,
        orders: Orders,
        on_message: Callable[[ToServer], None],
        on_late: Callable[[float], None],
        on_ended: Callable[[Ended | Exception], None],
        on_left: Callable[[Path, Ended], None],
        numbers: Iterator[int] | None = None,
    ) -> None:
        self._orders = orders
        self._on_message, self._on_late = on_message, on_late
        self._on_ended, self._on_left = on_ended, on_left
        self._numbers = itertools.count(1) if numbers is None else numbers
        self.current: WorkerLife | None = None
        self._spare: WorkerLife | None = None
        self._num_lost_spares = self._num_begun = 0
        #: The number of the spare that said so last.
        self._stands_by = 0
        #: Of the worker that had the model last.
        self._last_pid: int | None = None
        self._keeper: WorkerLife | None = None
        self._kept: KeptWeights | None = None
        #: Whether all that the keeper has is there, and a worker that is ready before it is.
        self._is_whole = False
        self._early: Ready | None = None
        #: Whether the weights are to be had from a keeper.
        config = orders.config
        is_on_gpu = config.device.partition(":")[0] in ("cuda", "hip")
        # What the host has of a model each worker packs itself, and the GPU's part with it.
        self._is_shared = is_on_gpu and not config.num_host_layers
        is_left = is_on_gpu or config.device == "cpu"
        self._keeps_blocks = is_left and config.prefix_cache and config.launch_mode == "off"
        self._blocks = BlockMemory()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False

    @property
    def spare_pid(self) -> int | None:
        """The process that waits to take over, if there is one."""
        return self._spare.pid if self._spare else None

    @property
    def spare_state(self) -> SpareState:
        """How far the process is that waits to take over."""
        if self._spare is None:
            return "none"
        if not self._spare.has_begun:
            return "without a model"
        return "standing by" if self._stands_by == self._spare.number else "loading"

    @property
    def keeper_pid(self) -> int | None:
        """The process that has the weights, if there is one."""
        return self._keeper.pid if self._keeper else None

    async def start_next(self) -> None:
        """Have another worker load the model; that of before is gone."""
        if self._is_shared and self._keeper is None:
            self._kept, self._is_whole = None, False
            self._keeper = self._make(self._hear_keeper, self._note_keeper_end, KEEPER)
            await self._keeper.start()
            self._keeper.begin(None)
        life, self._spare = self._spare, None
        if life is None:
            life = self._make(self._hear, self._note_end, self._orders.worker)
            self.current = life
            await life.start()
        self.current = life
        if life.has_begun:
            self._num_begun += 1
            life.take_over(self._block_memory())
        elif self._kept is not None or not self._is_shared:
            self._hand_over()

    def forget_blocks(self) -> None:
        """What workers have left of the KV cache is in doubt; the next one begins with nothing of
        it, and with what others wrote to disk."""
        self._blocks.forget()
        if self._orders.config.disk_cache is not None and self._last_pid is not None:
            with contextlib.suppress(OSError):
                forget_blocks_of(Path(self._orders.config.disk_cache), self._last_pid)

    def forget_weights(self) -> None:
        """What a keeper has is in doubt; the next worker gets what another one reads anew."""
        if self._keeper is not None:
            self._keeper.kill()
            self._drop_keeper()

    def start_spare(self) -> None:
        """Have one ready for when the current one ends."""
        self._num_lost_spares = 0
        if self._spare is None and self._orders.has_spare:
            self._begin(self._start_spare())

    async def stop(self, seconds: float) -> None:
        """End all of them."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        lives = [life for life in (self._spare, self.current, self._keeper) if life is not None]
        await asyncio.gather(*(life.stop(seconds) for life in lives))
        self._blocks.forget()

    def _make(
        self,
        hear: Callable[[int, ToServer], None],
        note_end: Callable[[int, Ended | Exception], None],
        program: tuple[str, ...],
    ) -> WorkerLife:
        number = next(self._numbers)
        return WorkerLife(
            number,
            self._orders,
            functools.partial(hear, number),
            functools.partial(self._note_late, number),
            functools.partial(note_end, number),
            self._on_left,
            program,
        )

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_spare(self) -> None:
        self._spare = spare = self._make(self._hear, self._note_end, self._orders.worker)
        await spare.start()
        # Where one ended that was to stand by, there may be no room for it beside the worker.
        if self._kept is not None and not self._num_lost_spares and self._spare is spare:
            spare.begin(self._kept, "", self._orders.config, waits=True)

    def _is_current(self, number: int) -> bool:
        return self.current is not None and self.current.number == number

    def _hear(self, number: int, message: ToServer) -> None:
        if not self._is_current(number):
            self._hear_spare(number, message)
            return
        if isinstance(message, Ready):
            if self._orders.config.kv_tokens is None:
                self._note_cache(message.facts)
            if self._is_shared and not self._is_whole:
                self._early = message
                return
        self._on_message(message)

    def _hear_spare(self, number: int, message: ToServer) -> None:
        match message:
            case StandingBy():
                self._stands_by = number
                said = f"worker {number} stands by, after {message.seconds:.1f} s"
                tell(logging.INFO, "spare_ready", said, seconds=round(message.seconds, 3))
            case Failed() if message.id == NO_REQUEST:
                tell(logging.WARNING, "spare_failed", f"a spare worker ends: {message.message}")
            case _:
                pass

    def _note_cache(self, facts: ServedModel) -> None:
        """Workers to come get a KV cache as large as this one's, whatever is free by then."""
        num_tokens = facts.num_blocks * facts.block_size
        config = replace(self._orders.config, kv_tokens=num_tokens)
        self._orders = replace(self._orders, config=config)

    def _note_late(self, number: int, seconds: float) -> None:
        if self._is_current(number):
            self._on_late(seconds)

    def _note_end(self, number: int, ended: Ended | Exception) -> None:
        if self._is_current(number):
            self._last_pid = self.current.pid if self.current else None
            self.current = self._early = None
            self._on_ended(ended)
        elif self._spare is not None and self._spare.number == number and not self._is_stopping:
            self._spare = None
            self._num_lost_spares += 1
            if self._num_lost_spares < _MAX_LOST_SPARES:
                self._begin(self._start_spare())
            else:
                message = f"{self._num_lost_spares} spare workers ended; there is none now"
                tell(logging.WARNING, "no_spare", message)

    def _hear_keeper(self, number: int, message: ToServer) -> None:
        match message:
            case Loading():
                self._on_message(message)
            case KeptWeights():
                self._kept = message
                self._hand_over()
            case WeightsWhole():
                self._is_whole = True
                early, self._early = self._early, None
                if early is not None:
                    self._on_message(early)
            case Failed() if message.kind == StaleLayout.__name__:
                said = f"the worker begins anew, and waits for the weights: {message.message}"
                tell(logging.WARNING, "layout_stale", said)
                self._begin_anew()
            case Failed() if message.kind == NotShareable.__name__:
                said = f"each worker reads the weights anew: {message.message}"
                tell(logging.WARNING, "no_keeper", said)
                self._is_shared = False
                self._hand_over()
            case Failed():
                self._on_message(msgspec.structs.replace(message, id=NO_REQUEST))
            case _:
                pass

    def _begin_anew(self) -> None:
        """Without this keeper, and with another worker."""
        self._drop_keeper()
        waiting, self.current, self._early = self.current, None, None
        if waiting is not None:
            waiting.kill()
            self._num_begun = 0
            self._begin(self.start_next())

    def _hand_over(self) -> None:
        if self.current is not None:
            config, is_first = self._orders.config, self._num_begun == 0
            self.current.begin(self._kept, self._block_memory(), config, is_first=is_first)
            self._num_begun += 1

    def _block_memory(self) -> str:
        return self._blocks.path if self._keeps_blocks else ""

    def _note_keeper_end(self, number: int, ended: Ended | Exception) -> None:
        if self._keeper is None or self._keeper.number != number:
            return
        was_needed, had_memory = self._is_shared and not self._is_whole, self._kept is not None
        self._drop_keeper()  # the next worker gets another one; this one has its memory still
        if self._is_stopping or not self._is_shared:
            return
        if was_needed and self.current is not None:
            waiting, self.current, self._early = self.current, None, None
            waiting.kill()
            self._on_ended(ended)
        elif had_memory:
            message = "the keeper of the weights ended; the next worker reads them anew"
            tell(logging.WARNING, "keeper_ended", message)

    def _drop_keeper(self) -> None:
        """Nobody is to map its memory any more; who stands by over that gives way to another."""
        self._keeper = self._kept = None
        self._blocks.forget()
        if self._spare is not None and self._spare.has_begun:
            self._spare.kill()
            self._spare = None
            if not self._is_stopping:
                self._begin(self._start_spare())
