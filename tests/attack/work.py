"""Attacks by work: forms, texts, prompts, answers, and clients that leave what they asked for.

Each function is one client of an attack, which begins anew when it returns.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from typing import Any

from attack.aim import Aim

_Client = Callable[[Aim, int], None]
_MIB = 1 << 20
_WORDS = (
    "import os\n",
    "def read(path):\n",
    "    return ",
    "x = 1\n",
    "\t\t",
    "é",
    "𝔘",
    "0123456789",
)


@functools.cache
def _text(num_bytes: int) -> str:
    """A text of words in no order, of at least so many bytes; its blocks of 64 KiB are alike."""
    chosen = random.Random(num_bytes)
    block = "".join(chosen.choices(_WORDS, k=8192))
    return block * (num_bytes // len(block.encode()) + 1)


@functools.cache
def _quoted(num_bytes: int) -> bytes:
    """The same within a JSON string, without its quotes."""
    return json.dumps(_text(num_bytes), ensure_ascii=False).encode()[1:-1]


def _long(field: str, aim: Aim, num_bytes: int, rest: str = "") -> bytes:
    """A body with a text that nobody has sent before, made without much ado."""
    return f'{{{rest}"{field}": "{aim.name()}'.encode() + _quoted(num_bytes) + b'"}'


def _prepared(*sizes: int) -> Callable[[_Client], _Client]:
    """Has the texts of a client made before its attack begins."""

    def mark(client: _Client) -> _Client:
        vars(client)["prepare"] = lambda: [*map(_quoted, sizes)]
        return client

    return mark


def _ask(aim: Aim, path: str, body: Any, index: int) -> bytes:
    data = aim.request(path, body, index)
    with aim.connect() as connection:
        aim.seen["begun"] += 1
        return aim.answer(connection, data)


def _ask_and_leave(aim: Aim, data: bytes, seconds: float) -> None:
    with aim.connect() as connection:
        connection.sendall(data)
        aim.seen["begun"] += 1
        aim.rest(seconds)


# -- forms ----------------------------------------------------------------------------------------


def _names_schema(aim: Aim) -> dict[str, Any]:
    """As large as a schema may be."""
    tail = aim.name()[:2]
    names: dict[str, Any] = {f"{number:x}{tail}": {} for number in range(4200)}
    return {"type": "object", "properties": names, "additionalProperties": {"type": "integer"}}


def _formed(form: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": "x = ", "max_tokens": 100, **form}


def names_schemas(aim: Aim, index: int) -> None:
    """4,200 names and others: a new schema each time."""
    _ask(aim, "/v1/completions", _formed({"json_schema": _names_schema(aim)}), index)


def left_schemas(aim: Aim, index: int) -> None:
    """The same, whose clients leave."""
    body = _formed({"json_schema": _names_schema(aim)})
    _ask_and_leave(aim, aim.request("/v1/completions", body, index), 0.2)


def same_slow_schema(aim: Aim, index: int) -> None:
    """One schema of 4,200 names again and again: what was refused is to be remembered."""
    names: dict[str, Any] = {f"k{number}": {} for number in range(4200)}
    schema = {"type": "object", "properties": names, "additionalProperties": {"type": "string"}}
    _ask(aim, "/v1/completions", _formed({"json_schema": schema}), index)


def _forms(tail: str) -> list[dict[str, Any]]:
    """Forms that are slow to read, that become large, or that are ambiguous in an answer."""
    deep: Any = {"type": "integer"}
    for _ in range(6):
        deep = {"type": "array", "items": deep, "minItems": 1, "maxItems": 60}
    optional = {f"o{number}{tail}": {"type": "integer"} for number in range(1500)}
    every = [{"properties": {f"p{n}{tail}": {"enum": [n]}}} for n in range(200)]
    patterns = (
        "(a?){2000}a{2000}", "((a{1,60}){1,60}){1,60}", "(a|aa|aaa)*b", "(a*)*b", "(.*x){30}",
        "(" + "|".join(f"w{n}{tail}.*" for n in range(2000)) + ")*",
        "([a-z]+[0-9]+){1,200}", "(\\p{L}|\\d|.)*z{500}",
    )  # fmt: skip
    grammars = (
        'root ::= root root | "a"', 'root ::= ("a" | "aa" | "aaa")* "b"',
        'root ::= a{1,100}\na ::= b{1,100}\nb ::= c{1,100}\nc ::= "x" | "xx"',
        "root ::= " + " ".join(f"r{n}?" for n in range(2000)) + "\n"
        + "\n".join(f'r{n} ::= "w{n % 7}"' for n in range(2000)),
        'root ::= s\ns ::= s "+" s | s "*" s | s s | [0-9]+',
    )  # fmt: skip
    return [
        {"json_schema": deep},
        {"json_schema": {"type": "object", "properties": optional}},
        {"json_schema": {"type": "object", "anyOf": every}},
        {"json_schema": {"allOf": every}},
        {"json_schema": {"enum": [f"{tail}{n}" for n in range(5000)]}},
        {"json_schema": {"type": "string", "minLength": 1, "maxLength": 1_000_000_000}},
        {"json_schema": {"type": "integer", "multipleOf": 99_999_999_977}},
        {"json_schema": {"type": "array", "uniqueItems": True, "items": {"enum": [*range(300)]}}},
        *({"json_schema": {"type": "string", "pattern": one}} for one in patterns),
        *({"grammar": one} for one in grammars),
    ]


def forms(aim: Aim, index: int) -> None:
    """One of many forms after the other."""
    tail = aim.name()[:4]
    every = _forms(tail)
    form = every[aim.next() % len(every)]
    _ask(aim, "/v1/completions", {**_formed(form), "n": 4}, index)


def ambiguous_answers(aim: Aim, index: int) -> None:
    """Forms that are read at once, and whose state grows with each token of an answer."""
    a = aim.name()[0]
    grammar = (
        f'root ::= s\ns ::= s s | "{a}" | "{a}{a}" | [ -~]',
        "root ::= (x | y)*\nx ::= [a-z ]+ | x x\ny ::= [ -~]+ | y x",
        "root ::= " + " ".join(["[ -~]?"] * 900) + ' "\\n"',
    )[index % 3]
    body = {**_formed({"grammar": grammar}), "max_tokens": 400, "n": 8, "seed": index}
    _ask(aim, "/v1/completions", body, index)


# -- texts ----------------------------------------------------------------------------------------


@_prepared(12 * _MIB)
def tokenize(aim: Aim, index: int) -> None:
    """Texts of 15 MiB."""
    _ask(aim, "/tokenize", _long("content", aim, 12 * _MIB), index)


@_prepared(4 * _MIB)
def tokenize_pieces(aim: Aim, index: int) -> None:
    """The tokens of 4 MiB, each with its text."""
    data = _long("content", aim, 4 * _MIB, '"with_pieces": true, ')
    _ask(aim, "/tokenize", data, index)


def tokenize_one_word(aim: Aim, index: int) -> None:
    """A word of a million letters, which a tokenizer takes as one piece to merge."""
    _ask(aim, "/tokenize", {"content": aim.name() + "ab" * (1 << 19)}, index)


@_prepared(8 * _MIB)
def left_tokenize(aim: Aim, index: int) -> None:
    """8 MiB, and the client leaves: nobody waits for it."""
    data = aim.request("/tokenize", _long("content", aim, 8 * _MIB), index)
    _ask_and_leave(aim, data, 0.3)


def detokenize(aim: Aim, index: int) -> None:
    """A million ids."""
    first = aim.next() % 200
    ids = [(first + number) % 250 for number in range(1_000_000)]
    _ask(aim, "/detokenize", {"tokens": ids}, index)


@_prepared(8 * _MIB)
def apply_template(aim: Aim, index: int) -> None:
    """Conversations of 8 MiB."""
    message = _long("content", aim, 8 * _MIB, '"role": "user", ')
    _ask(aim, "/apply-template", b'{"messages": [' + message + b"]}", index)


def many_turns(aim: Aim, index: int) -> None:
    """Conversations of 50,000 turns."""
    turns = [{"role": ("user", "assistant")[n % 2], "content": f"{n}"} for n in range(50_000)]
    _ask(aim, "/apply-template", {"messages": turns}, index)


@_prepared(4 * _MIB)
def long_chats(aim: Aim, index: int) -> None:
    """Chats that are longer than any context."""
    message = _long("content", aim, 4 * _MIB, '"role": "user", ')
    _ask(aim, "/v1/chat/completions", b'{"messages": [' + message + b"]}", index)


@_prepared(12 * _MIB, 16 * _MIB, 20 * _MIB, 24 * _MIB)
def left_prompts(aim: Aim, index: int) -> None:
    """Prompts of 12 to 24 MiB, whose clients leave after 0.3 s."""
    data = _long("prompt", aim, (12 + 4 * (index % 4)) * _MIB)
    _ask_and_leave(aim, aim.request("/v1/completions", data, index), 0.3)


def prompts_just_too_long(aim: Aim, index: int) -> None:
    """Prompts that are refused, but not by their characters alone."""
    body = {"prompt": [aim.name() + _text(1)[:6000]] * 100, "max_tokens": 1}
    _ask(aim, "/v1/completions", body, index)


def short_words(aim: Aim, index: int) -> None:
    """Words of 32,000 letters: short for a text, long for what merges pairs of letters."""
    word = (aim.name() + "ab" * 16_000)[:32_000]
    _ask(aim, "/tokenize", {"content": word, "with_pieces": True}, index)


def short_turns(aim: Aim, index: int) -> None:
    """Conversations of 400 short turns: few letters, and much for a template."""
    turns = [{"role": ("user", "assistant")[n % 2], "content": aim.name()} for n in range(400)]
    _ask(aim, "/apply-template", {"messages": turns}, index)


def short_bad_words(aim: Aim, index: int) -> None:
    """As many words to avoid as are taken."""
    words = [aim.name()[:4] + chr(97 + n % 26) for n in range(1000)]
    _ask(aim, "/v1/completions", {"prompt": "x", "max_tokens": 1, "bad_words": words}, index)


# -- answers --------------------------------------------------------------------------------------


def all_choices(aim: Aim, index: int) -> None:
    """128 answers with 20 logprobs each, and the prompt's too."""
    body = {
        "prompt": aim.name() + "import os\n" * 30, "n": 128, "max_tokens": 100, "logprobs": 20,
        "echo": True, "ignore_eos": True,
    }  # fmt: skip
    _ask(aim, "/v1/completions", body, index)


