"""Which model a request gets, and which one makes room for it.

A model is loaded when a request names it. One model is loaded at a time. Where that needs room, the
one goes that was used longest ago: at once if it answers nobody, else as soon as it does not. What
comes for it meanwhile waits until it is loaded again. A pinned one never goes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from starlette.requests import Request

from hypocenter.base.errors import ModelTooLarge, OutOfMemory
from hypocenter.base.wording import count_text
from hypocenter.server.answers import ModelCard, ModelMeta, ModelStatus
from hypocenter.server.api_error import ApiError
from hypocenter.server.bodies.orders import served_name
from hypocenter.server.fleet.replica import CannotStart
from hypocenter.server.hosting.host import Host
from hypocenter.server.operating.log import tell
from hypocenter.server.routes import STEP_SECONDS, Service

_LOOK_SECONDS, _FILE_SECONDS = 0.5, 2.0
#: After a failed attempt the same file is not tried again for so long.
_RETRY_SECONDS = 30.0
#: Errors of a worker that another model's end may help.
_OF_MEMORY = frozenset({ModelTooLarge.__name__, OutOfMemory.__name__})


class Hosting:
    """The models of `hosts`, of which at most `max_loaded` are loaded at once; 0: any number.

    Without `loads_on_demand` there is one, which whoever starts the server loads.
    """

    def __init__(
        self, hosts: Sequence[Host], max_loaded: int = 0, *, loads_on_demand: bool = True
    ) -> None:
        assert loads_on_demand or len(hosts) == 1, "all but one would never be loaded"
        self.hosts, self.loads_on_demand = tuple(hosts), loads_on_demand
        self._by_name = {name: host for host in hosts for name in host.terms.all_names}
        self._of_adapter = {name: host for host in hosts for name in host.terms.adapter_names}
        self._max_loaded = max_loaded
        self._is_loading = asyncio.Lock()
        #: Set whenever a request has been answered, or a model was unloaded.
        self._changed = asyncio.Event()
        self._tasks: dict[Host, asyncio.Task[None]] = {}

    @property
    def is_ready(self) -> bool:
        """Whether a request would be taken: all models can be loaded, or some are."""
        return any(host.state != "failed" for host in self.hosts)

    def find_stuck(self) -> list[str]:
        """The names of loaded models of which no worker is ready, or whose step takes too long."""
        found = []
        for host in self.hosts:
            supervisor = host.service.supervisor
            seconds = supervisor.seconds_in_step() if host.is_loaded else None
            is_slow = seconds is not None and seconds > STEP_SECONDS
            if host.is_loaded and (is_slow or not supervisor.is_ready):
                found.append(host.name)
        return found

    # -- who is asked ------------------------------------------------------------------------------

    async def choose(self, request: Request, name: str) -> Service:
        """The service of a model by one of its names, loaded; it stays so until the request is
        answered. Raises ApiError."""
        host = self._of(name)
        if host.service.is_draining:
            raise ApiError(503, "the server is shutting down", kind="unavailable_error")
        if host.num_held >= host.service.max_open:
            host.service.metrics.count("refused")
            raise ApiError(
                429,
                f"{host.num_held} requests wait for {host.name} or are answered, at most "
                f"{host.service.max_open} may; try again in a moment",
                kind="rate_limit_error",
                code="queue_full",
                retry=True,
            )
        host.num_held += 1
        request.state.until_answered.callback(self._let_go, host)
        if not host.is_loaded or host.is_leaving:
            await self._wait_for(host)
        else:
            host.num_served += 1
        request.state.until_answered.callback(self._note_answered, host)
        host.last_used = time.monotonic()
        return host.service

    def require_loaded(self, name: str) -> Service:
        """The service of a model that is loaded already. Raises ApiError."""
        host = self._of(name)
        if not host.is_loaded:
            raise ApiError(
                503,
                f"the model {host.name!r} is {host.state}; POST /models/load, or a request for an "
                "answer, loads it",
                kind="unavailable_error",
                code="model_not_loaded",
            )
        return host.service

    def cards(self) -> list[ModelCard]:
        """What is told of each model, under each of its names."""
        named = [_card(host, name) for name, host in self._by_name.items()]
        return named + [_card(host, name, host.name) for name, host in self._of_adapter.items()]

    def card(self, name: str) -> ModelCard:
        """What is told of the model of that name. Raises ApiError."""
        host = self._of(name)
        return _card(host, name, host.name if name in self._of_adapter else None)

    # -- what is loaded ----------------------------------------------------------------------------

    async def load(self, name: str) -> None:
        """Load a model, and wait for that, however soon it goes again. Raises ApiError."""
        host = self._of(name)
        if not host.is_loaded:
            await self._bring(host, is_asked_for=True)

    async def unload(self, name: str, *, is_forced: bool = False) -> None:
        """Unload a model, and wait for that. Raises ApiError where it answers somebody and this is
        not forced."""
        host = self._of(name)
        if host.num_served and not is_forced:
            raise ApiError(
                409,
                f"{host.name} answers {count_text(host.num_served, 'request')}; wait, or send "
                '"force": true, which ends them with an error',
                code="model_in_use",
            )
        async with self._is_loading:
            if host.is_loaded:
                await host.unload("it was asked for")
                self._changed.set()

    async def run(self) -> None:
        """Load what is pinned; then unload what nobody asks for, until this is cancelled.

        The one model of a server is loaded already.
        """
        for host in self.hosts:
            if host.terms.is_pinned and not host.is_loaded:
                try:
                    await self._bring(host, is_asked_for=True)
                except ApiError:
                    continue  # it is told of, and hurts no other
        looked_at = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if is_due := time.monotonic() - looked_at >= _FILE_SECONDS:
                looked_at = time.monotonic()
            for host in self.hosts:
                await self._look_at(host, looks_at_file=is_due)

    async def stop(self, seconds: float) -> None:
        """End all processes."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.gather(*(host.stop(seconds) for host in self.hosts))

    def fail_all(self, reason: str) -> None:
        """End all that is open with an error."""
        refused = ApiError(503, reason, kind="unavailable_error")
        for host in self.hosts:
            for waiting in host.waiting:
                if not waiting.done():
                    waiting.set_exception(refused)
            host.service.supervisor.fail_all(reason)

    def _of(self, name: str) -> Host:
        if not name and len(self.hosts) == 1:
            return self.hosts[0]
        if not name:
            names = ", ".join(self._by_name)
            raise ApiError(
                400,
                f"model is missing, and several are served; name one of: {names}",
                code="model_missing",
                param="model",
            )
        known = self._by_name | self._of_adapter
        return known[served_name(name, tuple(known))]

    def _let_go(self, host: Host) -> None:
        host.num_held -= 1

    def _note_answered(self, host: Host) -> None:
        host.num_served -= 1
        host.last_used = time.monotonic()
        self._changed.set()

    async def _look_at(self, host: Host, *, looks_at_file: bool) -> None:
        if looks_at_file:
            # A file may lie on a disk of another machine.
            await asyncio.to_thread(host.look_at_file)
        # The one model of a server that has given up ends the server.
        if self.loads_on_demand and host.is_loaded and host.service.supervisor.has_given_up:
            await host.note_given_up()
            self._changed.set()
        seconds = time.monotonic() - host.last_used
        most = host.terms.idle_seconds
        is_idle = host.may_be_unloaded and not host.num_held
        if is_idle and most is not None and seconds >= most and not self._is_loading.locked():
            async with self._is_loading:
                if not host.num_held and host.is_loaded:
                    await host.unload(f"nobody asked for {seconds:.0f} s")
                    self._changed.set()

    async def _wait_for(self, host: Host) -> None:
        """Until it is loaded and serves this request, too, however soon it is to go again.

        Raises ApiError where it cannot be loaded.
        """
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        host.waiting.append(admitted)
        bringing = asyncio.ensure_future(self._bring(host))
        try:
            await asyncio.wait({bringing, admitted}, return_when=asyncio.FIRST_COMPLETED)
            if not admitted.done():
                await bringing
            await admitted
        except BaseException:
            if admitted.done() and not admitted.cancelled() and not admitted.exception():
                self._note_answered(host)
            raise
        finally:
            bringing.cancel()
            if admitted in host.waiting:
                host.waiting.remove(admitted)

    async def _bring(self, host: Host, *, is_asked_for: bool = False) -> None:
        """Load it, or wait for whoever does. Raises ApiError where that fails."""
        is_recent = time.monotonic() - host.failed_at < _RETRY_SECONDS
        if host not in self._tasks:
            if is_recent and host.is_file_as_it_failed and not is_asked_for:
                raise _cannot(host)
            task = asyncio.get_running_loop().create_task(self._load(host))
            self._tasks[host] = task
            task.add_done_callback(lambda task: self._tasks.pop(host, None))
        task = self._tasks[host]
        await asyncio.wait({task})  # who stops waiting does not end it for the others
        if task.cancelled():
            raise ApiError(503, "the server is shutting down", kind="unavailable_error")
        if (error := task.exception()) is not None:
            raise error if isinstance(error, ApiError) else _cannot(host) from error

    async def _load(self, host: Host) -> None:
        """Load it, with as much room made as it needs. Raises ApiError."""
        async with self._is_loading:
            if not host.is_loaded:
                self._require_file(host)
            while not host.is_loaded:
                while (victims := self._in_the_way_of(host)) is not None:
                    await self._unload_one(victims, host)
                tell(logging.INFO, "loading", f"{host.name} is being loaded", model=host.name)
                try:
                    await host.load()
                except CannotStart as error:
                    others = self._others(host)
                    if error.kind not in _OF_MEMORY or not _leaving_order(others):
                        raise _cannot(host) from error
                    await self._unload_one(others, host)
                except Exception as error:
                    raise _cannot(host) from error
            host.admit_waiting()  # before another one may have it unloaded

    def _require_file(self, host: Host) -> None:
        """Raises ApiError for a file that is no model."""
        try:
            host.require_file()
        except CannotStart as error:
            raise _cannot(host) from error

    def _others(self, host: Host) -> list[Host]:
        return [other for other in self.hosts if other.is_loaded and other is not host]

    def _in_the_way_of(self, host: Host) -> list[Host] | None:
        """Loaded models of which one must go before that one is loaded; None: none need to."""
        others = self._others(host)
        if self._max_loaded and len(others) >= self._max_loaded:
            return others
        there = [other for other in others if other.terms.is_in_the_way_of(host.terms)]
        return there or None

    async def _unload_one(self, hosts: list[Host], wanted: Host) -> None:
        """Unload one of these, once it answers nobody. Raises ApiError where all are pinned."""
        if not (order := _leaving_order(hosts)):
            names = ", ".join(host.name for host in hosts)
            raise ApiError(
                503,
                f"there is no room for {wanted.name}: {names} are pinned",
                kind="unavailable_error",
                code="no_room",
            )
        leaving = order[0]
        leaving.is_leaving = True
        try:
            while leaving.is_loaded and leaving.num_served:
                self._changed.clear()
                await self._changed.wait()
            if leaving.is_loaded:
                await leaving.unload(f"it makes room for {wanted.name}")
        finally:
            leaving.is_leaving = False


