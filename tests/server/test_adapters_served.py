"""Adapters as clients of a server name them: by the body, by the model, and for all of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from models.adapter_gguf import random_adapter
from outside.served import Served, serving
from repository import DEMO

from hypocenter import LLM
from hypocenter.base.errors import UsageError
from hypocenter.server.api_error import ApiError
from hypocenter.server.bodies.orders import served_name
from hypocenter.server.fields import LoraItem
from hypocenter.server.generation import AnswerOrder
from hypocenter.server.hosting.adapters import ServedAdapters, no_adapters
from hypocenter.server.hosting.terms import ModelTerms, require_own_names
from hypocenter.settings.config import EngineConfig, SamplingParams

ADAPTERS = ("a.gguf:0.5", "b=/x/c.gguf:0", "d.gguf")


def order(model: str = "m", lora: list[LoraItem] | None = None) -> AnswerOrder:
    given = None if lora is None else tuple(lora)
    return AnswerOrder(["x"], SamplingParams(), model=model, lora=given)


@pytest.mark.parametrize(
    ("asked", "scales"),
    [
        (order(), {"a": 0.5, "b": 0.0, "d": 1.0}),
        (order("a"), {"a": 0.5}),
        (order("b"), {"b": 1.0}),
        (order(lora=[]), {}),
        (order("a", []), {}),
        (order(lora=[LoraItem(1, None, 0.25)]), {"b": 0.25}),
        (order(lora=[LoraItem(name="d"), LoraItem(id=0, scale=-2)]), {"d": 1.0, "a": -2.0}),
    ],
)
def test_what_adapters_count_for_a_request(asked: AnswerOrder, scales: dict[str, float]) -> None:
    applied = ServedAdapters.of(ADAPTERS).apply(asked)
    assert dict(applied.params.lora or ()) == scales  # type: ignore[arg-type]
    assert applied.params.lora is not None


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([LoraItem(3)], "id is 3, but must be from 0 to 2"),
        ([LoraItem(-1)], "id is -1, but"),
        ([LoraItem(name="x")], "there is no adapter 'x'; name one of: a, b, d"),
        ([LoraItem()], "give an adapter's id or its name"),
        ([LoraItem(0, "a")], "give an adapter's id or its name"),
        ([LoraItem(0), LoraItem(name="a")], "is named twice"),
        ([LoraItem(0, None, float("nan"))], "has the scale nan"),
        ([LoraItem(0, None, 1e30)], "which must be from -1000 to 1000"),
    ],
)
def test_what_is_refused(items: list[LoraItem], text: str) -> None:
    with pytest.raises(ApiError, match=text) as error:
        ServedAdapters.of(ADAPTERS).apply(order(lora=items))
    assert error.value.status == 400


def test_a_model_without_adapters() -> None:
    assert no_adapters().apply(order()).params.lora is None
    assert no_adapters().apply(order(lora=[])).params.lora is None
    with pytest.raises(ApiError, match="this model has no adapters"):
        no_adapters().apply(order(lora=[LoraItem(0)]))


def test_what_is_set_counts_from_then_on() -> None:
    adapters = ServedAdapters.of(ADAPTERS)
    adapters.set_scales([LoraItem(2, None, 0.25)])
    assert adapters.scales == (0.0, 0.0, 0.25)
    with pytest.raises(ApiError):
        adapters.set_scales([LoraItem(0), LoraItem(9)])
    assert adapters.scales == (0.0, 0.0, 0.25), "all of it or nothing"


def test_names_are_of_one_model_or_adapter() -> None:
    def terms(path: str, *lora: str) -> ModelTerms:
        return ModelTerms(path=path, engine=EngineConfig(lora=lora))

    require_own_names([terms("m.gguf", "a.gguf"), terms("n.gguf", "b.gguf")])
    with pytest.raises(UsageError, match="an adapter of it have the name 'm'"):
        require_own_names([terms("m.gguf", "m=a.gguf")])
    with pytest.raises(UsageError, match="two models have the name 'a'"):
        require_own_names([terms("m.gguf", "a.gguf"), terms("n.gguf", "a.gguf")])
    assert served_name("a:latest", ("m", "a")) == "a"


# -- a whole server -------------------------------------------------------------------------------

PROMPT = "def read_lines(path):\n    return open(path).read()\n\n\ndef write_lines(path, lines):\n"


def complete(served: Served, **fields: Any) -> tuple[str, int]:
    """The text of an answer, and how many tokens of its prompt were cached."""
    body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, **fields}
    reply = served.post("/v1/completions", body)
    assert reply.status == 200, reply.body
    cached = reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return reply.json["choices"][0]["text"], int(cached)


@pytest.mark.tier("sim")
def test_a_server_applies_adapters_by_name_and_by_number(tmp_path: Path) -> None:
    first = random_adapter(tmp_path / "first.gguf", DEMO, rank=4, seed=1)
    second = random_adapter(tmp_path / "two.gguf", DEMO, rank=9, seed=2)
    files = [str(first), f"second={second}:0"]
    with LLM(DEMO, lora=files, device="cpu") as llm:

        def text(lora: Any) -> str:
            return llm.generate(PROMPT, max_tokens=16, lora=lora).text

        expected = [text(lora) for lora in (["first"], ["second"], [], {"first": 0.5, "second": 2})]
    assert len(set(expected)) == 4
    words = ["--device", "cpu", "--canary-minutes", "0", "--admin-key", "boss"]
    words += ["--lora", files[0], "--lora", files[1]]
    with serving(tmp_path, *words) as served:
        cards = served.get("/v1/models").json["data"]
        [base] = {one["id"] for one in cards if one["parent"] is None}
        assert [(one["id"], one["parent"]) for one in cards[1:]] == [
            ("first", base),
            ("second", base),
        ]
        assert served.get("/v1/models/second").json["parent"] == base
        listed = served.get("/lora-adapters").json
        assert [(one["id"], one["name"], one["scale"]) for one in listed] == [
            (0, "first", 1.0),
            (1, "second", 0.0),
        ]
        asked: list[dict[str, Any]] = [
            {},
            {"model": "second"},
            {"lora": []},
            {"lora": [{"id": 0, "scale": 0.5}, {"id": 1, "scale": 2}]},
        ]
        assert [complete(served, **one)[0] for one in asked] == expected
        again = [complete(served, **one) for one in asked]
        assert [text for text, _ in again] == expected
        assert all(cached > 0 for _, cached in again)
        assert complete(served, model="first") == (expected[0], again[0][1])
        # What all count is changed, and a worker that comes later has the same.
        assert served.post("/lora-adapters", [{"id": 1, "scale": 1}]).json == {"success": True}
        assert complete(served)[0] == expected[1]
        key = {"Authorization": "Bearer boss"}
        os.kill(served.get("/debug/requests", headers=key).json["worker_pid"], signal.SIGKILL)
        assert complete(served)[0] == expected[1]
        assert complete(served, model="first")[0] == expected[0]
        for body, text_of_error in (
            ({"lora": [{"id": 7}]}, "id is 7, but must be from 0 to 1"),
            ({"model": "third"}, "'third' is not served here"),
            ({"lora": "first"}, "lora"),
        ):
            reply = served.post("/v1/completions", {"prompt": "x", **body})
            assert reply.status in (400, 404)
            assert text_of_error in reply.json["error"]["message"]
        for junk in ({"id": 1}, [{"id": 5, "scale": 1}], [{"scale": "x"}]):
            assert served.post("/lora-adapters", junk).status == 400
        assert served.get("/lora-adapters").json[1]["scale"] == 1.0