def many_prompts(aim: Aim, index: int) -> None:
    """400 prompts in one request, each of its own."""
    body = {"prompt": [f"{aim.name()} = " for _ in range(400)], "max_tokens": 200}
    _ask(aim, "/v1/completions", {**body, "ignore_eos": True}, index)


def full_queue(aim: Aim, index: int) -> None:
    """As many requests as are taken: what one client may leave for the others."""
    body = {"prompt": [aim.name() for _ in range(60)], "max_tokens": 400, "ignore_eos": True}
    _ask(aim, "/v1/completions", {**body, "stream": True}, index)


def long_answers(aim: Aim, index: int) -> None:
    """What is allowed to everybody: a long answer, by sixteen at once."""
    body = {"prompt": aim.name() + "import os\n" * 60, "max_tokens": 300, "ignore_eos": True}
    _ask(aim, "/v1/completions", {**body, "stream": True}, index)


def long_prompts(aim: Aim, index: int) -> None:
    """Prompts that fill the context, one after the other, with no token in common."""
    body = {"prompt": aim.name() + _text(1)[index : 900 + index], "max_tokens": 1, "logprobs": 20}
    _ask(aim, "/v1/completions", {**body, "echo": True}, index)


def left_answers(aim: Aim, index: int) -> None:
    """Answers whose clients leave at once: as many as can be asked for."""
    body = {"prompt": aim.name() * 10, "max_tokens": 400, "n": 8, "ignore_eos": True}
    _ask_and_leave(aim, aim.request("/v1/completions", body, index), 0.05)


