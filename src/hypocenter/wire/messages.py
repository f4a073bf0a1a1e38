"""What a server, its workers and its readers say to each other; `frames.py` has how it travels.

A worker connects to its server's Unix socket, and is told by `Prepare` which device it will have.
It may then wait for long, until `Start` says what to load. Then it says `Loading` any number of
times and `Ready` once. A keeper of weights is told the same. It says `KeptWeights` once their
memory is taken, and `WeightsWhole` once they are read: no request runs before. A worker that
`Start` tells to wait says `StandingBy` in place of `Ready`, and `Ready` when `TakeOver` has come.

From then on each `Submit` is answered by `Accepted` and `News` up to a piece with an `ending`, by
`Failed`, or by `Dropped` where it was cancelled before it began. `MovePrompt` is answered by
`PromptMoved` or `Failed`. So a request that is cancelled has
an end, too: until the server hears of that, it counts as open. A worker is told token ids and
forms that were read already, and never a text of a client's.

A reader is told `StartReader` by its standard input, and says `ReaderReady` or `Failed`. From then
on it has one question at a time, `Ask` or `ReadForm`, and answers it by `Told`, `FormRead` or
`Failed` before it has the next one.

Ids are the server's, and one of a kind for as long as it lives.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from hypocenter.base.results import CallPiece
from hypocenter.conversation.call_forms import FREE, CallRules
from hypocenter.conversation.continuing import MessagePart
from hypocenter.settings.config import EngineConfig, SamplingParams

#: Of one frame, in either direction: a batch of prompts of a whole context, or logprobs of one.
MAX_FRAME_BYTES = 256 << 20
#: The id of a failure that ends the worker itself: its model cannot be loaded.
NO_REQUEST = 0


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """The device to open; no memory of it is taken, and nothing runs there, before `Start`.

    Where there is time until then, the model's file is given: `forms` stands for it and the
    configuration in the name of an index of kernels.
    """

    device: str
    forms: str = ""
    model: str = ""
    config: EngineConfig | None = None


class SharedPart(msgspec.Struct, frozen=True):
    """An array of a packed weight: where it lies in the piece of memory of that number."""

    piece: int
    offset: int
    num_bytes: int
    dtype: str
    num_elements: int


class SharedWeight(msgspec.Struct, frozen=True):
    """A packed weight; a part that is no array is a number."""

    dtype: str
    num_rows: int
    num_columns: int
    parts: tuple[SharedPart | float, ...]


class SharedPiece(msgspec.Struct, frozen=True):
    """Memory of a device, under the handle by which its driver gives it to another process."""

    handle: bytes
    num_bytes: int


class KeptWeights(msgspec.Struct, frozen=True, tag=True):
    """A model's packed matrices, by their names in the file and numbers of their parts.

    Their bytes are there once `WeightsWhole` is said. `stamps` are those of the file that they are
    of. `pages` is memory for the KV cache of `kv_tokens` tokens, zeroed; None where each worker has
    its own. Of a model in parts these are of the first one, and `of_ranks` of the others.
    """

    stamps: str
    pieces: tuple[SharedPiece, ...]
    weights: dict[str, SharedWeight]
    pages: SharedPiece | None = None
    kv_tokens: int = 0
    of_ranks: tuple[KeptWeights, ...] = ()


class WeightsWhole(msgspec.Struct, frozen=True, tag=True):
    """All that `KeptWeights` names has its bytes; `seconds`: what packing took."""

    seconds: float


class Start(msgspec.Struct, frozen=True, tag=True):
    """The model's file, and how to run it; its weights, where a keeper has them.

    `block_memory`: the path of memory in which workers leave each other blocks of the KV cache.
    """

    model: str
    config: EngineConfig
    kept: KeptWeights | None = None
    block_memory: str = ""
    #: Whether no worker before it has found that requests can be answered.
    is_first: bool = True
    #: Whether it is to make ready, and then wait until the worker before it is gone.
    waits: bool = False
    #: Of a keeper: whether two workers are to have room beside what it keeps.
    has_spare: bool = False


class TakeOver(msgspec.Struct, frozen=True, tag=True):
    """The worker before is gone; what it left of the KV cache is told in `block_memory`."""

    block_memory: str = ""


class Submit(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A request, as readers have read it: the ids of its prompt, of its words to avoid, its form.

    `output_ids` have been sent to the client already, by a worker that is no more. `is_chat`: the
    prompt is a conversation, which may offer tools, one of which the answer `must_call`.
    `continues` is the part of its last message that the answer goes on with. `form` is that of the
    answer, or of its calls.
    """

    id: int
    params: SamplingParams
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    is_chat: bool = False
    offers_tools: bool = False
    must_call: bool = False
    #: By tool: its parameters that are texts.
    text_parameters: dict[str, tuple[str, ...]] = {}
    continues: MessagePart = ""
    form: str = ""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    #: Whether a vector is asked for, or a score, and how many tokens of the prompt are its query.
    embeds: bool = False
    num_first: int | None = None


class Cancel(msgspec.Struct, frozen=True, tag=True):
    id: int


