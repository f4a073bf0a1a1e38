"""A model of this engine as lm-eval has models: what follows a text, how likely, and what comes.

How a context and its continuation become tokens is lm-eval's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from hypocenter.base.errors import UsageError
from hypocenter.base.results import Completion
from hypocenter.engine.llm import LLM
from hypocenter.settings.config import SamplingParams

#: Tokens of an answer where a task does not say, as lm-eval's other models have it.
_MAX_ANSWER = 256
#: Requests that are handed to the engine at once; it runs as many together as it can.
_AT_ONCE = 256
#: Settings of answers that are passed on; a task that asks for another one is refused.
_PASSED_ON = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})
_READ_HERE = frozenset({"until", "max_gen_toks", "max_new_tokens", "max_tokens", "do_sample"})


class HypocenterLM(TemplateLM):  # type: ignore[misc]
    """Answers requests of lm-eval; all of a call run together."""

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        self._llm = llm

    @property
    def max_length(self) -> int:
        return self._llm.context_length

    @property
    def eot_token_id(self) -> int:
        ids = self._llm.tokenizer.end_ids
        if not ids:
            raise UsageError("this model has no token that ends a text, which lm-eval needs")
        return min(ids)

    @property
    def prefix_token_id(self) -> int:
        """What a text without context follows."""
        bos = self._llm.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids; with the BOS of the model where it has one, unless that is declined."""
        return list(self._llm.tokenizer.encode(string, add_special=add_special_tokens is not False))

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """The sum of log probabilities of each continuation, and whether all are the likeliest."""
        found: list[tuple[float, bool]] = []
        for start in range(0, len(requests), _AT_ONCE):
            asked = [(before, after) for _, before, after in requests[start : start + _AT_ONCE]]
            for (before, after), read in zip(asked, self._read(asked), strict=True):
                found.append(_likelihood(read, self._num_scored(before, after)))
        for request, scored in zip(requests, found, strict=True):
            if request[0] is not None:
                self.cache_hook.add_partial("loglikelihood", request[0], scored)
        return found

    def _num_scored(self, before: Sequence[int], after: Sequence[int]) -> int:
        if len(after) > self.max_length - 1:
            raise UsageError(
                f"a continuation of {len(after)} tokens does not fit behind a token of context: "
                f"the context has {self.max_length}; raise -c"
            )
        return len(after)

    def _read(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Completion]:
        """The end of each text, as long as the context is."""
        texts = [[*before, *after][-self.max_length :] for before, after in pairs]
        params = SamplingParams(max_tokens=0, prompt_logprobs=1)
        return self._llm.generate(texts, params)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The sum of log probabilities of all tokens of each text, in windows of a context."""
        found = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                # With what follows its last token a window has one more.
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            total = sum(logprob for logprob, _ in self._loglikelihood_tokens(pairs))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
            found.append(total)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The answer to each context, up to one of its stop strings."""
        found: list[str] = []
        for start in range(0, len(requests), _AT_ONCE):
            asked = [request.args for request in requests[start : start + _AT_ONCE]]
            each = [self._answering(context, settings) for context, settings in asked]
            answers = self._llm.generate([ids for ids, _ in each], [params for _, params in each])
            for args, answer in zip(asked, answers, strict=True):
                self.cache_hook.add_partial("generate_until", args, answer.text)
                found.append(answer.text)
        return found

    def _answering(
        self, context: str, settings: Mapping[str, Any]
    ) -> tuple[list[int], SamplingParams]:
        """The end of a context that leaves room for the answer, and how that is drawn."""
        params = self._params(settings)
        num_left = self.max_length - (params.max_tokens or 0)
        if num_left < 1:
            raise UsageError(
                f"a task asks for {params.max_tokens} tokens, and the context has "
                f"{self.max_length}; raise -c"
            )
        return self.tok_encode(context)[-num_left:] or [self.prefix_token_id], params

    def _params(self, settings: Mapping[str, Any]) -> SamplingParams:
        """Raises UsageError for a setting that nothing is made of here."""
        if unknown := sorted(settings.keys() - _PASSED_ON - _READ_HERE):
            known = ", ".join(sorted(_PASSED_ON | _READ_HERE))
            raise UsageError(f"a task asks for {unknown[0]}, and an answer has {known}")
        until = settings.get("until") or []
        lengths = ("max_gen_toks", "max_new_tokens", "max_tokens")
        given = [settings[name] for name in lengths if settings.get(name) is not None]
        passed = {name: settings[name] for name in _PASSED_ON if settings.get(name) is not None}
        if not settings.get("do_sample", passed.get("temperature", 0.0) > 0):
            passed["temperature"] = 0.0  # and so the likeliest token each time
        return SamplingParams(
            max_tokens=int(given[0]) if given else _MAX_ANSWER,
            stop=tuple([until] if isinstance(until, str) else until),
            **passed,
        )


def _likelihood(read: Completion, num_scored: int) -> tuple[float, bool]:
    """The sum for the last tokens of a text that was read, and whether all are the likeliest."""
    assert read.prompt_logprobs is not None
    tokens = [t for t in read.prompt_logprobs[-num_scored:] if t is not None] if num_scored else []
    is_greedy = all(token.logprob == token.top[0].logprob for token in tokens)
    return sum(token.logprob for token in tokens), is_greedy