def cancelled_answers(aim: Aim, index: int) -> None:
    """Streams that are cancelled by their id as soon as they have one."""
    body = {"prompt": aim.name(), "max_tokens": 400, "n": 4, "ignore_eos": True, "stream": True}
    with aim.connect() as connection:
        connection.sendall(aim.request("/v1/completions", body, index))
        aim.seen["begun"] += 1
        data = b""
        while b'"id":"' not in data:
            part = connection.recv(1 << 16)
            if not part:
                return
            data += part
        name = data.partition(b'"id":"')[2].partition(b'"')[0].decode()
        for _ in range(20):
            _ask(aim, f"/v1/requests/{name}/cancel", b"", index)


def crowded_biases(aim: Aim, index: int) -> None:
    """Bans, words and stops in every step of 16 answers."""
    ids = list(range(250))
    body = {
        "prompt": aim.name(), "max_tokens": 200, "n": 4, "ignore_eos": True,
        "logit_bias": [[number, -1.0] for number in ids[:200]],
        "bad_words": [f"{aim.name()[:3]}{number}" for number in range(60)],
        "stop": [f"{aim.name()}"] * 4, "frequency_penalty": 1.0, "repeat_penalty": 1.1,
    }  # fmt: skip
    _ask(aim, "/v1/completions", body, index)


def salted_beginnings(aim: Aim, index: int) -> None:
    """Each prompt fills blocks of the cache that nobody else will want."""
    body = {"prompt": aim.name() + "x" * 400, "max_tokens": 1, "cache_salt": aim.name()}
    _ask(aim, "/v1/completions", body, index)


def questions(aim: Aim, index: int) -> None:
    """State, over and over: what is cheap to ask must be cheap to answer."""
    path = ("/slots", "/props", "/tokenizer_info", "/v1/models", "/metrics", "/openapi.json")[
        index % 6
    ]
    with aim.connect() as connection:
        for _ in range(200):
            if aim.is_over:
                return
            aim.answer(connection, aim.head("GET", path, index=index))


def template_variables(aim: Aim, index: int) -> None:
    """Variables of a template, as many and as deep as a body holds."""
    inner: Any = {}
    for _ in range(150):
        inner = {"a": inner}
    names = {f"v{number}": [inner] for number in range(500)}
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": names}
    _ask(aim, "/v1/chat/completions", body, index)
