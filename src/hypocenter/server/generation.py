"""One request to the engine as the server knows it: what it asked for and what came back so far.

This is what outlives a worker: the prompt, the seed and the tokens that were sent are enough for
another one to go on with the very tokens that would have followed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from hypocenter.conversation.call_forms import FREE, CallRules
from hypocenter.conversation.continuing import MessagePart
from hypocenter.settings.config import SamplingParams
from hypocenter.settings.grammar_text import CALLS
from hypocenter.wire.messages import Accepted, Failed, Piece, Submit

WorkerEvent = Accepted | Piece | Failed
#: Whoever is known by nothing: a server's own questions.
NOBODY = ""


class AskedAnswer(NamedTuple):
    """What a conversation's answer is to be. `ignored` are the fields that were passed over."""

    template_variables: dict[str, Any] | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    #: The parameters of these that are texts.
    text_parameters: dict[str, tuple[str, ...]] | None = None
    calls: CallRules = FREE
    continues: MessagePart = ""
    adds_prompt: bool = True
    echoed: str = ""
    ignored: Sequence[str] = ()


class AskedAdapter(Protocol):
    """An adapter by its number or its name, and what it counts."""

    id: int | None
    name: str | None
    scale: float


class QueryAndDocument(NamedTuple):
    """Two texts that are read together."""

    query: str
    document: str


class Manner(NamedTuple):
    """How an answer is sent: in pieces or whole, with its figures, with the ids of all tokens; and
    what was passed over."""

    is_stream: bool = False
    wants_usage: bool = False
    ignored: Sequence[str] = ()
    has_ids: bool = False


WHOLE = Manner()


@dataclass(frozen=True, slots=True)
class AnswerOrder:
    """What one body asks for; whose it is and how it came is not known here.

    `prompts` are texts, token ids, conversations, or queries with a document each, and each is
    answered `num_choices` times; or where it `embeds`, they become vectors or scores.
    `params` have a seed of their own for each choice. `asked` is of the answer to a conversation.
    """

    prompts: list[Any]
    params: SamplingParams
    num_choices: int = 1
    cache_salt: str = ""
    model: str = ""
    asked: AskedAnswer | None = None
    is_echoed: bool = False
    manner: Manner = WHOLE
    #: Tokens of a prompt that are kept, its last ones; 0: all.
    max_prompt_tokens: int = 0
    priority: int = 0
    #: Of the only answer, the tokens that were sent by another server.
    sent_ids: tuple[int, ...] = ()
    embeds: bool = False
    #: What adapters count, where the body says so.
    lora: tuple[AskedAdapter, ...] | None = None

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.num_choices


