"""Hostile core dumps of a GPU and texts of a debug agent; `scripts/test-fuzz` runs it.

Each input is a real dump whose bytes, rows, sizes or links tell lies, or that is cut off. It must
be read into facts of bounded size or refused in one line, in bounded time and memory.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import msgspec
from outside.hostile import TooSlow, limited_time, run_trials
from recorded.core_dumps import AGENT_TEXT, Part, fixture, put_together, take_apart

from hypocenter.base.errors import BadCoreDump
from hypocenter.coredump.debug_agent import read_debug_agent
from hypocenter.coredump.nvidia import read_core_dump
from hypocenter.record.gpu_stop import GpuStop

NUMBERS = (0, 1, 2, 7, 31, 255, 2**16, 2**24, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)
SECONDS = 5


def wrong_of(data: bytes, path: Path) -> str:
    """What is wrong with how a dump is read; nothing when all is well."""
    path.write_bytes(data)
    try:
        with limited_time(SECONDS):
            problem = _problem(read_core_dump(path))
    except BadCoreDump as error:
        problem = "a refusal of several lines" if "\n" in str(error) else ""
    except TooSlow:
        problem = f"more than {SECONDS} s"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    return problem


def _problem(stop: GpuStop) -> str:
    again = msgspec.json.decode(msgspec.json.encode(stop), type=GpuStop)
    return stop.problem() or ("" if again == stop else "it is not the same after JSON")


def spoilt(parts: list[Part], source: random.Random) -> list[Part]:
    """The sections with one that lies: in a word of its bytes, its size, its links or its type."""
    parts = list(parts)
    at = source.randrange(len(parts))
    part, number = parts[at], source.choice(NUMBERS)
    how = source.choice(("word", "word", "word", "cut", "entry", "link", "info", "type", "twice"))
    if how == "word" and len(part.data) >= 8:
        data, offset = bytearray(part.data), source.randrange(len(part.data) - 7)
        struct.pack_into("<Q", data, offset, number)
        part = replace(part, data=bytes(data))
    elif how == "cut":
        part = replace(part, data=part.data[: source.randrange(len(part.data) + 1)])
    elif how == "entry":
        part = replace(part, entry_bytes=number)
    elif how == "link":
        part = replace(part, link=number & 0xFFFFFFFF)
    elif how == "info":
        part = replace(part, info=number & 0xFFFFFFFF)
    elif how == "type":
        part = replace(part, type=source.choice(parts).type)
    elif how == "twice":
        parts.append(part)
    parts[at] = part
    return parts


def prepare(seeds: Path) -> Callable[[random.Random, Path], str]:
    dumps = {name: fixture(name) for name in ("gather", "pointers", "spin")}
    apart = {name: take_apart(dump) for name, dump in dumps.items()}

    def trial(source: random.Random, folder: Path) -> str:
        name = source.choice(sorted(dumps))
        how = source.choice(("sections", "sections", "bytes", "cut", "text"))
        if how == "text":
            return _text(source)
        if how == "sections":
            header, parts = apart[name]
            for _ in range(source.choice((1, 2, 5))):
                parts = spoilt(parts, source)
            data = put_together(header, parts)
        else:
            spoiled = bytearray(dumps[name])
            for _ in range(source.choice((1, 4, 64))):
                spoiled[source.randrange(len(spoiled))] = source.randrange(256)
            data = bytes(spoiled[: source.randrange(len(spoiled))] if how == "cut" else spoiled)
        wrong = wrong_of(data, folder / "1.nvcudmp")
        return wrong and f"{name}, {how}: {wrong}"

    return trial


def _text(source: random.Random) -> str:
    text = list(AGENT_TEXT * source.choice((1, 3)))
    for _ in range(source.choice((1, 9, 99))):
        text[source.randrange(len(text))] = source.choice("0x[]<>:=\n\x00\u2028é9 ")
    stop = read_debug_agent("".join(text))
    return _problem(stop) if stop is not None else ""


if __name__ == "__main__":
    run_trials("core dumps", __doc__ or "", prepare)
