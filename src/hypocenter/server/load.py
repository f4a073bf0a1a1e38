"""A load of clients for any server that speaks OpenAI's completions, and what they measure.

Each request has a connection of its own (`load_client.py`), and is timed by the client's clock. The
figures are those of vLLM's serving benchmark: time to the first token (TTFT), mean time of each
further token (TPOT), time between two pieces (ITL), and of the whole request (E2EL).
https://docs.vllm.ai/en/latest/benchmarking/cli/
"""

from __future__ import annotations

import asyncio
import http.client
import math
import random
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from hypocenter.base.errors import HypoError, UsageError
from hypocenter.server.load_client import Address, Asked, ask

#: What is said of a server that lets nobody in who has no key.
NEEDS_KEY = "; it wants a key that it knows: --api-key, HYPO_API_KEY or OPENAI_API_KEY"
PERCENTILES = (50, 90, 99)
#: Lognormal of the lengths in tokens that people's conversations have: median and sigma of prompts
#: and of answers, fitted by eye to the histogram of ShareGPT in the vLLM paper (arXiv 2309.06180,
#: figure 11), which cuts at 1024.
_SHARED = ((60.0, 1.4), (160.0, 1.1))
_LONGEST = 1024
_WORDS = (
    "the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "as", "was", "with", "be", "by",
    "on", "not", "he", "this", "are", "or", "his", "from", "at", "which", "but", "have", "an",
    "had", "they", "you", "were", "their", "one", "all", "we", "can", "her", "has", "there", "been",
    "if", "more", "when", "will", "would", "who", "so", "no", "out", "up", "into", "that", "time",
    "people", "year", "way", "day", "man", "thing", "woman", "life", "child", "world", "school",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked of the server at `url`. One of `concurrency` and `rate` (a second, Poisson) is
    given; lengths are in words of the prompt, about a token each, and in tokens of the answer."""

    url: str
    model: str | None = None
    api_key: str | None = None
    num_requests: int = 64
    concurrency: int | None = 16
    rate: float | None = None
    prompt_length: int = 128
    output_length: int = 64
    lengths: str = "fixed"
    shared_prefix: int = 0
    #: Prompts are of token ids from this one up to below that one, and not of words.
    token_ids: tuple[int, int] | None = None
    seed: int = 0
    timeout: float = 600.0
    #: Unix socket to connect to, whatever host and port the URL names.
    uds: str | None = None

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise UsageError("give either a concurrency or a rate")
        limits = {
            "num_requests": (self.num_requests, 1, 1_000_000),
            "concurrency": (self.concurrency or 1, 1, 4096),
            "prompt_length": (self.prompt_length, 1, 1 << 20),
            "output_length": (self.output_length, 1, 1 << 20),
            "shared_prefix": (self.shared_prefix, 0, 1 << 20),
        }
        for name, (value, low, high) in limits.items():
            if not low <= value <= high:
                raise UsageError(f"{name} is {value}, but must be from {low} to {high}")
        if self.rate is not None and not 0 < self.rate <= 10_000:
            raise UsageError(f"rate is {self.rate}, but must be above 0 and at most 10000")
        if self.lengths not in ("fixed", "sharegpt"):
            raise UsageError(f"lengths is {self.lengths!r}, but must be fixed or sharegpt")


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a load measured; times are in milliseconds: mean, and each of `PERCENTILES`."""

    seconds: float
    num_requests: int
    num_errors: int
    first_error: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    itl_ms: dict[str, float]
    e2el_ms: dict[str, float]


def run_load(
    load: Load, report: Callable[[str, float], None] = lambda what, share: None
) -> tuple[Figures, list[Asked]]:
    """Ask all of it, and wait for the answers. Raises HypoError when the server does not answer."""
    model = load.model or _first_model(load)
    asked = list(make_requests(load))
    began = time.perf_counter()
    asyncio.run(_run(load, model, asked, report))
    return figures_of(asked, time.perf_counter() - began), asked


async def _run(
    load: Load, model: str, asked: Sequence[Asked], report: Callable[[str, float], None]
) -> None:
    began = time.perf_counter()
    waiting = iter(asked)

    async def drain() -> None:
        for request in waiting:
            await _ask(load, model, request)

    async def arrive() -> None:
        async with asyncio.TaskGroup() as arrived:
            for request, at in zip(waiting, _arrivals(load), strict=False):
                await asyncio.sleep(max(began + at - time.perf_counter(), 0.0))
                arrived.create_task(_ask(load, model, request))

    num = min(load.concurrency or 0, len(asked))
    clients = [drain() for _ in range(num)] if num else [arrive()]
    asking = {asyncio.ensure_future(client) for client in clients}
    left = asking
    while left:
        _, left = await asyncio.wait(left, timeout=0.1)
        report("asking", sum(request.end > 0 for request in asked) / len(asked))
    await asyncio.gather(*asking)


def make_requests(load: Load) -> Iterator[Asked]:
    """The same for the same seed, whatever the server."""
    chosen = random.Random(load.seed)
    ids = load.token_ids

    def chosen_ones(num: int) -> list[Any]:
        return [chosen.randrange(*ids) if ids else chosen.choice(_WORDS) for _ in range(num)]

    prefix = chosen_ones(load.shared_prefix)
    for _ in range(load.num_requests):
        lengths = (load.prompt_length, load.output_length)
        if load.lengths == "sharegpt":
            lengths = tuple(  # type: ignore[assignment]
                min(max(4, round(chosen.lognormvariate(math.log(median), sigma))), _LONGEST)
                for median, sigma in _SHARED
            )
        prompt = [*prefix, *chosen_ones(lengths[0])]
        yield Asked(prompt if ids else " ".join(prompt), lengths[1])


def figures_of(asked: Sequence[Asked], seconds: float) -> Figures:
    """The figures of requests that have ended, all together within so many seconds."""
    right = [request for request in asked if not request.error]
    first = [request.times[0] - request.start for request in right if request.times]
    later = [
        (request.times[-1] - request.times[0]) / (request.num_output_tokens - 1)
        for request in right
        if len(request.times) > 1 and request.num_output_tokens > 1
    ]
    between = [
        after - before
        for request in right
        for before, after in zip(request.times, request.times[1:], strict=False)
    ]
    num_prompt = sum(request.num_prompt_tokens for request in right)
    num_output = sum(request.num_output_tokens for request in right)
    return Figures(
        seconds=seconds,
        num_requests=len(asked),
        num_errors=len(asked) - len(right),
        first_error=next((request.error for request in asked if request.error), ""),
        prompt_tokens=num_prompt,
        cached_tokens=sum(request.num_cached_tokens for request in right),
        output_tokens=num_output,
        requests_per_second=len(right) / seconds,
        output_tokens_per_second=num_output / seconds,
        total_tokens_per_second=(num_prompt + num_output) / seconds,
        ttft_ms=_spread(first),
        tpot_ms=_spread(later),
        itl_ms=_spread(between),
        e2el_ms=_spread([request.end - request.start for request in right]),
    )


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles in milliseconds, by the nearest rank; empty without a figure."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    ranks = {f"p{p}": ordered[math.ceil(p / 100 * len(ordered)) - 1] for p in PERCENTILES}
    return {
        name: 1e3 * value for name, value in {"mean": sum(ordered) / len(ordered), **ranks}.items()
    }


def _arrivals(load: Load) -> Iterator[float]:
    """Seconds from the beginning, as independent people come."""
    chosen, at = random.Random(load.seed + 1), 0.0
    assert load.rate is not None
    while True:
        yield at
        at += chosen.expovariate(load.rate)


async def _ask(load: Load, model: str, request: Asked) -> None:
    body = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.output_length,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    address = Address(load.url, load.uds)
    await ask(address, _headers(load), msgspec.json.encode(body), request, load.timeout)


def _connection(load: Load) -> http.client.HTTPConnection:
    parts = urlsplit(load.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--url is {load.url!r}, but must be like http://127.0.0.1:8080")
    is_tls = parts.scheme == "https"
    if load.uds is not None:
        return _UnixConnection(parts.hostname, load.uds, load.timeout, is_tls=is_tls)
    kind = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
    return kind(parts.hostname, parts.port, timeout=load.timeout)


class _UnixConnection(http.client.HTTPConnection):
    """Speaks to `host` through a Unix socket."""

    def __init__(self, host: str, path: str, timeout: float, *, is_tls: bool) -> None:
        super().__init__(host, timeout=timeout)
        self._path, self._is_tls = path, is_tls

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
        if self._is_tls:
            context = ssl.create_default_context()
            self.sock = context.wrap_socket(self.sock, server_hostname=self.host)


def _headers(load: Load) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    if load.api_key:
        headers["Authorization"] = f"Bearer {load.api_key}"
    return headers


def _first_model(load: Load) -> str:
    connection = _connection(load)
    try:
        path = urlsplit(load.url).path.rstrip("/") + "/v1/models"
        connection.request("GET", path, headers=_headers(load))
        answer = connection.getresponse()
        data = answer.read(1 << 20)
        if answer.status != 200:
            hint = NEEDS_KEY if answer.status == 401 else ""
            raise HypoError(f"{load.url}: /v1/models answers with status {answer.status}{hint}")
        return str(msgspec.json.decode(data)["data"][0]["id"])
    except (OSError, http.client.HTTPException) as error:
        raise HypoError(f"{load.url} does not answer: {error}") from error
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise HypoError(f"{load.url}: /v1/models names no model") from error
    finally:
        connection.close()
