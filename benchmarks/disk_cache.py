"""How fast KV blocks spill to disk and come back, beside what the disk does by itself.

The blocks are of the size that those of an 8B model have. The disk by itself writes and reads
files of that size, without a digest and without a cache that they are copied from or to, with as
many threads as the cache has. All files are flushed within what is timed. They are read twice: from
the disk, after the kernel was told to forget them, and from the page cache. The turns of both
alternate; the figures are medians. Restoring with half as many readers stands beside. Seconds of
the processor, of all threads, are told beside: they say what is left on a machine that others use
too. So are the parts of it that are not the disk's.
Writes benchmarks/results/disk_cache.json.

    python benchmarks/disk_cache.py [FOLDER]

The goal is that restoring takes 1 GB/s, or what the disk reads by itself where that is less.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.device.cpu.checksum import checksum_of
from hypocenter.engine import disk_blocks
from hypocenter.engine.disk_blocks import NUM_READERS, DiskBlocks
from hypocenter.engine.page_bytes import PageBytes

ROOT = Path(__file__).parent.parent
#: Of an 8B model with 8 heads of keys and values of 128 numbers, in 16 bits.
_LAYERS, _BLOCK_TOKENS, _ROW = 32, 16, 8 * 128
_SECONDS = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", nargs="?", help="on the disk that is asked about; /tmp else")
    parser.add_argument("--blocks", type=int, default=96, help="of 2 MiB each")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/disk_cache.json")
    options = parser.parse_args()
    pages = _pages(options.blocks)
    seconds: dict[str, list[float]] = {}
    busy: dict[str, list[float]] = {}
    for _ in range(options.turns):
        with tempfile.TemporaryDirectory(dir=options.folder) as made:
            for name, work in _turns(Path(made), pages, options.blocks).items():
                before = time.process_time()
                seconds.setdefault(name, []).append(work())
                busy.setdefault(name, []).append(time.process_time() - before)
    num_bytes = PageBytes(pages).num_bytes * options.blocks
    speeds = {
        name: round(num_bytes / statistics.median(each) / 1e9, 3) for name, each in seconds.items()
    }
    report = {
        "machine": platform.machine(),
        "num_cores": os.cpu_count(),
        "block_bytes": PageBytes(pages).num_bytes,
        "num_blocks": options.blocks,
        "gigabytes_per_second": speeds,
        "processor_seconds_per_gigabyte": {
            name: round(statistics.median(each) / num_bytes * 1e9, 3) for name, each in busy.items()
        },
        "seconds_per_gigabyte_of_one_thread": _parts(pages, options.blocks),
    }
    print(json.dumps(report, indent=1))
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _pages(num_blocks: int) -> list[Array]:
    random = np.random.default_rng(1)
    one = random.integers(0, 256, (num_blocks, _BLOCK_TOKENS * _ROW * 2), np.uint8)
    return [np.roll(one, layer, axis=0) for layer in range(2 * _LAYERS)]


def _turns(folder: Path, pages: list[Array], num: int) -> dict[str, Callable[[], float]]:
    """What is done in a turn, in this order; each returns the seconds that it took."""
    plain = [folder / f"{number}.plain" for number in range(num)]
    cache = folder / "cache"
    return {
        "disk writes": partial(_write_plain, plain, PageBytes(pages)),
        "spill": partial(_spill, cache, pages, num),
        "disk reads": partial(_read_plain, plain, forgotten=True),
        "restore": partial(_restore, cache, pages, num, forgotten=True),
        "restore, half the readers": partial(_by_half, _restore, cache, pages, num, forgotten=True),
        "page cache reads": partial(_read_plain, plain, forgotten=False),
        "restore from page cache": partial(_restore, cache, pages, num, forgotten=False),
        "restore from page cache, half the readers": partial(
            _by_half, _restore, cache, pages, num, forgotten=False
        ),
    }


def _by_half(work: Callable[..., float], *given: Any, **named: Any) -> float:
    """The same with half as many threads that read and copy."""
    before = disk_blocks.NUM_READERS
    disk_blocks.NUM_READERS = max(before // 2, 1)
    try:
        return work(*given, **named)
    finally:
        disk_blocks.NUM_READERS = before


def _write_plain(paths: list[Path], pages: PageBytes) -> float:
    data = [pages.copy_of(number) for number in range(len(paths))]
    began = time.perf_counter()
    for path, block in zip(paths, data, strict=True):
        path.write_bytes(block.data)
    _flush(paths)
    return time.perf_counter() - began


def _spill(folder: Path, pages: list[Array], num: int) -> float:
    blocks = _open(folder, pages)
    began = time.perf_counter()
    for number in range(num):
        blocks.put(_digest(number), number)
    blocks.close(_SECONDS)
    _flush(_files(folder))
    seconds = time.perf_counter() - began
    assert blocks.num_written == num, blocks.num_written
    return seconds


def _read_plain(paths: list[Path], *, forgotten: bool) -> float:
    def read(path: Path) -> int:
        with path.open("rb", buffering=0) as file:
            return file.readinto(buffers[path]) or 0

    if forgotten:
        _forget(paths)
    size = paths[0].stat().st_size
    buffers = {path: np.ones(size, np.uint8).data for path in paths}
    with ThreadPoolExecutor(NUM_READERS) as readers:
        began = time.perf_counter()
        assert set(readers.map(read, paths)) == {size}
        return time.perf_counter() - began


def _restore(folder: Path, pages: list[Array], num: int, *, forgotten: bool) -> float:
    if forgotten:
        _forget(_files(folder))
    blocks = _open(folder, pages)
    digests = [_digest(number) for number in range(num)]
    began = time.perf_counter()
    blocks.prefetch(digests)
    taken = [(number, blocks.take(digest)) for number, digest in enumerate(digests)]
    blocks.fill([(number, data) for number, data in taken if data is not None])
    seconds = time.perf_counter() - began
    blocks.close()
    assert blocks.num_read == num, blocks.num_read
    return seconds


def _parts(pages: list[Array], num: int) -> dict[str, float]:
    """Seconds of one thread for each GB of what is done with a block; medians of five."""
    each = PageBytes(pages)
    block = each.copy_of(0)
    work: dict[str, Callable[[int], object]] = {
        "copy from blocks": each.copy_of,
        "copy into blocks": lambda number: each.put(number, block),
        "XXH64": lambda _: checksum_of(block),
        "SHA-256, for comparison": lambda _: hashlib.sha256(block.data).digest(),
    }
    found = {}
    for name, do in work.items():
        turns = []
        for _ in range(5):
            began = time.perf_counter()
            for number in range(num):
                do(number)
            turns.append(time.perf_counter() - began)
        found[name] = round(statistics.median(turns) / (num * block.nbytes) * 1e9, 3)
    return found


def _open(folder: Path, pages: list[Array]) -> DiskBlocks:
    return DiskBlocks(folder, PageBytes(pages), _BLOCK_TOKENS, bytes(32), 1 << 40)


def _digest(number: int) -> bytes:
    return number.to_bytes(32, "little")


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def _flush(paths: list[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _forget(paths: list[Path]) -> None:
    """Have the kernel read them from the disk the next time."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    sys.exit(main())
