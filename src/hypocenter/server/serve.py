"""Runs the server: binds the port, starts the worker, answers until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import math
import re
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from hypocenter.base.errors import EXIT_ERROR, EXIT_OK, UsageError
from hypocenter.base.own_folder import own_folder
from hypocenter.base.wording import count_text
from hypocenter.server.app import make_app
from hypocenter.server.canary import Canary
from hypocenter.server.connection import (
    KEEP_ALIVE_SECONDS,
    MAX_HEADER_BYTES,
    connection_class,
    max_connections,
    tell_of_loop,
)
from hypocenter.server.faults import FaultKeeper
from hypocenter.server.fleet.slot_memory import SlotMemory
from hypocenter.server.handshake import handshake_class
from hypocenter.server.hosting.adapters import ServedAdapters
from hypocenter.server.hosting.host import Host
from hypocenter.server.hosting.hosting import Hosting
from hypocenter.server.hosting.terms import MAX_MODELS, ModelTerms, require_own_names
from hypocenter.server.intake.bodies import Bodies
from hypocenter.server.intake.strangers import is_host, is_loopback
from hypocenter.server.metrics import Metrics
from hypocenter.server.operating.heap import Heap, return_freed_blocks
from hypocenter.server.operating.listening import (
    BACKLOG,
    Certificate,
    address_of,
    bind,
    bound_unix,
)
from hypocenter.server.operating.log import tell
from hypocenter.server.operating.signals import Renewal, Terminal
from hypocenter.server.operating.traces import Traces, otlp_traces
from hypocenter.server.routes import Service
from hypocenter.server.supervisor import Supervisor
from hypocenter.server.worker_life import WORKER, Orders
from hypocenter.watch.child import Deadlines
from hypocenter.wire.messages import Loading, ServedModel

#: Between two looks at how far a worker's loading is, and at whether there will be any more.
_LOOK_SECONDS = 0.2
_STOP_SECONDS = 10.0
#: Addresses that a worker takes for its libraries, whether it has memory there or not.
_WORKER_BYTES = 512 << 20
#: Begins the name of the folder with the workers' sockets.
_FOLDER = "hypo-serve-"
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How the server listens and whom it answers; the engine has a configuration of its own."""

    models: tuple[ModelTerms, ...]
    #: Whether a model is loaded when it is asked for; else there is one, loaded all the time.
    loads_on_demand: bool = False
    #: How many may be loaded at once; 0: any number that has room.
    max_loaded: int = 0
    host: str = "127.0.0.1"
    port: int = 8080
    #: In place of host and port.
    unix_socket: Path | None = None
    certificate: Certificate | None = None
    root_path: str = ""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_key: str | None = field(default=None, repr=False)
    cors_origins: tuple[str, ...] = ()
    #: Names of the server besides those of this machine, as they stand in a Host.
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 32 << 20
    #: Of all bodies together that no worker has taken yet.
    max_bodies_bytes: int = 256 << 20
    grace_seconds: float = 30.0
    step_seconds: float = 120.0
    #: The first step of a worker, which compiles.
    first_step_seconds: float = 600.0
    has_spare: bool = True
    worker: tuple[str, ...] = WORKER
    unread_seconds: float = 600.0
    bundles: Path | None = None
    #: For prompts that clients save; None: they cannot.
    slot_save_path: Path | None = None
    #: Between two canaries; 0: none is asked.
    canary_minutes: float = 10.0
    #: Whether people may look at it in a browser.
    has_pages: bool = True
    #: Where traces are sent by OTLP over HTTP; empty: they are not made.
    traces_endpoint: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"--port is {self.port}, but must be from 0 to 65535")
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise UsageError(
                f"--root-path is {self.root_path!r}, but must be like /llm: a slash before each "
                "part, and no other signs than letters, digits and ._~-"
            )
        require_own_names(self.models)
        assert self.models, "there is nothing to serve"
        assert len(self.models) == 1 or self.loads_on_demand, "one is loaded all the time"
        if not 0 <= self.max_loaded <= MAX_MODELS:
            raise UsageError(
                f"--models-max is {self.max_loaded}, but must be from 0, any number, to "
                f"{MAX_MODELS}"
            )
        if not 1 << 20 <= self.max_bodies_bytes <= 1 << 40:
            raise UsageError(
                f"--body-memory is {self.max_bodies_bytes >> 20}, but must be from 1 to {1 << 20}"
            )
        for host in self.allowed_hosts:
            if not is_host(host):
                raise UsageError(f"--allowed-host {host!r} is no name or address")
        for name, value in (
            ("--grace", self.grace_seconds),
            ("--deadline", self.step_seconds),
            ("--timeout", self.unread_seconds),
        ):
            if not 0 < value <= 1e6:
                raise UsageError(f"{name} is {value}, but must be above 0 and at most 1e6")
        if not 0 <= self.canary_minutes <= 1e6:
            limit = "must be from 0, which asks none, to 1e6"
            raise UsageError(f"--canary-minutes is {self.canary_minutes}, but {limit}")


