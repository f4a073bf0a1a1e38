"""One request to the engine as the server knows it: what it asked for and what came back so far.

This is what outlives a worker: the prompt, the seed and the tokens that were sent are enough for
another one to go on with the very tokens that would have followed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hypocenter.config import SamplingParams
from hypocenter.conversation.call_forms import FREE, CallRules
from hypocenter.conversation.continuing import MessagePart
from hypocenter.messages import Accepted, Failed, Piece, Submit

WorkerEvent = Accepted | Piece | Failed


class AskedAnswer(NamedTuple):
    """What a conversation's answer is to be. `ignored` are the fields that were passed over."""

    template_variables: dict[str, Any] | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    calls: CallRules = FREE
    continues: MessagePart = ""
    adds_prompt: bool = True
    echoed: str = ""
    ignored: Sequence[str] = ()


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
    #: What is wanted of the answer to a conversation.
    asked: AskedAnswer | None = None
    #: Is handed everything that a worker says of it, in order.
    listener: Callable[[Generation, WorkerEvent], None] | None = None
    prompt_ids: tuple[int, ...] | None = None
    output_ids: list[int] = field(default_factory=list)
    submitted: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float | None = None
    is_done: bool = False
    is_with_worker: bool = False
    num_blamed: int = 0
    num_resumed: int = 0
    #: Whether a worker found logits of it that are no numbers.
    had_bad_logits: bool = False

    def message(self) -> Submit:
        """What a worker is told, be it the first or one that goes on."""
        is_known = self.prompt_ids is not None
        asked = self.asked or AskedAnswer()
        return Submit(
            self.id,
            self.params,
            self.prompt if self.prompt_ids is None else self.prompt_ids,
            None if is_known else self.messages,
            tuple(self.output_ids),
            self.cache_salt,
            is_chat=self.messages is not None,
            template_variables=None if is_known else asked.template_variables,
            tools=asked.tools,
            calls=asked.calls,
            continues=asked.continues,
            add_generation_prompt=asked.adds_prompt,
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
                    self.last_token = time.monotonic()
                    self.first_token = self.first_token or self.last_token
                    self.output_ids += event.token_ids
                    self.num_blamed = 0  # it gets on
                self.is_done = event.ending is not None
            case Failed():
                self.is_done = True
        if self.listener is not None:
            self.listener(self, event)
