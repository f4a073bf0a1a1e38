"""Whether blocks that the cache keeps for later requests still hold what was left in them.

Slow by design, for traced runs alone: after each step the contents of such blocks are read back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypocenter.base.tensor import Tensor
from hypocenter.device import copies, memory
from hypocenter.record.keyed_digest import KeyedDigest
from hypocenter.record.recorder import current

#: So many blocks are watched, those that were kept last.
MAX_WATCHED = 16


@dataclass(frozen=True, slots=True)
class _Kept:
    """A block as its request left it: a digest for each of its pages."""

    request: int
    step: int
    digests: tuple[str, ...]


class PageWatch:
    """Looks at blocks that nobody may write any more. Not thread-safe.

    Block n is row n of each of `pages`.
    """

    def __init__(self, pages: Sequence[Tensor]) -> None:
        self._pages = tuple(pages)
        self._kept: dict[int, _Kept] = {}

    def note_kept(self, block: int, request: int) -> None:
        """From now on the block is for reading; `request` has filled it."""
        self._kept.pop(block, None)
        while len(self._kept) >= MAX_WATCHED:
            del self._kept[next(iter(self._kept))]
        step = current().current_step
        self._kept[block] = _Kept(request, step, tuple(self._digests(block)))

    def forget(self, block: int) -> None:
        """It may be written again."""
        self._kept.pop(block, None)

    def look(self) -> None:
        """Record what has changed since it was kept, once for each block."""
        for block, kept in list(self._kept.items()):
            now = self._digests(block)
            for page, before, digest in zip(self._pages, kept.digests, now, strict=True):
                if digest != before:
                    current().record_block_change(page, block, kept.request, kept.step)
                    self.forget(block)
                    break

    def _digests(self, block: int) -> Iterator[str]:
        for page in self._pages:
            contents = copies.peek(_block_of(page, block))
            yield "" if contents is None else KeyedDigest(contents.tobytes()).text()


def _block_of(page: Tensor, block: int) -> Tensor:
    if page.dtype.is_quantised:
        return memory.as_bytes(page, block)
    return memory.rows(page, block, block + 1)
