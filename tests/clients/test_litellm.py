"""LiteLLM against `hypo serve`: answers, streams, and what it makes of our errors."""

from __future__ import annotations

from typing import Any

import litellm
import pytest

from clients.conftest import KEY

MESSAGES = [{"role": "user", "content": "import os"}]


def ask(url: str, **more: Any) -> Any:
    given = {
        "model": "openai/chat", "messages": MESSAGES, "api_base": url, "api_key": KEY,
        "max_tokens": 8, "temperature": 0, "num_retries": 0, "max_retries": 0, **more,
    }  # fmt: skip
    return litellm.completion(**given)


def test_an_answer_whole_and_in_pieces(url: str) -> None:
    whole = ask(url)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 8
    chunks = list(ask(url, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    [usage] = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert usage.completion_tokens == 8


def test_a_completion_of_a_text(url: str) -> None:
    answer = litellm.text_completion(
        model="text-completion-openai/chat", prompt="import os", api_base=url, api_key=KEY,
        max_tokens=4, temperature=0,
    )  # fmt: skip
    assert answer.choices[0].text


ERRORS: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "context": (
        {"messages": [{"role": "user", "content": "import os\n" * 600}]},
        litellm.ContextWindowExceededError,
    ),
    "key": ({"api_key": "wrong"}, litellm.AuthenticationError),
    "model": ({"model": "openai/nothing"}, litellm.NotFoundError),
    "field": ({"temperature": -1}, litellm.BadRequestError),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_is_what_it_is(url: str, case: str) -> None:
    more, kind = ERRORS[case]
    with pytest.raises(kind):
        ask(url, **more)


def test_a_full_queue(tmp_path: Any, python: str, model: Any) -> None:
    from outside.served import serving

    words = (str(model), "-np", "1", "--max-queued", "0")
    with serving(tmp_path, *words, python=python) as served:
        body = {"prompt": "a", "max_tokens": 480, "ignore_eos": True}
        with served.stream("/v1/completions", body) as stream:
            next(stream)
            with pytest.raises(litellm.RateLimitError):
                ask(f"http://127.0.0.1:{served.port}/v1")