@dataclass(eq=False, slots=True)
class Generation:
    """`name` is the client's word for the whole request, of which this may be one of several.

    `prompt`, `messages` and `asked` are what is still to be read; no longer than that they are
    kept. `client` is who asks, by key or address, for a fair order.

    Times are of the monotonic clock. `num_blamed` counts the workers that died of a fault while
    this was open and got nowhere; `num_resumed` all that it outlived.
    """

    id: int
    name: str
    params: SamplingParams
    prompt: str | QueryAndDocument | tuple[int, ...] = ""
    messages: tuple[dict[str, Any], ...] | None = None
    cache_salt: str = ""
    #: What is wanted of the answer to a conversation.
    asked: AskedAnswer | None = None
    client: str = NOBODY
    #: The replica that is asked, if it is the server's own: it takes no place from anybody, and
    #: waits in the engine.
    canary_of: int | None = None
    #: Whether a vector is asked for, or a score, and how many tokens of the prompt are its query.
    embeds: bool = False
    num_first: int | None = None
    #: Tokens of the prompt that are kept, its last ones; 0: all. Of a vector's its first ones.
    max_prompt_tokens: int = 0
    #: Of its client's own, the lowest comes first.
    priority: int = 0
    #: Is handed everything that a worker says of it, in order.
    listener: Callable[[Generation, WorkerEvent], None] | None = None
    #: Counts what a worker says of it.
    watcher: Callable[[Generation, WorkerEvent], None] | None = None
    #: What readers made of it: the prompt's tokens, those of words to avoid, and its form.
    prompt_ids: tuple[int, ...] | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    form: str = ""
    is_text_read: bool = False
    #: Whether all is read that the worker is told of.
    is_read: bool = False
    is_chat: bool = False
    offers_tools: bool = False
    must_call: bool = False
    text_parameters: dict[str, tuple[str, ...]] = field(default_factory=dict)
    continues: MessagePart = ""
    #: A form of its calls that is still to be read.
    call_form: str = ""
    output_ids: list[int] = field(default_factory=list)
    submitted: float = field(default_factory=time.monotonic)
    #: When a worker was handed it first, and the engine's steps by its first and last piece.
    handed_over: float | None = None
    steps: tuple[int, int] | None = None
    first_token: float | None = None
    last_token: float | None = None
    #: Seconds between its last two pieces, once there are two.
    gap: float | None = None
    is_done: bool = False
    #: The replica whose worker has it.
    replica: int | None = None
    #: Tokens that this one has read before, as far as that is known.
    num_known_tokens: int = 0
    #: Whether the worker that has it has said so, and whether it has brought a piece of it.
    is_accepted: bool = False
    has_begun: bool = False
    was_accepted: bool = False
    #: Whether the worker was told to end it, so that another client gets its place for now.
    is_pausing: bool = False
    num_blamed: int = 0
    num_resumed: int = 0
    #: Whether a worker found logits of it that are no numbers.
    had_bad_logits: bool = False
    #: Of its prompt's blocks, as `Prefixes` knows them; made when first asked for.
    prompt_digests: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self.is_chat = self.messages is not None
        if self.asked is not None:
            self.offers_tools, self.continues = bool(self.asked.tools), self.asked.continues
            self.must_call = self.asked.calls.must_call
            self.text_parameters = self.asked.text_parameters or {}
        if isinstance(self.prompt, tuple) and not isinstance(self.prompt, QueryAndDocument):
            self.prompt_ids = self._cut(self.prompt)
            self.is_text_read = not self.params.bad_words
        self.is_read = self.is_text_read and self.params.constraint is None

    def note_read(
        self,
        prompt_ids: tuple[int, ...],
        bad_word_ids: tuple[tuple[int, ...], ...],
        call_form: str = "",
    ) -> None:
        """Its text was read, and is forgotten."""
        self.prompt_ids, self.bad_word_ids = self._cut(prompt_ids), bad_word_ids
        self.is_text_read = True
        self.call_form = call_form
        self._forget_text()

    def _cut(self, prompt_ids: tuple[int, ...]) -> tuple[int, ...]:
        """So much of a prompt as is kept: its end, or of a text for a vector its beginning, and the
        token that ends it."""
        most = self.max_prompt_tokens
        if not self.embeds or not 0 < most < len(prompt_ids):
            return prompt_ids[-most:]
        return (*prompt_ids[: most - 1], prompt_ids[-1])

    @property
    def is_canary(self) -> bool:
        """Whether it is the server's own."""
        return self.canary_of is not None

    @property
    def constraint(self) -> tuple[str, str] | None:
        """The form that it is held to, and the field that asks for it; None: it is free."""
        own = (CALLS, self.call_form) if self.call_form else None
        return self.params.constraint or own

    def _forget_text(self) -> None:
        self.prompt, self.messages, self.asked = "", None, None

    def leave(self) -> None:
        """Nobody waits for it any more; what may be large is not kept for that."""
        self.is_done = True
        self._forget_text()

    def share_reading(self, other: Generation) -> None:
        """Take what was read of another one to the same prompt with the same settings."""
        if other.is_read and other.prompt_ids is not None:
            self.note_read(other.prompt_ids, other.bad_word_ids)
            self.form, self.is_read = other.form, True

    def message(self) -> Submit:
        """What a worker is told, be it the first or one that goes on."""
        assert self.prompt_ids is not None, "it was read"
        return Submit(
            self.id,
            self.params,
            self.prompt_ids,
            tuple(self.output_ids),
            self.cache_salt,
            is_chat=self.is_chat,
            offers_tools=self.offers_tools,
            must_call=self.must_call,
            text_parameters=self.text_parameters,
            continues=self.continues,
            form=self.form,
            bad_word_ids=self.bad_word_ids,
            embeds=self.embeds,
            num_first=self.num_first,
        )

    @property
    def is_with_worker(self) -> bool:
        return self.replica is not None

    def hand_over(self, replica: int = 0) -> Submit:
        """The message to the worker that has it from now on."""
        self.replica, self.is_accepted, self.has_begun = replica, False, False
        self.handed_over = self.handed_over or time.monotonic()
        return self.message()

    def take_back(self) -> None:
        """No worker has it any more; it waits for its turn."""
        self.replica, self.is_pausing = None, False

    def take(self, event: WorkerEvent) -> None:
        """Note what a worker says of it, and hand it to whoever waits."""
        match event:
            case Accepted():
                self.is_accepted = True
                if self.was_accepted:
                    return  # said again by a worker that goes on
                self.was_accepted = True
            case Piece():
                self.has_begun = True
                if event.token_ids:
                    now, before = time.monotonic(), self.last_token
                    self.gap = None if before is None else now - before
                    self.first_token, self.last_token = self.first_token or now, now
                    self.output_ids += event.token_ids
                    self.num_blamed = 0  # it gets on
                self.is_done = event.ending is not None
            case Failed():
                self.is_done = True
        if self.is_done:
            self._forget_text()
        for told in (self.watcher, self.listener):
            if told is not None:
                told(self, event)
        if self.is_done:
            self.forget_who_waits()

    def forget_who_waits(self) -> None:
        """Nothing more is said of it. Who waits has it too: in a circle both, with all that was
        answered, would stay until the collector of garbage comes by."""
        self.watcher = self.listener = None