class MovePrompt(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Save the blocks of these tokens to a file, restore those of a file, or erase them."""

    id: int
    action: Literal["save", "restore", "erase"]
    path: str = ""
    token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    #: What adapters count for them; None: what they were opened with.
    lora: tuple[tuple[str, float], ...] | None = None


class PromptMoved(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A `MovePrompt` was done; `num_tokens` were kept. `token_ids` are of a file that was read."""

    id: int
    num_tokens: int
    num_bytes: int = 0
    token_ids: tuple[int, ...] = ()


class ReadingLimits(msgspec.Struct, frozen=True):
    """What one question to a reader may take: processor time, time, and memory on top of what a
    reader has that was asked nothing yet.

    The slowest forms that users write take a quarter of a second; a text of as many characters as
    are read at once takes three.
    """

    form_cpu_seconds: float = 2.0
    text_cpu_seconds: float = 10.0
    wall_seconds: float = 30.0
    memory_bytes: int = 512 << 20


class StartReader(msgspec.Struct, frozen=True, tag=True):
    """The model's file, and how to read it; whether forms are asked for, too."""

    model: str
    config: EngineConfig
    reads_forms: bool
    limits: ReadingLimits


class Ask(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A question for the tokens of `text`, the prompt of `messages`, or else the text of
    `token_ids`.

    `pair`: a document that `text`, a query, is read together with. `is_prompt`: of a request, so
    that only ids are told, also those of `bad_words`. A prompt of
    `messages` may have `max_chars`; 0: any number. The bytes of each token are told where they are
    asked for.
    """

    id: int
    text: str | None = None
    pair: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    token_ids: tuple[int, ...] = ()
    add_special: bool = True
    parse_special: bool = False
    template_variables: dict[str, Any] | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    add_generation_prompt: bool = True
    #: The part of the last message that the answer goes on with.
    continues: MessagePart = ""
    is_prompt: bool = False
    bad_words: tuple[str, ...] = ()
    max_chars: int = 0
    needs_pieces: bool = False
    #: Which tools may be called, and what holds the whole answer to a form.
    calls: CallRules = FREE
    form_field: str = ""


class ReadForm(msgspec.Struct, frozen=True, tag=True):
    """A question for the form that `text` describes; `field` is what the client asked by."""

    id: int
    field: str
    text: str


class Loading(msgspec.Struct, frozen=True, tag=True):
    """What is being done, and how much of it is done, from 0 to 1."""

    what: str
    share: float


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What clients may ask of a model that is loaded. Token ids are -1 where it has no such."""

    name: str
    architecture: str
    quantisation: str
    num_parameters: int
    file_bytes: int
    context_length: int
    trained_length: int
    vocab_size: int
    bos_id: int
    eos_id: int
    bos_text: str
    eos_text: str
    chat_template: str
    device: str
    instruction_set: str
    max_requests: int
    block_size: int
    num_blocks: int
    #: What experts take in the host's memory, where a GPU has the rest.
    host_weight_bytes: int = 0
    #: The most tokens of one step.
    step_tokens: int
    longest_token_bytes: int
    #: What it makes of texts in place of an answer (`POOLINGS`), and how long its vectors are;
    #: empty: it answers.
    pooling: str = ""
    embedding_size: int = 0


class StandingBy(msgspec.Struct, frozen=True, tag=True):
    """All is loaded, compiled and captured; it waits for `TakeOver`."""

    seconds: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    facts: ServedModel
    seconds: float


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The request will run; `pieces` are those of its prompt's tokens, where they are asked for."""

    id: int
    pieces: tuple[bytes, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A request or question ended by an error of its own.

    `kind` is the error's class, `field` the setting that is wrong, `settings` those that the
    message names.
    """

    id: int
    kind: str
    message: str
    field: str = ""
    settings: tuple[str, ...] = ()


class Ending(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a request ended. `prompt_seconds` count from its first step to its first token.

    `stop_string` is the one of the request that ended it, where one did. `accepted_at` counts, for
    each place behind the last token, how often what was tried there was right; `num_drafts` counts
    steps that tried tokens, and `num_drafted` these tokens.
    """

    reason: str
    num_cached_tokens: int = 0
    prompt_seconds: float = 0.0
    generation_seconds: float = 0.0
    num_preemptions: int = 0
    stop_string: str = ""
    num_drafts: int = 0
    num_drafted: int = 0
    accepted_at: tuple[int, ...] = ()


class Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of one request's answer. `prompt_logprobs` come once, as soon as they are known; both
    are packed (`logprobs.py`), and empty where nobody asked for them."""

    id: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: bytes = b""
    prompt_logprobs: bytes = b""
    ending: Ending | None = None
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    #: Numbers of f32, little-endian, where a vector or a score was asked for.
    vector: bytes = b""


class EngineState(msgspec.Struct, frozen=True):
    """What the engine is at, and how many steps it has made. Blocks that only the cache keeps are
    free."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_kept_blocks: int = 0
    num_steps: int = 0
    #: Forms of kernels that a GPU had to be given since the worker was ready.
    num_compiled: int = 0
    #: Blocks that this worker read from disk, and wrote there.
    num_disk_read: int = 0
    num_disk_written: int = 0


class News(msgspec.Struct, frozen=True, tag=True):
    """The pieces that one step or several brought."""

    pieces: tuple[Piece, ...]
    state: EngineState


class Dropped(msgspec.Struct, frozen=True, tag=True):
    """A request that was cancelled before it began."""

    id: int


class ReaderReady(msgspec.Struct, frozen=True, tag=True):
    """The model's tokenizer and chat template are there."""


class Told(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The answer to an `Ask`; `pieces` are the bytes of each token."""

    id: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    pieces: tuple[bytes, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    #: Of a pair, so many of the tokens are the query's.
    num_first: int | None = None
    #: The form of the answer's calls, which is still to be read; empty: they are free.
    call_form: str = ""


class FormRead(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `ReadForm`: the form as the engine takes it."""

    id: int
    compiled: str


ToWorker = Prepare | Start | TakeOver | Submit | Cancel | MovePrompt
ToServer = (
    Loading
    | KeptWeights
    | WeightsWhole
    | StandingBy
    | Ready
    | Accepted
    | Failed
    | News
    | Dropped
    | PromptMoved
)
ToReader = StartReader | Ask | ReadForm
FromReader = ReaderReady | Told | FormRead | Failed