@dataclass(frozen=True)
class Listener:
    """Who is told what goes on: progress, and once that all is ready, and where."""

    report: Callable[[str, float], None] = lambda what, share: None
    #: The facts are those of the only model; None where there are several.
    announce: Callable[[str, ServedModel | None], None] = lambda url, facts: None


def serve(config: ServerConfig, listener: Listener, renewal: Renewal | None = None) -> int:
    """Serve until a signal ends it; returns the exit code. `renewal` is what SIGHUP reads again.

    Raises UsageError when there is nowhere to listen or too few files may be open, HypoError when
    no worker can be started.
    """
    max_connections()
    _require_addresses()
    renewal = renewal or Renewal()
    if config.certificate is not None:
        renewal.certificate, renewal.context = config.certificate, config.certificate.context()
    with (
        bound_unix(config.unix_socket)
        if config.unix_socket is not None
        else bind(config.host, config.port) as listening,
        own_folder(_FOLDER) as folder,
    ):
        return asyncio.run(_serve(config, listener, renewal, listening, folder))


def _require_addresses() -> None:
    """Raises UsageError where no worker could load its libraries, which say so in pages of text."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY and soft < _WORKER_BYTES:
        raise UsageError(
            f"the limit of memory is {soft >> 20} MiB (ulimit -v), but a worker needs "
            f"{_WORKER_BYTES >> 20} MiB and the model"
        )


async def _serve(
    config: ServerConfig,
    listener: Listener,
    renewal: Renewal,
    listening: socket.socket,
    folder: Path,
) -> int:
    traces = otlp_traces(config.traces_endpoint) if config.traces_endpoint else None
    hosting = _hosting(config, folder, renewal, traces)
    service, supervisor = hosting.hosts[0].service, hosting.hosts[0].service.supervisor
    renewal.set_keys = service.set_keys
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(tell_of_loop)
    server = _make_server(config, hosting, renewal, is_local=_is_local(listening))
    answering = asyncio.create_task(server.serve([listening]))
    looking: asyncio.Task[None] | None = None
    try:
        if not hosting.loads_on_demand:
            await _start(supervisor, listener, answering)
        if (supervisor.facts is not None or hosting.loads_on_demand) and not answering.done():
            is_tls = config.certificate is not None
            if not hosting.loads_on_demand:
                hosting.hosts[0].note_loaded()
            listener.announce(address_of(listening, is_tls=is_tls), supervisor.facts)
            looking = loop.create_task(hosting.run())
        return_freed_blocks()
        gc.freeze()  # modules stay; looking through them over and over held up everybody
        heap = Heap()
        while not answering.done() and not _is_over(hosting):
            await asyncio.wait({answering}, timeout=_LOOK_SECONDS)
            await heap.look()
    finally:
        if looking is not None:
            looking.cancel()
        server.should_exit = True
        await answering
        await hosting.stop(_STOP_SECONDS)
        if traces is not None:
            await asyncio.to_thread(traces.close)
    number = service.common.num_asked
    message = f"stopped after {count_text(number, 'request')} for an answer"
    tell(logging.INFO, "stopped", message, num_requests=number)
    return EXIT_ERROR if _is_over(hosting) else EXIT_OK


def _is_over(hosting: Hosting) -> bool:
    """Whether the only model cannot be served any more; another one of several may be."""
    return not hosting.loads_on_demand and hosting.hosts[0].service.supervisor.has_given_up


def _hosting(
    config: ServerConfig, folder: Path, renewal: Renewal, traces: Traces | None
) -> Hosting:
    """The models of a server, of which none is loaded yet."""
    loop = asyncio.get_running_loop()
    bodies, numbers = Bodies(config.max_bodies_bytes), itertools.count(1)
    first: Service | None = None
    sink = renewal.sink

    def on_bundle() -> None:
        if first is not None:
            first.metrics.count("bundle")

    faults = FaultKeeper(config.bundles, lambda: _call_soon(loop, on_bundle))
    hosts = []
    for terms in config.models:
        maker = _Maker(config, terms, folder, faults, numbers)
        supervisor, name = maker.supervisor(), terms.all_names[0]
        beside = None if first is None else first.metrics
        metrics = Metrics(supervisor, name, lambda: 0 if sink is None else sink.num_lost, beside)
        if first is None:
            most = min(config.max_body_bytes, bodies.most_of_client)
            service = first = Service(
                supervisor,
                metrics,
                terms.all_names,
                terms.path,
                most,
                terms.num_open,
                bodies,
                faults,
                has_pages=config.has_pages,
                traces=traces,
            )
        else:
            service = first.beside(supervisor, metrics, terms.all_names, terms.path, terms.num_open)
        service.adapters = ServedAdapters.of(terms.engine.lora)
        if config.slot_save_path is not None:
            num_slots = terms.engine.max_batch_requests
            service.slots = SlotMemory(config.slot_save_path / name, num_slots)
        maker.metrics = metrics
        canary = maker.canary if config.canary_minutes else None
        hosts.append(Host(terms, service, maker.supervisor, canary))
    return Hosting(hosts, config.max_loaded, loads_on_demand=config.loads_on_demand)


@dataclass
class _Maker:
    """Makes what a model has anew each time that it is loaded."""

    config: ServerConfig
    terms: ModelTerms
    folder: Path
    faults: FaultKeeper
    numbers: Iterator[int]
    metrics: Metrics | None = None

    def supervisor(self) -> Supervisor:
        """One that is not started."""
        return Supervisor(
            _orders(self.config, self.terms, self.folder),
            on_left=self.faults.keep,
            on_event=self._count,
            devices=self.terms.devices,
            process_numbers=self.numbers,
        )

    def canary(self, supervisor: Supervisor) -> Canary:
        """Of the model that this one has."""
        return Canary(supervisor, self.config.canary_minutes, self._count)

    def _count(self, what: str, replica: int | None = None) -> None:
        if self.metrics is not None:
            self.metrics.count(what, replica)


def _is_local(port: socket.socket) -> bool:
    """Whether only this machine can connect to it."""
    return port.family == socket.AF_UNIX or is_loopback(str(port.getsockname()[0]))


def _orders(config: ServerConfig, terms: ModelTerms, folder: Path) -> Orders:
    first = max(config.step_seconds, config.first_step_seconds)
    return Orders(
        terms.path,
        terms.engine,
        Deadlines(first, config.step_seconds),
        folder,
        has_spare=config.has_spare,
        worker=config.worker,
        label=terms.all_names[0] if len(config.models) > 1 else "",
    )


def _make_server(
    config: ServerConfig, hosting: Hosting, renewal: Renewal, *, is_local: bool
) -> _Server:
    """The HTTP server of these models, with its limits."""
    most = max_connections()
    app = make_app(
        hosting,
        api_keys=config.api_keys,
        admin_key=config.admin_key,
        cors_origins=config.cors_origins,
        allowed_hosts=config.allowed_hosts,
        is_local=is_local,
        root_path=config.root_path,
    )
    made = connection_class(config.unread_seconds)
    context = renewal.context
    return _Server(
        uvicorn.Config(
            app,
            http=made if context is None else handshake_class(context, made),
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            limit_concurrency=most,
            backlog=min(BACKLOG, most),  # asyncio lets so many in at once
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=math.ceil(config.grace_seconds + _STOP_SECONDS),
        ),
        hosting,
        config.grace_seconds,
        renewal,
    )


async def _start(supervisor: Supervisor, listener: Listener, answering: asyncio.Task[None]) -> None:
    """Wait until the model is loaded, or somebody ends the server before."""
    starting = asyncio.create_task(supervisor.start())
    shown: Loading | None = None
    while not starting.done():
        await asyncio.wait(
            {starting, answering}, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        if answering.done() and not starting.done():
            starting.cancel()
            return
        if supervisor.loading is not shown:
            shown = supervisor.loading
            listener.report(shown.what, shown.share)
    await starting


def _call_soon(loop: asyncio.AbstractEventLoop, work: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(work)


class _Server(uvicorn.Server):
    """The first signal lets what is open end, for so many seconds; the second one does not."""

    def __init__(
        self, config: uvicorn.Config, hosting: Hosting, grace_seconds: float, renewal: Renewal
    ) -> None:
        super().__init__(config)
        self._hosting, self._grace_seconds, self._renewal = hosting, grace_seconds, renewal
        self._terminal = Terminal()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """They stay until the loop ends: what comes later is to end nothing abruptly."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, signal.Signals(number).name)
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        loop.add_signal_handler(signal.SIGUSR1, self._renewal.open_log_anew)
        yield

    def _hang_up(self) -> None:
        if self._terminal.is_gone:
            self._end("SIGHUP, for its terminal is gone")
        else:
            self._renewal.renew()

    def _end(self, why: str) -> None:
        common = self._hosting.hosts[0].service.common
        if common.is_draining:
            self._hosting.fail_all("the server is shutting down")
            self.force_exit = True
            return
        num_open = sum(host.service.num_open for host in self._hosting.hosts)
        message = f"{why}: stopping; {count_text(num_open, 'open answer')} may end within "
        message += f"{self._grace_seconds:g} s"
        tell(logging.INFO, "stopping", message, num_open=num_open)
        common.is_draining = self.should_exit = True
        loop = asyncio.get_running_loop()
        loop.call_later(self._grace_seconds, self._hosting.fail_all, "the server is shutting down")
