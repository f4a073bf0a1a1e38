"""OpenAI's own client against `hypo serve`: whole answers, streams, errors, forms, retries."""

from __future__ import annotations

import asyncio
import json
import socketserver
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest
from outside.served import Served, serving

from clients.conftest import KEY

MESSAGES: Any = [{"role": "user", "content": "def count_words(text):"}]
#: Of the model's 512 tokens of context; an answer that is never over by itself.
LONG: Any = {"max_tokens": 480, "extra_body": {"ignore_eos": True}}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "colour": {"enum": ["red", "blue"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "colour", "size"],
    "additionalProperties": False,
}


class Thing(pydantic.BaseModel):
    colour: Literal["red", "blue"]
    is_big: bool


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as one:
        yield one


def chat(client: openai.OpenAI, **more: Any) -> Any:
    given = {"model": "chat", "messages": MESSAGES, "max_tokens": 8, "temperature": 0, **more}
    return client.chat.completions.create(**given)


def complete(client: openai.OpenAI, **more: Any) -> Any:
    given = {"model": "chat", "prompt": "import os", "max_tokens": 8, "temperature": 0, **more}
    return client.completions.create(**given)


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list()
    assert (model.id, model.owned_by) == ("chat", "hypocenter")
    assert client.models.retrieve("chat").id == "chat"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing")


def test_a_chat(client: openai.OpenAI) -> None:
    answer = chat(client)
    [choice] = answer.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.message.content
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert answer.timings["predicted_n"] == 8


def test_a_completion_of_several_prompts(client: openai.OpenAI) -> None:
    both = complete(client, prompt=["import os", "class A"], n=2, temperature=1, seed=3).choices
    assert [choice.index for choice in both] == [0, 1, 2, 3]
    again = complete(client, prompt=["import os", "class A"], n=2, temperature=1, seed=3).choices
    assert [choice.text for choice in both] == [choice.text for choice in again]
    assert both[0].text != both[1].text


def test_a_stream(client: openai.OpenAI) -> None:
    whole = chat(client).choices[0].message.content
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole
    assert chunks[-2].choices[0].finish_reason == "length"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 8)
    assert chunks[-1].timings["predicted_n"] == 8
    texts = [c.choices[0].text for c in complete(client, stream=True)]
    assert "".join(texts) == complete(client).choices[0].text


def test_the_asynchronous_client(url: str, client: openai.OpenAI) -> None:
    async def ask() -> tuple[list[str], str]:
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY) as one:
            many = [
                one.chat.completions.create(
                    model="chat", messages=MESSAGES, max_tokens=8, temperature=0
                )
                for _ in range(12)
            ]
            stream: Any = await one.completions.create(
                model="chat", prompt="import os", max_tokens=8, temperature=0, stream=True
            )
            pieces = [chunk.choices[0].text async for chunk in stream]
            answers = await asyncio.gather(*many)
            return [answer.choices[0].message.content or "" for answer in answers], "".join(pieces)

    contents, text = asyncio.run(ask())
    assert set(contents) == {chat(client).choices[0].message.content}
    assert text == complete(client).choices[0].text


def test_logprobs(client: openai.OpenAI) -> None:
    found = chat(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(found) == 8
    for entry in found:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert bytes(entry.bytes).decode() == entry.token
    of_text = complete(client, logprobs=2, echo=True, max_tokens=1).choices[0].logprobs
    assert of_text.token_logprobs[0] is None
    assert len(of_text.tokens) == len(of_text.top_logprobs) == len(of_text.text_offset)


def test_stop_and_seed(client: openai.OpenAI) -> None:
    free = complete(client, max_tokens=40).choices[0].text
    stop = free[10:13]
    held = complete(client, max_tokens=40, stop=[stop]).choices[0]
    assert (held.text, held.finish_reason) == (free[: free.index(stop)], "stop")
    one, two, other = (
        chat(client, temperature=1, seed=seed).choices[0].message.content for seed in (5, 5, 6)
    )
    assert one == two
    assert one != other


def test_answers_in_a_form(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="chat", messages=MESSAGES, response_format=Thing, temperature=1, seed=1
    )
    thing = parsed.choices[0].message.parsed
    assert isinstance(thing, Thing)
    form = {"type": "json_schema", "json_schema": {"name": "t", "schema": SCHEMA, "strict": True}}
    answer = chat(client, response_format=form, temperature=1, seed=2, max_tokens=200)
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
    any_object = chat(client, response_format={"type": "json_object"}, max_tokens=400, seed=8)
    if any_object.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(any_object.choices[0].message.content), dict)


