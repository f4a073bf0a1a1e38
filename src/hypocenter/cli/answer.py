"""One answer, as `hypo run` and the chat give it: an engine, and its pieces as they come.

Reads no prompt and holds no options.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hypocenter.base.errors import AccessRefused
from hypocenter.base.results import Completion, Delta
from hypocenter.base.wording import count_text
from hypocenter.cli import interrupt
from hypocenter.cli.options import EngineOptions, SamplingOptions, naming_options
from hypocenter.cli.output import emit, say, think
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.device.choice import with_device
from hypocenter.settings.config import EngineConfig, SamplingParams

if TYPE_CHECKING:
    from hypocenter.engine.llm import LLM


def open_llm(path: str, config: EngineConfig, progress: ProgressDisplay) -> LLM:
    """The engine, with a display for its loading and a warning when kernels cannot be kept."""
    progress("loading model", 0.0)
    from hypocenter.device.cpu.kept_files import cache_problem
    from hypocenter.device.cpu.threads import max_num_threads
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
        asked = f"-t/--threads is {config.num_threads}"
        say(f"{asked}, but this process may use {most} CPUs: it takes {most}")
        config = replace(config, num_threads=most)
    with naming_options(EngineOptions):
        config, choice = with_device(Path(path), config)
        if choice is not None and choice.has_gpu and not progress.is_quiet:
            progress.clear()
            say(str(choice))
        llm = LLM(path, config, progress=progress)
    gc.enable()  # `__main__.py` turns it off while a run starts
    return llm


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
    drafts = ""
    if timings.num_drafted_tokens:
        drafts = f"; {timings.num_accepted_tokens} of {timings.num_drafted_tokens} drafts right"
    return (
        f"prompt {_speed(timings.num_prompt_tokens, timings.prompt_tokens_per_second)}{cached}; "
        f"generation "
        f"{_speed(timings.num_generated_tokens, timings.generated_tokens_per_second)}; "
        f"{completion.finish_reason}{drafts}{graphs}"
    )


def _speed(num_tokens: int, tokens_per_second: float) -> str:
    """The speed, where one was measured: the prompt's step gives the first token."""
    count = count_text(num_tokens, "token")
    if not tokens_per_second:
        return count
    if tokens_per_second < 1:
        return f"{count}, {1 / tokens_per_second:.1f} s a token"
    return f"{count}, {tokens_per_second:.1f} tokens/s"


class Shown:
    """Puts what is for the reader on stdout, and what the model thinks on stderr, with a line end
    between the two; the latter nowhere if `quiet`."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._is_thinking = False

    def put(self, piece: Delta) -> None:
        if piece.reasoning and not self._quiet:
            think(piece.reasoning)
            self._is_thinking = True
        if piece.text:
            self.end_thought()
            emit(piece.text)

    def end_thought(self) -> None:
        if self._is_thinking:
            think("\n")
        self._is_thinking = False


def answer(
    llm: LLM,
    token_ids: Sequence[int],
    params: SamplingParams,
    progress: ProgressDisplay,
    stopped: Callable[[], bool] = lambda: False,
    *,
    is_chat: bool,
    shown: Shown | None,
) -> Completion:
    """Generate, have each piece `shown` as it comes, and end early when `stopped` says so.

    The display follows the prompt, and a stop waits for one step at most. Raises what the request
    raises.
    """
    engine = llm.engine
    with naming_options(SamplingOptions):
        make = llm.answer_request if is_chat else engine.request
        request = make(token_ids, params)

    def look() -> None:
        interrupt.raise_held()
        if not request.output_ids:
            progress("reading the prompt", request.num_computed / len(token_ids))
        if stopped():
            engine.cancel(request)

    try:
        with contextlib.closing(engine.follow(request, look)) as pieces:
            for piece in pieces:
                if shown is not None and (piece.text or piece.reasoning):
                    progress.clear()
                    shown.put(piece)
    except AccessRefused as error:
        progress.clear()
        _explain(error)
        raise
    finally:
        progress.clear()
        if shown is not None:
            shown.end_thought()
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
