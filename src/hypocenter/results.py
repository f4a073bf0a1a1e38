"""What the engine gives back: answers and pieces of them, and how they came about."""

from __future__ import annotations

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
    """Wall-clock figures of one request; `num_prompt_tokens` counts tokens that really ran."""

    num_prompt_tokens: int
    prompt_seconds: float
    num_generated_tokens: int
    generation_seconds: float

    @property
    def prompt_tokens_per_second(self) -> float:
        return self.num_prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def generated_tokens_per_second(self) -> float:
        # The first token comes out of the prompt pass; its time is not generation time.
        later = max(self.num_generated_tokens - 1, 0)
        return later / self.generation_seconds if self.generation_seconds else 0.0


class Completion(msgspec.Struct, frozen=True):
    """A finished request. `finish_reason`: stop (end token or stop string), length, cancelled.

    With `seed` the same request has the same answer again.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: str
    seed: int
    timings: Timings
    route: Route


class Delta(msgspec.Struct, frozen=True):
    """One piece of a streamed answer; `finish_reason` is None until the last piece."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