def _leaving_order(hosts: list[Host]) -> list[Host]:
    """Those that may go: first who answers nobody, and the one used longest ago before others."""
    free = [host for host in hosts if host.may_be_unloaded]
    return sorted(free, key=lambda host: (host.num_served > 0, host.last_used))


def _cannot(host: Host) -> ApiError:
    return ApiError(
        503,
        f"the model {host.name!r} cannot be loaded: {host.error}",
        kind="unavailable_error",
        code="model_not_loadable",
        retry=False,
    )


def _card(host: Host, name: str, parent: str | None = None) -> ModelCard:
    facts = host.facts or host.service.supervisor.facts
    meta = None
    if facts is not None:
        meta = ModelMeta(
            architecture=facts.architecture,
            quantisation=facts.quantisation,
            n_ctx_train=facts.trained_length,
            n_params=facts.num_parameters,
            n_vocab=facts.vocab_size,
            size=facts.file_bytes,
            pooling=facts.pooling or None,
            n_embd=facts.embedding_size or None,
        )
    return ModelCard(
        id=name,
        parent=parent,
        created=host.service.started,
        owned_by="hypocenter",
        max_model_len=None if facts is None else facts.context_length,
        meta=meta,
        status=ModelStatus(host.state, host.terms.is_pinned, host.error, host.has_file_changed),
    )
