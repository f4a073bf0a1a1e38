"""`/v1/messages` and `/v1/responses` end to end: whole and streamed answers are one, usage, stops,
errors, counts, what is kept and for whom."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from outside.served import Reply, Served, serving
from repository import DEMO

from hypocenter.base.results import CallPiece
from hypocenter.server.dialects.blocks import BlockChange, BlockKind, SpokenBlocks
from hypocenter.server.generation import Generation
from hypocenter.server.inquiry import Choice, _join
from hypocenter.settings.config import SamplingParams
from hypocenter.wire.messages import Ending, Piece

PATH = "/v1/messages"
KEY, OTHER = "sesame", "open"
HEADERS = {"x-api-key": KEY, "anthropic-version": "2023-06-01", "anthropic-beta": "x"}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{# <tool_call> </think> #}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %};\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
ANSWER = (
    "<think>Hm.</think>\n\nI look.\n"
    '<tool_call>\n{"name": "find", "arguments": {"q": "a < b"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "count", "arguments": {}}\n</tool_call>'
)
CONTENT: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": "Hm.", "signature": ""},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "name": "find", "input": {"q": "a < b"}},
    {"type": "tool_use", "name": "count", "input": {}},
]
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("find", "count")]
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    words = (str(DEMO), "--chat-template", TEMPLATE, "-t", "1", "--no-spare", "--api-key", KEY)
    with serving(tmp_path_factory.mktemp("served"), *words, "--api-key", OTHER) as one:
        yield one


def ask(served: Served, path: str = PATH, **fields: Any) -> Reply:
    body = {"model": "", "messages": HI, "max_tokens": 8, "temperature": 0, **fields}
    return served.post(path, body, headers=HEADERS)


def saying(answer: str) -> dict[str, Any]:
    return {"grammar": f"root ::= {json.dumps(answer)}\n", "max_tokens": 200}


def gathered(reply: Reply) -> dict[str, Any]:
    """The message that the events of a stream make, their order checked."""
    names = [line[7:] for line in reply.body.decode().splitlines() if line.startswith("event: ")]
    events = reply.events
    assert names == [event["type"] for event in events]
    assert names[:2] == ["message_start", "ping"]
    assert names[-2:] == ["message_delta", "message_stop"]
    message: dict[str, Any] = events[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    is_open = False
    for event in events[2:-2]:
        content = message["content"]
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(content)
                content.append({**event["content_block"], "json": ""})
                is_open = True
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(content) - 1
                delta = event["delta"]
                name = delta["type"].removesuffix("_delta")
                field, to = {"input_json": ("partial_json", "json")}.get(name, (name, name))
                content[-1][to] += delta[field]
            case "content_block_stop":
                assert is_open
                if text := content[-1].pop("json"):
                    content[-1]["input"] = json.loads(text)
                is_open = False
    assert not is_open
    return {**message, **events[-2]["delta"], "usage": events[-2]["usage"]}


def without_ids(message: dict[str, Any]) -> Any:
    blocks = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return blocks, message["stop_reason"], message["stop_sequence"], message["usage"]


def test_a_whole_answer_and_its_stream_are_one(served: Served) -> None:
    asked = {**saying(ANSWER), "tools": TOOLS}
    ask(served, **asked)  # which leaves the prompt in the cache
    reply = ask(served, **asked)
    assert reply.status == 200, reply.body
    whole = reply.json
    streamed = gathered(ask(served, stream=True, **asked))
    assert without_ids(streamed) == without_ids(whole)
    assert without_ids(whole)[:3] == (CONTENT, "tool_use", None)
    assert all(block["id"].startswith("call-") for block in whole["content"][2:])
    usage = whole["usage"]
    assert usage["cache_read_input_tokens"] >= 16
    count = ask(served, f"{PATH}/count_tokens", tools=TOOLS).json["input_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count
    hidden = ask(served, thinking={"type": "adaptive", "display": "omitted"}, **asked).json
    assert hidden["content"][0] == {"type": "thinking", "thinking": "", "signature": ""}


def test_a_turn_goes_on_with_what_tools_said(served: Served) -> None:
    first = ask(served, **saying(ANSWER), tools=TOOLS).json
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "rain"}
        for block in first["content"][2:]
    ]
    turn = [*HI, {"role": "assistant", "content": first["content"]}]
    turn.append({"role": "user", "content": [*results, {"type": "text", "text": "So?"}]})
    reply = ask(served, messages=turn, tools=TOOLS)
    assert reply.status == 200, reply.body
    assert "x-ignored-fields" not in reply.headers


def test_what_may_be_called_is_heeded(served: Served) -> None:
    none = ask(served, tools=TOOLS, tool_choice={"type": "none"}, **saying("hello")).json
    assert none["content"] == [{"type": "text", "text": "hello"}]
    once = {"type": "any", "disable_parallel_tool_use": True}
    forced = ask(served, tools=TOOLS, tool_choice=once, **saying("hello"))
    assert "cannot be the call that tool_choice asks for" in forced.json["error"]["message"]
    other = ask(served, tools=TOOLS, tool_choice={"type": "tool", "name": "x"})
    assert "tool_choice names 'x'" in other.json["error"]["message"]


def test_why_an_answer_ended(served: Served) -> None:
    stopped = ask(served, **saying("one two three"), stop_sequences=["x", " two"]).json
    assert (stopped["content"], stopped["stop_reason"], stopped["stop_sequence"]) == (
        [{"type": "text", "text": "one"}], "stop_sequence", " two",
    )  # fmt: skip
    ended = ask(served, **saying("one")).json
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("end_turn", None)
    cut = ask(served, **{**saying("one two three four"), "max_tokens": 2}).json
    assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 2)


def test_an_answer_that_was_begun_goes_on(served: Served) -> None:
    begun = ask(served, messages=[*HI, {"role": "assistant", "content": "def f("}]).json
    chat = served.post(
        "/v1/chat/completions",
        {"messages": [*HI, {"role": "assistant", "content": "def f("}], "max_tokens": 8,
         "temperature": 0, "continue_final_message": True},
        headers=HEADERS,
    ).json  # fmt: skip
    assert "".join(b["text"] for b in begun["content"]) == chat["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("fields", "headers", "status", "kind", "says"),
    [
        ({}, {}, 401, "authentication_error", "a key is needed"),
        ({"model": "x"}, HEADERS, 404, "not_found_error", "'x' is not served"),
        ({"messages": 1}, HEADERS, 400, "invalid_request_error", "messages"),
        ({"container": "x"}, HEADERS, 400, "invalid_request_error", "container is not supported"),
        ({"mcp_servers": [1]}, HEADERS, 400, "invalid_request_error", "mcp_servers is not"),
        ({"max_tokens": -2}, HEADERS, 400, "invalid_request_error", "max_tokens"),
        (
            {"messages": [{"role": "user", "content": "a b " * 9000}]},
            HEADERS, 400, "invalid_request_error", "^prompt is too long: ",
        ),
    ],
)  # fmt: skip
def test_errors_have_anthropics_form(
    served: Served, fields: dict[str, Any], headers: dict[str, str], status: int, kind: str,
    says: str,
) -> None:  # fmt: skip
    for path in (PATH, f"{PATH}/count_tokens"):
        if "max_tokens" in fields and path != PATH:
            continue
        reply = served.post(path, {"messages": HI, "max_tokens": 2, **fields}, headers=headers)
        assert reply.status == status, reply.body
        error = reply.json
        assert (error["type"], error["error"]["type"]) == ("error", kind)
        assert re.search(says, error["error"]["message"])
    last = served.get(PATH, headers=HEADERS)
    assert last.json["type"] == "error"
    assert last.headers["request-id"] == last.headers["x-request-id"]


def test_parameters_that_nothing_fits_are_told_without_our_own_form(served: Served) -> None:
    number = {"type": "integer", "minimum": 5, "maximum": 1}
    schema = {"type": "object", "properties": {"n": number}, "required": ["n"]}
    tools = [{"name": "g", "input_schema": schema, "strict": True}]
    reply = ask(served, tools=tools, tool_choice={"type": "any"})
    assert reply.status == 400
    message = reply.json["error"]["message"]
    assert message.startswith("tools is a list of tools, but the parameters of g: Unsatisfiable")


def test_what_is_passed_over_is_named(served: Served) -> None:
    reply = ask(
        served,
        system=[{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
        metadata={"user_id": "x"},
        context_management={"edits": []},
    )
    assert reply.status == 200, reply.body
    named = reply.headers["x-ignored-fields"]
    assert named == "context_management, system[].content[].cache_control"


# -- responses ------------------------------------------------------------------------------------

RESPONSES = "/v1/responses"
FUNCTIONS: list[dict[str, Any]] = [
    {"type": "function", "name": name, "parameters": {}} for name in ("find", "count")
]
#: The events of ANSWER, those that grow an item taken together.
ORDER = [
    "created", "in_progress",
    *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
      "content_part.done", "output_item.done"),
    *("output_item.added", "content_part.added", "output_text.delta", "output_text.done",
      "content_part.done", "output_item.done"),
    *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
      "output_item.done") * 2,
    "completed",
]  # fmt: skip


def respond(served: Served, key: str = KEY, **fields: Any) -> Reply:
    body = {"input": "hi", "max_output_tokens": 8, "temperature": 0, **fields}
    return served.post(RESPONSES, body, headers={"Authorization": f"Bearer {key}"})


def speaking(answer: str) -> dict[str, Any]:
    return {"grammar": f"root ::= {json.dumps(answer)}\n", "max_output_tokens": 200}


def plain(response: dict[str, Any]) -> Any:
    """A response without what is new each time."""
    items = [
        {k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]
    ]
    left_out = ("id", "created_at", "output")
    return items, {k: v for k, v in response.items() if k not in left_out}


def test_events_come_in_their_order_and_make_the_response(served: Served) -> None:
    asked = {**speaking(ANSWER), "tools": FUNCTIONS, "store": False}
    respond(served, **asked)  # which leaves the prompt in the cache
    whole = respond(served, **asked)
    assert whole.status == 200, whole.body
    streamed = respond(served, stream=True, **asked)
    events = streamed.events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [k for i, k in enumerate(kinds) if i == 0 or k != kinds[i - 1]] == ORDER
    last = events[-1]["response"]
    assert plain(last) == plain(whole.json)
    items = last["output"]
    for index, item in enumerate(items):
        of_item = [e for e in events if e.get("output_index") == index]
        assert {e["item_id"] for e in of_item if "item_id" in e} == {item["id"]}
        grown = "".join(e.get("delta", "") for e in of_item)
        said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert grown == said
        assert of_item[0]["item"]["status"] == "in_progress"
        assert of_item[-1]["item"] == item
    thought, text, find, count = items
    assert (thought["type"], text["type"]) == ("reasoning", "message")
    assert (thought["content"][0]["text"], text["content"][0]["text"]) == ("Hm.", "I look.")
    assert (find["name"], json.loads(find["arguments"]), count["arguments"]) == (
        "find", {"q": "a < b"}, "{}",
    )  # fmt: skip
    usage = last["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] >= 16
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    assert "x-ignored-fields" not in whole.headers


def test_a_response_is_kept_for_its_key_alone(served: Served) -> None:
    first = respond(served, **speaking("Hello there"), instructions="Be good.").json
    name, mine = first["id"], {"Authorization": f"Bearer {KEY}"}
    theirs = {"Authorization": f"Bearer {OTHER}"}
    assert served.get(f"{RESPONSES}/{name}", headers=mine).json == first
    assert served.get(f"{RESPONSES}/{name}", headers=theirs).status == 404
    assert served.ask("DELETE", f"{RESPONSES}/{name}", headers=theirs).status == 404
    then = respond(served, input="more", previous_response_id=name)
    whole = respond(
        served,
        input=[
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "Hello there"},
            {"role": "user", "content": "more"},
        ],
    )
    assert then.json["output"][0]["content"] == whole.json["output"][0]["content"]
    assert then.json["usage"]["input_tokens"] == whole.json["usage"]["input_tokens"]
    item = {"type": "item_reference", "id": first["output"][0]["id"]}
    assert respond(served, input=[item, {"role": "user", "content": "x"}]).status == 200
    for more in ({"previous_response_id": name}, {"input": [item]}):
        reply = respond(served, key=OTHER, **more)
        assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
        assert "not kept" in reply.json["error"]["message"]
    gone = served.ask("DELETE", f"{RESPONSES}/{name}", headers=mine)
    assert gone.json == {"id": name, "object": "response", "deleted": True}
    assert served.get(f"{RESPONSES}/{name}", headers=mine).status == 404
    assert respond(served, previous_response_id=name).json["error"]["code"] == (
        "previous_response_not_found"
    )


def test_a_response_that_is_not_stored_is_not_found(served: Served) -> None:
    name = respond(served, store=False).json["id"]
    reply = served.get(f"{RESPONSES}/{name}", headers={"Authorization": f"Bearer {KEY}"})
    assert (reply.status, reply.json["error"]["code"]) == (404, "response_not_found")


def test_a_response_is_asked_after_and_cancelled(served: Served) -> None:
    mine = {"Authorization": f"Bearer {KEY}"}
    body = {"input": "hi", "ignore_eos": True, "max_output_tokens": 400}
    with served.stream(RESPONSES, body, mine) as events:
        name = next(events)["response"]["id"]
        assert served.get(f"{RESPONSES}/{name}", headers=mine).json["status"] == "in_progress"
        assert served.get(f"{RESPONSES}/{name}", headers={"x-api-key": OTHER}).status == 404
        assert served.ask("DELETE", f"{RESPONSES}/{name}", headers=mine).status == 409
        cancelled = served.post(f"{RESPONSES}/{name}/cancel", None, headers=mine).json
        assert cancelled["status"] == "cancelled"
        last = list(events)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
    assert served.get(f"{RESPONSES}/{name}", headers=mine).json == last["response"]
    again = served.post(f"{RESPONSES}/{name}/cancel", None, headers=mine).json
    assert again == last["response"]


def test_an_answer_that_is_cut_off_says_so(served: Served) -> None:
    cut = respond(served, **{**speaking("one two three four"), "max_output_tokens": 2}).json
    assert (cut["status"], cut["incomplete_details"]) == (
        "incomplete", {"reason": "max_output_tokens"},
    )  # fmt: skip
    assert [item["status"] for item in cut["output"]][-1] == "incomplete"
    formed = respond(
        served,
        max_output_tokens=30,
        text={
            "format": {
                "type": "json_schema",
                "name": "n",
                "schema": {"enum": ["a", "b"]},
                "strict": True,
            }
        },
    )
    assert json.loads(formed.json["output"][0]["content"][0]["text"]) in ("a", "b")


# -- blocks ---------------------------------------------------------------------------------------


def choice() -> Choice:
    return Choice(0, Generation(1, "x", SamplingParams()), call_ids=["c0", "c1"])


def test_blocks_begin_grow_and_end_in_order() -> None:
    blocks = SpokenBlocks()
    calls = (CallPiece(0, "f", "{"),), (CallPiece(0, "", "}"), CallPiece(1, "g", "[]"))
    pieces = [
        Piece(1, "", (), reasoning="a"),
        Piece(1, "b", (), reasoning="c"),
        Piece(1, "d", (), calls=calls[0]),
        Piece(1, "", (), calls=calls[1]),
        Piece(1, "e", (), ending=Ending("stop")),
    ]
    news = [told for piece in pieces for told in blocks.take(choice(), piece)]
    assert [(block.kind, block.name, block.call_id, block.text) for block in blocks.all] == [
        (BlockKind.THOUGHT, "", "", "ac"), (BlockKind.TEXT, "", "", "bd"),
        (BlockKind.CALL, "f", "c0", "{}"), (BlockKind.CALL, "g", "c1", "[]"),
        (BlockKind.TEXT, "", "", "e"),
    ]  # fmt: skip
    shapes = [(change, block.index) for change, block, _ in news if change is not BlockChange.GROWS]
    assert shapes == [(c, i) for i in range(5) for c in (BlockChange.BEGINS, BlockChange.ENDS)]


def test_pieces_of_two_kinds_are_not_joined() -> None:
    call = Piece(1, "", (1,), calls=(CallPiece(0, "f", "{}"),))
    text, thought = Piece(1, "a", (2,)), Piece(1, "", (3,), reasoning="b")
    assert _join(call, text) is None
    assert _join(text, thought) is None
    assert _join(thought, text) is None
    for first, then in ((text, Piece(1, "", (4,))), (thought, thought), (call, call)):
        joined = _join(first, then)
        assert joined is not None
        assert msgspec.structs.asdict(joined)["token_ids"] == first.token_ids + then.token_ids
