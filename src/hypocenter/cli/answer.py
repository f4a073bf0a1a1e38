"""One answer, as `hypo run` and the chat give it: an engine, and its pieces as they come.

Reads no prompt and holds no options.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from hypocenter.cli import interrupt
from hypocenter.cli.options import EngineOptions, SamplingOptions, naming_options
from hypocenter.cli.output import emit, say, think
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.config import EngineConfig, SamplingParams
from hypocenter.errors import AccessRefused
from hypocenter.harmony import Channels, Spoken, is_spoken_by, split
from hypocenter.results import Completion
from hypocenter.wording import count_text

if TYPE_CHECKING:
    from hypocenter.engine.llm import LLM


def open_llm(path: str, config: EngineConfig, progress: ProgressDisplay) -> LLM:
    """The engine, with a display for its loading and a warning when kernels cannot be kept."""
    progress("loading model", 0.0)
    from hypocenter.device.cpu.code_cache import cache_problem
    from hypocenter.device.cpu.lang import max_num_threads
    from hypocenter.engine.llm import LLM

    if problem := cache_problem():
        progress.clear()
        say(
            f"kernels are compiled anew each time: {problem}; "
            "set HYPO_CACHE_DIR to a folder you can write"
        )
    else:
        progress.remarks["compiling"] = "at the first run only"
    if (config.num_threads or 0) > (most := max_num_threads()):
        say(f"-t/--threads is {config.num_threads}, but there are {most} to be had: taking {most}")
        config = replace(config, num_threads=most)
    with naming_options(EngineOptions):
        return LLM(path, config, progress=progress)


def system_message(text: str | None) -> list[dict[str, str]]:
    """The message that a conversation begins with, if there is one."""
    return [] if text is None else [{"role": "system", "content": text}]


def as_user(text: str) -> dict[str, str]:
    """A message of the person who asks."""
    return {"role": "user", "content": text}


def closing_line(completion: Completion) -> str:
    """How many tokens ran, how fast, and why it ended."""
    timings = completion.timings
    if not timings.num_prompt_tokens:
        num_tokens = len(completion.prompt_token_ids)
        return f"prompt {count_text(num_tokens, 'token')}, not read; {completion.finish_reason}"
    num_graphs = completion.route.num_graphs
    graphs = f"; {num_graphs} graph{'s' * (num_graphs > 1)} captured" if num_graphs else ""
    cached = f" after {timings.num_cached_tokens} cached" if timings.num_cached_tokens else ""
    return (
        f"prompt {_speed(timings.num_prompt_tokens, timings.prompt_tokens_per_second)}{cached}; "
        f"generation "
        f"{_speed(timings.num_generated_tokens, timings.generated_tokens_per_second)}; "
        f"{completion.finish_reason}{graphs}"
    )


def _speed(num_tokens: int, tokens_per_second: float) -> str:
    """Without a speed where none was measured: the prompt's step gives the first token."""
    count = count_text(num_tokens, "token")
    if not tokens_per_second:
        return count
    if tokens_per_second < 1:
        return f"{count}, {1 / tokens_per_second:.1f} s a token"
    return f"{count}, {tokens_per_second:.1f} tokens/s"


def channels_of(llm: LLM) -> Channels | None:
    """What tells the channels of a chat's answer apart; None: the model has no channels."""
    template = llm.chat_template
    return Channels() if template is not None and is_spoken_by(template.source) else None


class ShowApart:
    """Hands what is for the reader to `show`, and what the model thinks to `show_thought`, with a
    line end between the two."""

    def __init__(
        self, channels: Channels, show: Callable[[str], None], show_thought: Callable[[str], None]
    ) -> None:
        self._channels, self._show, self._show_thought = channels, show, show_thought
        self._is_thinking = False

    def push(self, text: str) -> None:
        self._put(self._channels.push(text))

    def finish(self) -> None:
        """What was held back; no more text will follow."""
        self._put(self._channels.flush())
        self._end_thought()

    def _put(self, spoken: Spoken) -> None:
        if spoken.reasoning:
            self._show_thought(spoken.reasoning)
            self._is_thinking = True
        if spoken.content:
            self._end_thought()
            self._show(spoken.content)

    def _end_thought(self) -> None:
        if self._is_thinking:
            self._show_thought("\n")
        self._is_thinking = False


def answer_chat(
    llm: LLM,
    token_ids: Sequence[int],
    params: SamplingParams,
    progress: ProgressDisplay,
    stopped: Callable[[], bool] = lambda: False,
    *,
    quiet: bool,
) -> Completion:
    """As `answer`, of a chat: thoughts go to stderr, or nowhere if `quiet`; the completion has the
    answer alone for its text."""
    channels = channels_of(llm)
    if channels is None:
        return answer(llm, token_ids, params, progress, stopped)
    apart = ShowApart(channels, emit, (lambda text: None) if quiet else think)
    completion = answer(llm, token_ids, params, progress, stopped, apart.push)
    apart.finish()
    return msgspec.structs.replace(completion, text=split(completion.text).content)


def answer(
    llm: LLM,
    token_ids: Sequence[int],
    params: SamplingParams,
    progress: ProgressDisplay,
    stopped: Callable[[], bool] = lambda: False,
    show: Callable[[str], None] = emit,
) -> Completion:
    """Generate, hand each piece to `show` as it comes, and end early when `stopped` says so.

    The display follows the prompt, and a stop waits for one step at most. Raises what the request
    raises.
    """
    engine = llm.engine
    with naming_options(SamplingOptions):
        request = engine.request(token_ids, params)

    def look() -> None:
        interrupt.raise_held()
        if not request.output_ids:
            progress("reading the prompt", request.num_computed / len(token_ids))
        if stopped():
            engine.cancel(request)

    try:
        with contextlib.closing(engine.follow(request, look)) as pieces:
            for piece in pieces:
                if piece.text:
                    progress.clear()
                    show(piece.text)
    except AccessRefused as error:
        progress.clear()
        _explain(error)
        raise
    finally:
        progress.clear()
    return request.completion(llm.route())


def _explain(error: AccessRefused) -> None:
    """What guarded launches found, with the reason that a replay of one program gives."""
    try:
        from hypocenter.replay.live import explain_refused
    except ModuleNotFoundError as missing:  # simulated GPUs run without torch, replays do not
        lines = [
            *error.texts[0].splitlines(),
            f"not replayed, so no index and no values: that needs {missing.name}",
        ]
    else:
        lines = explain_refused(error).splitlines()
    for line in lines:
        say(line)
