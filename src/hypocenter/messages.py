"""What a server and its workers say to each other; `frames.py` has how it travels.

A worker connects to its server's Unix socket, and is told by `Prepare` which device it will have.
It may then wait for long, until `Start` says what to load. Then it says `Loading` any number of
times and `Ready` once. A keeper of weights is told the same, and ends with `KeptWeights`.

From then on each `Submit` is answered by `Accepted` and `News` up to a piece with an `ending`, or
by `Failed`; each `Ask` by `Told` or `Failed`. Ids are the server's, and one of a kind for as long
as it lives.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hypocenter.config import EngineConfig, SamplingParams
from hypocenter.conversation.call_forms import FREE, CallRules
from hypocenter.conversation.continuing import MessagePart
from hypocenter.results import CallPiece, TokenLogprob

#: Of one frame, in either direction: a batch of prompts of a whole context, or logprobs of one.
MAX_FRAME_BYTES = 256 << 20
#: The id of a failure that ends the worker itself: its model cannot be loaded.
NO_REQUEST = 0


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """The device to open; no memory of it is taken, and nothing runs there, before `Start`."""

    device: str


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

    `stamps` are those of the file that they are of, `seconds` what packing took.
    """

    stamps: str
    pieces: tuple[SharedPiece, ...]
    weights: dict[str, SharedWeight]
    seconds: float


class Start(msgspec.Struct, frozen=True, tag=True):
    """The model's file, and how to run it; its weights, where a keeper has them.

    `block_memory`: the path of memory in which workers leave each other blocks of the KV cache.
    """

    model: str
    config: EngineConfig
    kept: KeptWeights | None = None
    block_memory: str = ""


class Submit(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A request: a text, token ids, or the `messages` of a conversation.

    `output_ids` have been sent to the client already, by a worker that is no more; that of a
    conversation then has its prompt's ids, and `is_chat` says what it was. `template_variables` and
    `tools` are what its chat template is told beside the messages. `calls` says which of these may
    be called, `continues` the part of the last message that the answer goes on with.
    """

    id: int
    params: SamplingParams
    prompt: str | tuple[int, ...] = ""
    messages: tuple[dict[str, Any], ...] | None = None
    output_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    is_chat: bool = False
    template_variables: dict[str, Any] | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    calls: CallRules = FREE
    continues: MessagePart = ""
    add_generation_prompt: bool = True


class Cancel(msgspec.Struct, frozen=True, tag=True):
    id: int


class Ask(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """For the tokens of `text`, the prompt of `messages`, or else the text of `token_ids`."""

    id: int
    text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    token_ids: tuple[int, ...] = ()
    add_special: bool = True
    parse_special: bool = False
    template_variables: dict[str, Any] | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


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


class Ready(msgspec.Struct, frozen=True, tag=True):
    facts: ServedModel
    seconds: float


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The request will run; `pieces` are those of its prompt's tokens, where they are asked for."""

    id: int
    prompt_ids: tuple[int, ...]
    pieces: tuple[bytes, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A request or question ended by an error of its own.

    `kind` is the error's class, `field` the setting that it names.
    """

    id: int
    kind: str
    message: str
    field: str = ""


class Ending(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a request ended. `prompt_seconds` count from its first step to its first token."""

    reason: str
    num_cached_tokens: int = 0
    prompt_seconds: float = 0.0
    generation_seconds: float = 0.0
    num_preemptions: int = 0


class Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of one request's answer. `prompt_logprobs` come once, as soon as they are known."""

    id: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    ending: Ending | None = None
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()


class EngineState(msgspec.Struct, frozen=True):
    """What the engine is at, and how many steps it has made. Blocks that only the cache keeps are
    free."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_kept_blocks: int = 0
    num_steps: int = 0


class News(msgspec.Struct, frozen=True, tag=True):
    """The pieces that one step or several brought."""

    pieces: tuple[Piece, ...]
    state: EngineState


class Told(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The answer to an `Ask`; `pieces` are the bytes of each token."""

    id: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    pieces: tuple[bytes, ...] = ()


ToWorker = Prepare | Start | Submit | Cancel | Ask
ToServer = Loading | KeptWeights | Ready | Accepted | Failed | News | Told
