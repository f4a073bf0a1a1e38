"""A program that is two honest clients: one asks `/health`, one waits for the first token.

`python -m attack.prober PORT KEY SECONDS` prints what it saw as JSON. It is a process of its own,
so what it measures is the server, and `lag` says how late its own loop was.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from collections.abc import Awaitable
from dataclasses import asdict, dataclass, field

from attack.limits import MIN_PROBES, PROBE_EVERY_SECONDS, PROBE_SECONDS

#: Each is asked with a salt of its own, so that no answer is found in the prefix cache.
PROMPTS = tuple(
    f"# {number}\nimport os\nimport sys\n\n\ndef read_{number}(path):\n    with open(path) as file:"
    "\n        for line in file:\n            yield line.strip()\n\n\ndef "
    for number in range(4)
)


@dataclass
class Seen:
    """Seconds of each probe; `answers` are the texts that each prompt got; `wrong` says why not."""

    health: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    answers: dict[str, list[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    lag: float = 0.0


async def exchange(port: int, data: bytes) -> tuple[float, bytes]:
    """Send a request on a connection of its own: (seconds to the first data, the whole answer)."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        first, parts = 0.0, []
        while part := await reader.read(1 << 16):
            parts.append(part)
            is_stream = b"text/event-stream" in parts[0]
            if not first and (not is_stream or b"data: " in b"".join(parts)):
                first = time.monotonic() - began
        return first, b"".join(parts)
    finally:
        writer.transport.abort()


async def probe(seen: Seen, what: str, took: list[float], asked: Awaitable[bytes | None]) -> None:
    """Note one exchange: how long it took, or what went wrong."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            bad = await asked
        if bad is not None:
            seen.wrong.append(f"{what}: {bad[:300]!r}")
    except TimeoutError:
        took.append(time.monotonic() - began)
        seen.wrong.append(f"{what}: no answer within {PROBE_SECONDS:g} s")
    except OSError as error:
        seen.wrong.append(f"{what}: {error}")


async def ask_health(port: int, took: list[float]) -> bytes | None:
    """The answer when it is not the right one."""
    request = f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n"
    seconds, answer = await exchange(port, request.encode())
    took.append(seconds)
    return None if answer.startswith(b"HTTP/1.1 200 ") else answer


async def ask_answer(port: int, key: str, number: int, seen: Seen) -> bytes | None:
    """The answer when it is not a stream with its end."""
    prompt = PROMPTS[number % len(PROMPTS)]
    body = json.dumps(
        {
            "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True,
            "cache_salt": secrets.token_hex(8),
        }
    ).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
    if key:
        head += f"Authorization: Bearer {key}\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    seconds, answer = await exchange(port, head.encode() + body)
    if not answer.startswith(b"HTTP/1.1 200 ") or b"data: [DONE]" not in answer:
        return answer
    seen.ttft.append(seconds)
    events = [
        json.loads(line[6:])
        for line in answer.splitlines()
        if line.startswith(b"data: ") and b"[DONE]" not in line
    ]
    if errors := [event for event in events if "error" in event]:
        return json.dumps(errors[0]).encode()
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    said = seen.answers.setdefault(prompt, [])
    if text not in said:
        said.append(text)
    return None


async def look(port: int, key: str, seconds: float) -> Seen:
    """Probe for so many seconds, and wait for what is open then.

    A probe of /health is begun when its time has come, whatever became of those before it: a stall
    is then seen by all that began within it.
    """
    seen, stop = Seen(), time.monotonic() + seconds
    probes: list[asyncio.Task[None]] = []

    async def watch_health() -> None:
        due = time.monotonic()
        while time.monotonic() < stop or len(probes) < MIN_PROBES:
            asked = ask_health(port, seen.health)
            probes.append(asyncio.create_task(probe(seen, "/health", seen.health, asked)))
            due += PROBE_EVERY_SECONDS
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            seen.lag = max(seen.lag, time.monotonic() - due)

    async def watch_answers() -> None:
        number = 0
        while time.monotonic() < stop or not number:
            asked = ask_answer(port, key, number, seen)
            await probe(seen, "an answer", seen.ttft, asked)
            number += 1
            await asyncio.sleep(PROBE_EVERY_SECONDS)

    await asyncio.gather(watch_health(), watch_answers())
    await asyncio.gather(*probes)
    return seen


def main(words: list[str]) -> None:
    """Look, and print what was seen."""
    port, key, seconds = int(words[0]), words[1], float(words[2])
    print(json.dumps(asdict(asyncio.run(look(port, key, seconds)))))


if __name__ == "__main__":
    main(sys.argv[1:])
