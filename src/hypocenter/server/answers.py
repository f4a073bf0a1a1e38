"""What the routes answer, field by field: the answers are made of these, and `/openapi.json` too.

Names are those of OpenAI, vLLM and llama-server. A field that is UNSET is left out; one that may be
null is there all the same, for clients read it without asking.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class ErrorFields(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorAnswer(msgspec.Struct):
    error: ErrorFields


class ReplicaStatus(msgspec.Struct):
    """One card, or group of cards. `state`: loading, ready, or lost, which it stays."""

    replica: int
    device: str
    state: str
    restarts: int
    running: int


class Status(msgspec.Struct):
    status: str


class CanaryAnswer(msgspec.Struct, omit_defaults=True):
    """`said`: not asked yet, same, changed, no answer; `at` by the wall clock, in seconds."""

    said: str
    at: float
    num_asked: int
    problem: str = ""


class Health(msgspec.Struct, omit_defaults=True):
    """`canary` is what the last one said; none where none is asked. `replicas` are told where there
    is more than one."""

    status: str
    canary: CanaryAnswer | None = None
    replicas: list[ReplicaStatus] = []


class Version(msgspec.Struct):
    version: str


# -- answers to prompts ---------------------------------------------------------------------------


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AnswerTimings(msgspec.Struct):
    """Under llama-server's names; `resumed` counts the workers that the answer outlived.

    Those of drafts are there where some were tried.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    resumed: int
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class TextCompletion(msgspec.Struct, kw_only=True):
    """A whole answer, and each chunk of one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET
    timings: AnswerTimings | UnsetType = UNSET


class TopLogprobEntry(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class LogprobEntry(TopLogprobEntry):
    top_logprobs: list[TopLogprobEntry]


class ChatLogprobs(msgspec.Struct):
    content: list[LogprobEntry]
    refusal: None = None


class CalledFunction(msgspec.Struct):
    """`arguments` are a text, JSON as a rule, as the model wrote them."""

    name: str
    arguments: str


class CallOfTool(msgspec.Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    """`reasoning_content` is there where a model answers in channels, and thought.

    `content` is null where the model called tools and said nothing.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallOfTool] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    timings: AnswerTimings | UnsetType = UNSET


class FunctionDelta(msgspec.Struct):
    name: str | UnsetType = UNSET
    arguments: str = ""


class CallDelta(msgspec.Struct):
    """What is added to call number `index`; the first one of a call has its id and its name."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET
    timings: AnswerTimings | UnsetType = UNSET


# -- models, tokens, state ------------------------------------------------------------------------


class ModelMeta(msgspec.Struct):
    architecture: str
    quantisation: str
    n_ctx_train: int
    n_params: int
    n_vocab: int
    size: int
    #: What it makes of texts in place of an answer, and how long its vectors are; null: it answers.
    pooling: str | None = None
    n_embd: int | None = None


class ModelStatus(msgspec.Struct, omit_defaults=True):
    """`value`: unloaded, loading, loaded, unloading, or failed, with the `error`, as llama-server's
    router has it. `file_changed`: what is in memory is not what is in the file any more."""

    value: str
    pinned: bool = False
    error: str = ""
    file_changed: bool = False


class ModelCard(msgspec.Struct, kw_only=True):
    """What is only known of a model that was loaded is null before. An adapter has its model as
    `parent`, as vLLM has it."""

    id: str
    parent: str | None = None
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int | None
    meta: ModelMeta | None
    status: ModelStatus


class Models(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Adapter(msgspec.Struct):
    """As llama-server has it, and its name."""

    id: int
    name: str
    path: str
    scale: float


class Done(msgspec.Struct):
    """As llama-server has it."""

    success: bool = True


class TokenPiece(msgspec.Struct):
    """`piece` is a text, or its bytes where they are no text, as llama-server has it."""

    id: int
    piece: str | list[int]


class Tokens(msgspec.Struct):
    tokens: list[int | TokenPiece]
    count: int
    max_model_len: int


class Text(msgspec.Struct):
    """`content` is llama-server's name, `prompt` vLLM's."""

    content: str
    prompt: str


class TokenizerInfo(msgspec.Struct):
    bos_token: str
    eos_token: str
    pad_token: str | None
    chat_template: str


class FilledTemplate(msgspec.Struct):
    prompt: str
    tokens: tuple[int, ...]


class Defaults(msgspec.Struct):
    n_ctx: int


class Modalities(msgspec.Struct):
    vision: bool = False
    audio: bool = False


class Props(msgspec.Struct):
    default_generation_settings: Defaults
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    modalities: Modalities
    device: str
    instruction_set: str


class Slot(msgspec.Struct):
    id: int
    id_task: int
    n_ctx: int
    is_processing: bool
    n_prompt_tokens: int
    n_decoded: int


class SlotTimings(msgspec.Struct):
    save_ms: float | UnsetType = UNSET
    restore_ms: float | UnsetType = UNSET


class SlotMoved(msgspec.Struct):
    """Of a prompt that was saved, restored or erased: how many tokens the cache keeps or kept, and
    the bytes of the file, under llama-server's names."""

    id_slot: int
    filename: str | UnsetType = UNSET
    n_saved: int | UnsetType = UNSET
    n_written: int | UnsetType = UNSET
    n_restored: int | UnsetType = UNSET
    n_read: int | UnsetType = UNSET
    n_erased: int | UnsetType = UNSET
    timings: SlotTimings | UnsetType = UNSET


class ChoiceState(msgspec.Struct):
    index: int
    finish_reason: str | None
    num_resumed: int


class RequestState(msgspec.Struct, kw_only=True):
    """Of a request: neither its prompt nor its answer."""

    id: str
    object: Literal["request"] = "request"
    created: int
    status: str
    usage: Usage
    choices: list[ChoiceState]


class ReplicaProcesses(msgspec.Struct):
    replica: int
    device: str
    worker_pid: int | None
    spare_pid: int | None
    keeper_pid: int | None
    restarts: int


class OpenRequests(msgspec.Struct):
    """`engine` is what the workers say of themselves; `open` are the requests. The processes are
    those of the first replica, and those of all are in `replicas`."""

    engine: dict[str, Any]
    num_blocks: int
    worker_pid: int | None
    spare_pid: int | None
    #: none, without a model, loading, standing by.
    spare_state: str
    keeper_pid: int | None
    restarts: int
    replicas: list[ReplicaProcesses]
    open: list[RequestState]


class Fault(msgspec.Struct):
    """`report_state`: written, being written, or missing, where none could be made. `page` leads to
    the report as a page, for ten minutes and without a key; empty where there is none."""

    bundle: str
    report: str | None
    report_state: str
    page: str = ""


class Faults(msgspec.Struct):
    faults: list[Fault]
