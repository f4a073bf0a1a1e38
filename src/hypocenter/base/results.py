"""What the engine gives back: answers and pieces of them, and how they came about."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable

import msgspec


class Route(msgspec.Struct, frozen=True):
    """What the engine executed, read from inside it and never from what was asked for."""

    device: str
    instruction_set: str
    #: Of the largest matrices, and what they multiply activations as: I8 is codes of 8 bits.
    weight_dtype: str
    activation_dtype: str
    kv_dtype: str
    num_threads: int
    kernels: tuple[str, ...]
    #: Plans (one per shape of a step) that were captured and are replayed as a graph.
    num_graphs: int = 0


class Timings(msgspec.Struct, frozen=True):
    """Wall-clock figures of one request; `num_prompt_tokens` counts tokens that really ran.

    The other tokens of the prompt, `num_cached_tokens`, were in the KV cache already. Of the answer
    `num_drafted_tokens` were tried before they were chosen, and `num_accepted_tokens` were chosen.
    """

    num_prompt_tokens: int
    prompt_seconds: float
    num_generated_tokens: int
    generation_seconds: float
    num_cached_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def prompt_tokens_per_second(self) -> float:
        return self.num_prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def generated_tokens_per_second(self) -> float:
        # The first token comes out of the prompt pass; its time is not generation time.
        later = max(self.num_generated_tokens - 1, 0)
        return later / self.generation_seconds if self.generation_seconds else 0.0


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    """A token and its natural log probability by the raw logits, before penalties and filters.

    `piece` holds the bytes that it adds to the text: none for a special token, and not always whole
    characters. There are thousands in an answer, and no cycles: Python's collector need not look.
    """

    token_id: int
    piece: bytes
    logprob: float


class TokenLogprob(TopLogprob, frozen=True):
    """A token that stands in the text, and the likeliest ones of its place, the likeliest first."""

    top: tuple[TopLogprob, ...]


class ToolCall(msgspec.Struct, frozen=True):
    """A tool that a model calls, and its `arguments` as the model wrote them: JSON, as a rule."""

    name: str
    arguments: str


class CallPiece(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a piece of an answer adds to its call number `index`; a call begins with its `name`."""

    index: int
    name: str = ""
    arguments: str = ""


def whole_calls(pieces: Iterable[CallPiece]) -> tuple[ToolCall, ...]:
    """The calls that pieces make together, in their order."""
    return tuple(ToolCall(piece.name, piece.arguments) for piece in join_calls(pieces))


def join_calls(pieces: Iterable[CallPiece]) -> list[CallPiece]:
    """The same with one piece of each call."""
    found: dict[int, list[CallPiece]] = {}
    for piece in pieces:
        found.setdefault(piece.index, []).append(piece)
    return [
        CallPiece(index, "".join(p.name for p in parts), "".join(p.arguments for p in parts))
        for index, parts in found.items()
    ]


class Completion(msgspec.Struct, frozen=True, omit_defaults=True):
    """A finished request. `finish_reason`: stop (end token or stop string), length, cancelled.

    `reasoning` is what the model thought before its answer to a conversation, where it marks that;
    `token_ids` has the tokens of both. `tool_calls` are of the tools that the conversation offered.
    With `seed` the same request has the same answer again.
    `logprobs` has an entry for each of
    `token_ids`, `prompt_logprobs` one for each of `prompt_token_ids`, of which the first is None:
    nothing stands before it. Each is None where it was not asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: str
    seed: int
    timings: Timings
    route: Route
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __repr__(self) -> str:
        return (
            f"Completion({reprlib.repr(self.text)}, {len(self.token_ids)} tokens, "
            f"{self.finish_reason!r}, seed={self.seed})"
        )


class Delta(msgspec.Struct, frozen=True):
    """One piece of a streamed answer; `finish_reason` is None until the last piece.

    `reasoning` is what the piece adds to the thoughts before the answer, as in a Completion, and
    `calls` what it adds to calls of tools.
    `logprobs` are those of `token_ids`, None where they were not asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[TokenLogprob, ...] | None = None
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
