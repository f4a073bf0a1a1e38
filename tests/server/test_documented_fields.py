"""Every field that others document is honoured, refused by its name, or known to change nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from documented_fields import OPTIONS_OF_OLLAMA, documented

from hypocenter.server.api_error import ApiError
from hypocenter.server.bodies.field_table import ALLOWED_IN_ONE, HARMLESS, REFUSED, TOLD
from hypocenter.server.bodies.sampling_fields import chat_params, completion_params
from hypocenter.server.dialects import messages_body, ollama_body, responses_body
from hypocenter.server.dialects.messages_body import MessagesBody
from hypocenter.server.dialects.ollama_body import OllamaChatBody, OllamaGenerateBody
from hypocenter.server.dialects.ollama_routes import EmbedBody
from hypocenter.server.dialects.responses_body import ResponsesBody
from hypocenter.server.fields import ChatBody, CompletionBody, read_body
from hypocenter.server.vectors.bodies import EmbeddingBody, RerankBody
from hypocenter.settings.config import SamplingParams

BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (ChatBody, {"messages": [{"role": "user", "content": "hi"}]}),
    "completions": (CompletionBody, {"prompt": "hi"}),
    "messages": (MessagesBody, {"messages": [{"role": "user", "content": "hi"}]}),
    "responses": (ResponsesBody, {"input": "hi"}),
}
#: Bodies of what no answer is sampled by, or under names of their own.
OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "embeddings": (EmbeddingBody, {"input": "hi"}),
    "rerank": (RerankBody, {"query": "hi", "documents": ["ho"]}),
    "ollama-chat": (OllamaChatBody, {"messages": [{"role": "user", "content": "hi"}]}),
    "ollama-generate": (OllamaGenerateBody, {"prompt": "hi"}),
    "ollama-embed": (EmbedBody, {"input": "hi"}),
}
ALL = BODIES | OTHERS
#: That change nothing on one route, and are read on another.
READ_ON_ONE = {"responses": {"metadata", "store"}, "ollama-embed": {"truncate"}}
#: What no field of these takes for a value that changes nothing.
ODD: tuple[Any, ...] = ("x", 7, ["x"], {"x": 1})


def read(route: str, **more: Any) -> tuple[Any, list[str]]:
    kind, least = ALL[route]
    read: tuple[Any, list[str]] = asyncio.run(read_body(json.dumps(least | more).encode(), kind))
    return read


@pytest.mark.parametrize("route", ALL)
def test_every_documented_field_has_one_standing(route: str) -> None:
    known = set(ALL[route][0].__struct_fields__)
    for whose, name in documented(route):
        if name in known:
            continue
        places = [name in REFUSED, name in HARMLESS, name in TOLD]
        assert places.count(True) == 1, (whose, name)
    assert not REFUSED.keys() & {*HARMLESS, *TOLD}
    assert known & {*HARMLESS, *TOLD} == READ_ON_ONE.get(route, set())


@pytest.mark.parametrize("route", ALL)
def test_the_reading_of_a_body_keeps_to_the_table(route: str) -> None:
    known = set(ALL[route][0].__struct_fields__)
    for name in {name for _, name in documented(route)} - known | REFUSED.keys() - known:
        if name in HARMLESS or name in TOLD:
            for value in ODD:
                _, unknown = read(route, **{name: value})
                assert unknown == ([name] if name in TOLD else []), name
            continue
        as_read = "completions" if route == "completions" else "chat"
        allowed = ALLOWED_IN_ONE.get((name, as_read), REFUSED[name].allowed)
        for value in (None, *allowed):
            assert read(route, **{name: value})[1] == [], (name, value)
        for value in (*ODD, 1.5, True, False):
            if any(value == one and type(value) is type(one) for one in allowed):
                continue
            with pytest.raises(ApiError) as refused:
                read(route, **{name: value})
            error = refused.value.body["error"]
            assert (refused.value.status, error["param"]) == (400, name)
            assert error["message"].startswith(f"{name} is not supported by this server")
            for one in allowed:
                assert json.dumps(one, separators=(",", ":")) in error["message"], name
            assert REFUSED[name].instead in error["message"]


def test_every_option_of_ollama_has_one_standing() -> None:
    tables = (ollama_body.SAMPLED, ollama_body.HARMLESS, ollama_body.REFUSED, ollama_body.TOLD)
    for name in OPTIONS_OF_OLLAMA:
        assert [name in table for table in tables].count(True) == 1, name
    assert {name for table in tables for name in table} == set(OPTIONS_OF_OLLAMA)


def test_options_of_ollama_keep_to_their_table() -> None:
    def chat(**options: Any) -> tuple[Any, list[str]]:
        body, _ = read("ollama-chat", model="m", options=options)
        return ollama_body.chat_of(body, "")

    values = {"stop": ["x"], "seed": 3, "top_k": 3, "num_predict": 3}
    for name, field in ollama_body.SAMPLED.items():
        value = values.get(name, 0.5)
        made, ignored = chat(**{name: value})
        assert (getattr(made, field), ignored) == (value, []), name
        with pytest.raises(ApiError, match="options"):
            chat(**{name: {"x": 1}})
    for name in (*ollama_body.HARMLESS, *ollama_body.TOLD):
        told = [f"options.{name}"] if name in ollama_body.TOLD else []
        assert chat(**{name: 7})[1] == told
    for name, allowed in ollama_body.REFUSED.items():
        for value in allowed:
            assert chat(**{name: value})[1] == []
        with pytest.raises(ApiError, match=f"options.{name} is not supported by this server"):
            chat(**{name: 17.5})
    assert chat(num_predict=-2)[0].max_tokens == -1
    assert chat(frob=1)[1] == ["options.frob"]
    plain = chat_params(chat()[0])
    assert (plain.temperature, plain.top_k, plain.top_p) == (0.8, 40, 0.9)


def test_a_field_that_nobody_knows_is_named() -> None:
    assert read("chat", frobnicate=1, user="me")[1] == ["frobnicate"]


#: A value of each field that says how answers are sampled, and what SamplingParams then have.
SAMPLED: dict[str, tuple[Any, str, Any]] = {
    "max_tokens": (3, "max_tokens", 3),
    "n_predict": (3, "max_tokens", 3),
    "temperature": (0.5, "temperature", 0.5),
    "top_p": (0.5, "top_p", 0.5),
    "top_k": (3, "top_k", 3),
    "min_p": (0.5, "min_p", 0.5),
    "repetition_penalty": (1.5, "repeat_penalty", 1.5),
    "repeat_penalty": (1.5, "repeat_penalty", 1.5),
    "presence_penalty": (1.0, "presence_penalty", 1.0),
    "frequency_penalty": (1.0, "frequency_penalty", 1.0),
    "ignore_eos": (True, "ignore_eos", True),
    "seed": (3, "seed", 3),
    "stop": ("x", "stop", ("x",)),
    "include_stop_str_in_output": (True, "include_stop_str_in_output", True),
    "drafts": (False, "drafts", False),
    "logit_bias": ({"3": 1.0}, "logit_bias", ((3, 1.0),)),
    "min_tokens": (2, "min_tokens", 2),
    "stop_token_ids": ([3], "stop_token_ids", (3,)),
    "allowed_token_ids": ([3], "allowed_token_ids", (3,)),
    "bad_words": (["x"], "bad_words", ("x",)),
    "guided_json": ({"a": 1}, "json_schema", '{"a": 1}'),
    "guided_regex": ("a+", "regex", "a+"),
    "guided_choice": (["a", "b"], "choice", ("a", "b")),
    "guided_grammar": ('root ::= "a"', "grammar", 'root ::= "a"'),
    "json_schema": ({"a": 1}, "json_schema", '{"a": 1}'),
    "grammar": ('root ::= "a"', "grammar", 'root ::= "a"'),
    "response_format": ({"type": "json_object"}, "json_object", True),
}


PARAMS_OF: dict[str, Callable[[Any], SamplingParams]] = {
    "chat": chat_params,
    "completions": completion_params,
    "messages": lambda body: chat_params(messages_body.chat_of(body, "")[0]),
    "responses": lambda body: chat_params(responses_body.chat_of(body, [], lambda name: None)[0]),
}


@pytest.mark.parametrize("route", BODIES)
def test_a_field_that_is_honoured_is_in_the_parameters(route: str) -> None:
    params_of = PARAMS_OF[route]
    for name, (value, field, expected) in SAMPLED.items():
        body, unknown = read(route, **{name: value})
        assert (unknown, getattr(params_of(body), field)) == ([], expected), name
    for kind, value, field, expected in (
        ("json", {"a": 1}, "json_schema", '{"a": 1}'),
        ("json_object", True, "json_object", True),
        ("grammar", 'root ::= "a"', "grammar", 'root ::= "a"'),
        ("regex", "a+", "regex", "a+"),
        ("choice", ["a"], "choice", ("a",)),
    ):
        body, _ = read(route, structured_outputs={kind: value})
        assert getattr(params_of(body), field) == expected
    for endless in ({"max_tokens": -1}, {"n_predict": -1}):
        assert params_of(read(route, **endless)[0]).max_tokens is None
    with pytest.raises(ApiError, match="max_tokens 3 and n_predict 4 are given"):
        params_of(read(route, max_tokens=3, n_predict=4)[0])
    with pytest.raises(ApiError, match="it may have json, json_object, grammar, regex, choice"):
        read(route, structured_outputs={"structural_tag": "x"})
    with pytest.raises(ApiError, match="regex is '', but an empty one allows no text"):
        params_of(read(route, structured_outputs={"regex": ""})[0])
    with pytest.raises(ApiError, match=r"choice is \[\], but must have 1 to 1024 texts"):
        params_of(read(route, guided_choice=[])[0])
    with pytest.raises(ApiError, match="ask for a form each"):
        params_of(read(route, guided_regex="a", structured_outputs={"choice": ["a"]})[0])