def test_a_form_in_a_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="chat", messages=MESSAGES, response_format=Thing, temperature=1, seed=1
    ) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Thing)


def test_ids(client: openai.OpenAI) -> None:
    raw: Any = client.chat.completions.with_raw_response
    answer = raw.create(
        model="chat", messages=MESSAGES, max_tokens=1, extra_headers={"x-request-id": "mine-1"}
    )
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.parse()._request_id == "mine-1"
    assert answer.parse().id.startswith("chatcmpl-")
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, temperature=-1)
    assert caught.value.request_id


def test_each_status_is_an_exception_of_its_own(url: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        chat(client, temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as over:
        complete(client, prompt=[5] * 600)
    assert over.value.code == "context_length_exceeded"
    with (
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as other,
        pytest.raises(openai.AuthenticationError) as auth,
    ):
        chat(other)
    assert auth.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError) as missing:
        chat(client, model="gpt-4")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.APIStatusError) as large:
        complete(client, prompt="a" * (33 << 20))
    assert (large.value.status_code, large.value.code) == (413, "body_too_large")


def test_a_full_queue_is_a_rate_limit(tmp_path: Path, python: str, model: Path) -> None:
    words = (str(model), "-np", "1", "--max-queued", "0")
    with serving(tmp_path, *words, python=python) as served:
        address = f"http://127.0.0.1:{served.port}/v1"
        with openai.OpenAI(base_url=address, api_key="any", max_retries=0) as client:
            with complete(client, stream=True, **LONG) as stream:
                next(iter(stream))
                with pytest.raises(openai.RateLimitError) as full:
                    complete(client)
                assert full.value.code == "queue_full"
                assert full.value.response.headers["retry-after"]
            # A client that tries again gets its answer, as the one that left makes room.
            assert complete(client.with_options(max_retries=3)).choices[0].text


def test_a_client_that_leaves_a_stream_ends_the_request(
    served: Served, client: openai.OpenAI
) -> None:
    with complete(client, stream=True, **LONG) as stream:
        next(iter(stream))
    stop = time.monotonic() + 30
    admin = {"Authorization": "Bearer boss"}
    while served.get("/debug/requests", headers=admin).json["open"]:
        assert time.monotonic() < stop
        time.sleep(0.05)


def test_a_worker_that_dies_is_a_pause_for_the_client(
    served: Served, client: openai.OpenAI
) -> None:
    expected = complete(client, **LONG).choices[0].text
    pieces = []
    for number, chunk in enumerate(complete(client, stream=True, **LONG)):
        pieces.append(chunk.choices[0].text)
        if number == 20:
            served.kill_worker()
    assert "".join(pieces) == expected


class _Refusing(BaseHTTPRequestHandler):
    """Passes on to a server, but for the first requests, of which it says what our server says."""

    target = ""
    refusals: list[tuple[int, dict[str, str]]] = []  # noqa: RUF012 - each test sets it
    times: list[float] = []  # noqa: RUF012

    def do_POST(self) -> None:
        self.times.append(time.monotonic())
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.refusals:
            status, headers = self.refusals.pop(0)
            data = b'{"error":{"message":"no","type":"t","param":null,"code":null}}'
        else:
            with httpx.Client() as client:
                answer = client.post(
                    self.target + "/completions", content=body,
                    headers={"authorization": self.headers["authorization"]},
                )  # fmt: skip
            status, headers, data = answer.status_code, {}, answer.content
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def test_the_client_reads_our_headers_about_retries(url: str) -> None:
    """What our server says of retries (`test_raw.py` has that it does) is what the client does."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Refusing) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{proxy.server_address[1]}"
        _Refusing.target = url
        try:
            with openai.OpenAI(base_url=address, api_key=KEY, max_retries=2) as client:
                _Refusing.refusals[:] = [(503, {"Retry-After": "2", "x-should-retry": "true"})]
                assert complete(client).choices[0].text
                assert len(_Refusing.times) == 2
                assert _Refusing.times[1] - _Refusing.times[0] >= 1.9
                _Refusing.times.clear()
                _Refusing.refusals[:] = [(500, {"x-should-retry": "false"})] * 3
                with pytest.raises(openai.InternalServerError):
                    complete(client)
                assert len(_Refusing.times) == 1
        finally:
            proxy.shutdown()
            thread.join()
