"""One request to the engine as the server knows it: what it asked for and what came back so far.

This is what outlives a worker: the prompt, the seed and the tokens that were sent are enough for
another one to go on with the very tokens that would have followed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypocenter.config import SamplingParams
from hypocenter.messages import Accepted, Failed, Piece, Submit

WorkerEvent = Accepted | Piece | Failed


@dataclass(eq=False, slots=True)
class Generation:
    """`name` is the client's word for the whole request, of which this may be one of several.

    Times are of the monotonic clock. `num_blamed` counts the workers that died of a fault while
    this was open and got nowhere; `num_resumed` all that it outlived.
    """

    id: int
    name: str
    params: SamplingParams
    prompt: str | tuple[int, ...] = ""
    messages: tuple[dict[str, Any], ...] | None = None
    cache_salt: str = ""
    template_variables: dict[str, Any] | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    #: Is handed everything that a worker says of it, in order.
    listener: Callable[[Generation, WorkerEvent], None] | None = None
    #: Counts what a worker says of it.
    watcher: Callable[[Generation, WorkerEvent], None] | None = None
    prompt_ids: tuple[int, ...] | None = None
    output_ids: list[int] = field(default_factory=list)
    submitted: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float | None = None
    #: Seconds between its last two pieces, once there are two.
    gap: float | None = None
    is_done: bool = False
    is_with_worker: bool = False
    num_blamed: int = 0
    num_resumed: int = 0
    #: Whether a worker found logits of it that are no numbers.
    had_bad_logits: bool = False

    def message(self) -> Submit:
        """What a worker is told, be it the first or one that goes on."""
        is_known = self.prompt_ids is not None
        return Submit(
            self.id,
            self.params,
            self.prompt if self.prompt_ids is None else self.prompt_ids,
            None if is_known else self.messages,
            tuple(self.output_ids),
            self.cache_salt,
            is_chat=self.messages is not None,
            template_variables=None if is_known else self.template_variables,
            tools=self.tools,
        )

    def take(self, event: WorkerEvent) -> None:
        """Note what a worker says of it, and hand it to whoever waits."""
        match event:
            case Accepted():
                if self.prompt_ids is not None:
                    return  # said again by a worker that goes on
                self.prompt_ids = event.prompt_ids
            case Piece():
                if event.token_ids:
                    now, before = time.monotonic(), self.last_token
                    self.gap = None if before is None else now - before
                    self.first_token, self.last_token = self.first_token or now, now
                    self.output_ids += event.token_ids
                    self.num_blamed = 0  # it gets on
                self.is_done = event.ending is not None
            case Failed():
                self.is_done = True
        for told in (self.watcher, self.listener):
            if told is not None:
                told(self, event)
