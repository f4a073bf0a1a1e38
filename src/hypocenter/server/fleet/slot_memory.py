"""What each client's last answers were made of, for who saves and restores prompts by `/slots`.

Our slots are not llama-server's: a request has none of its own, since all share the cache. Here a
client's slot 0 has its last answer that ended, slot 1 the one before.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from hypocenter.base.errors import UsageError
from hypocenter.server.generation import Generation
from hypocenter.settings.adapters import Scales
from hypocenter.settings.cache_folder import changeable_by_others, make_private

#: Clients that are remembered, and tokens of all together.
_MAX_CLIENTS, _MAX_TOKENS = 1000, 4_000_000
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class HeldPrompt:
    """The tokens of a prompt with its answer, their salt, the replica that computed them, and what
    adapters counted."""

    token_ids: tuple[int, ...]
    cache_salt: str
    replica: int
    lora: Scales | None = None


class SlotMemory:
    """`folder` is for files of saved prompts; `num_slots` each client has.

    Raises UsageError where others could change what lies in the folder.
    """

    def __init__(self, folder: Path, num_slots: int) -> None:
        self.num_slots, self._folder = num_slots, folder
        self._slots: OrderedDict[str, deque[HeldPrompt]] = OrderedDict()
        self._num_tokens = 0
        try:
            if problem := changeable_by_others(folder):
                raise UsageError(f"--slot-save-path must be the user's own: {problem}")
            make_private(folder)
        except OSError as error:
            raise UsageError(f"--slot-save-path {folder}: {error.strerror}") from error

    def note(self, generation: Generation) -> None:
        """An answer has ended."""
        ids = (*(generation.prompt_ids or ()), *generation.output_ids)
        lora = cast("Scales | None", generation.params.lora)  # settled when it was made
        held = HeldPrompt(ids, generation.cache_salt, generation.replica or 0, lora)
        self.put(generation.client, held)

    def put(self, client: str, slot: HeldPrompt, number: int = 0) -> None:
        """That is what the client's slot has from now on, and the others move on by one."""
        slots = self._slots.setdefault(client, deque())
        self._slots.move_to_end(client)
        slots.insert(min(number, len(slots)), slot)
        self._num_tokens += len(slot.token_ids)
        if len(slots) > self.num_slots:
            self._num_tokens -= len(slots.pop().token_ids)
        while len(self._slots) > _MAX_CLIENTS or self._num_tokens > _MAX_TOKENS:
            _, gone = self._slots.popitem(last=False)
            self._num_tokens -= sum(len(prompt.token_ids) for prompt in gone)

    def get(self, client: str, number: int) -> HeldPrompt | None:
        slots = self._slots.get(client, ())
        return slots[number] if number < len(slots) else None

    def remove(self, client: str, number: int) -> None:
        """The client's slot has nothing any more."""
        slots = self._slots[client]
        self._num_tokens -= len(slots[number].token_ids)
        del slots[number]

    def file(self, client: str, name: str, *, is_own: bool) -> Path | None:
        """The file of that name; of this client's own where `is_own`. None for a name that is none.

        Raises OSError where the folder cannot be made.
        """
        if not _NAME.fullmatch(name):
            return None
        folder = self._folder / client[:32] if is_own else self._folder
        make_private(folder)
        return folder / name
