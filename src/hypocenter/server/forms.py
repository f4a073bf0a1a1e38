"""The answers of `/v1/completions` and `/v1/chat/completions`, whole and in chunks.

The fields are those of OpenAI's reference: https://platform.openai.com/docs/api-reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypocenter.results import TokenLogprob, TopLogprob
from hypocenter.server.inquiry import Choice, Inquiry


class CompletionForm:
    """Text completions; with `echo` each answer begins with its prompt's text."""

    def __init__(self, inquiry: Inquiry, model: str, echoed: Sequence[str] | None) -> None:
        self._inquiry, self._model, self._echoed = inquiry, model, echoed

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        prompt = self._prompt(choice)
        return self._choice(
            choice,
            prompt + "".join(choice.text),
            self._logprobs(choice, choice.logprobs, is_first=True),
        )

    def answer(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(), "choices": choices, "usage": usage}

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """What is sent before anything was generated."""
        return None

    def chunk(
        self, choice: Choice, text: str, logprobs: Sequence[TokenLogprob], *, is_first: bool
    ) -> dict[str, Any]:
        prompt = self._prompt(choice) if is_first else ""
        found = self._logprobs(choice, logprobs, is_first=is_first)
        return {**self._head(), "choices": [self._choice(choice, prompt + text, found)]}

    def closing(self, choice: Choice) -> dict[str, Any] | None:
        """What is sent behind the last piece; here that says itself how it ended."""
        return None

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(), "choices": [], "usage": usage}

    def _head(self) -> dict[str, Any]:
        inquiry = self._inquiry
        return {
            "id": inquiry.name,
            "object": "text_completion",
            "created": inquiry.created,
            "model": self._model,
        }

    def _prompt(self, choice: Choice) -> str:
        if self._echoed is None:
            return ""
        return self._echoed[choice.index // self._inquiry.num_choices]

    def _choice(self, choice: Choice, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(
        self, choice: Choice, logprobs: Sequence[TokenLogprob], *, is_first: bool
    ) -> dict[str, Any] | None:
        if choice.generation.params.logprobs is None:
            return None
        found: list[tuple[bytes, TokenLogprob | None]] = []
        if is_first and self._echoed is not None:
            of_prompt = choice.prompt_logprobs or ()
            found += zip(choice.prompt_pieces, of_prompt, strict=False)
        found += [(token.piece, token) for token in logprobs]
        texts = [token_text(piece) for piece, _ in found]
        offsets = []
        for text in texts:
            offsets.append(choice.num_chars)
            choice.num_chars += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [token and token.logprob for _, token in found],
            "top_logprobs": [token and _as_table(token) for _, token in found],
            "text_offset": offsets,
        }


class ChatForm:
    """Answers of a conversation."""

    def __init__(self, inquiry: Inquiry, model: str) -> None:
        self._inquiry, self._model = inquiry, model

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice, choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def answer(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head("chat.completion"), "choices": choices, "usage": usage}

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        return self._chunk(choice, {"role": "assistant", "content": ""}, None, None)

    def chunk(
        self, choice: Choice, text: str, logprobs: Sequence[TokenLogprob], *, is_first: bool
    ) -> dict[str, Any]:
        return self._chunk(choice, {"content": text}, self._logprobs(choice, logprobs), None)

    def closing(self, choice: Choice) -> dict[str, Any] | None:
        return self._chunk(choice, {}, None, choice.finish_reason)

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage}

    def _head(self, kind: str) -> dict[str, Any]:
        inquiry = self._inquiry
        return {
            "id": inquiry.name,
            "object": kind,
            "created": inquiry.created,
            "model": self._model,
        }

    def _chunk(
        self,
        choice: Choice,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
    ) -> dict[str, Any]:
        entry = {
            "index": choice.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return {**self._head("chat.completion.chunk"), "choices": [entry]}

    def _logprobs(self, choice: Choice, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if choice.generation.params.logprobs is None:
            return None
        content = [
            {**_as_entry(token), "top_logprobs": [_as_entry(other) for other in token.top]}
            for token in logprobs
        ]
        return {"content": content, "refusal": None}


AnswerForm = CompletionForm | ChatForm


def token_text(piece: bytes) -> str:
    """A token's bytes as a text; of those that are no whole characters OpenAI's spelling."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _as_table(token: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens of a place; the chosen one is always among them.

    Of two tokens with one text the likelier is kept.
    """
    table: dict[str, float] = {}
    for other in (*token.top, token):
        table.setdefault(token_text(other.piece), other.logprob)
    return table


def _as_entry(token: TopLogprob) -> dict[str, Any]:
    return {
        "token": token_text(token.piece),
        "logprob": token.logprob,
        "bytes": list(token.piece),
    }
