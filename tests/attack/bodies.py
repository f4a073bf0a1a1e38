"""Attacks by bodies that take long to decode, or to look at, before any worker hears of them.

Each function is one client of an attack, which begins anew when it returns.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

from attack.aim import Aim


def _times(one: bytes, num: int) -> bytes:
    """The same so many times, with commas between."""
    return (one + b",") * (num - 1) + one


_BLOCK = b'{"type":"text","text":"x"}'


@functools.cache
def _empty_lists() -> bytes:
    return b'{"prompt": [' + _times(b"[]", 8_000_000) + b"]}"


@functools.cache
def _keys_of_a_message() -> bytes:
    return _messages(b",".join(b'"k%d":1' % number for number in range(1_000_000)))


@functools.cache
def _same_key() -> bytes:
    return b'{"prompt": "x", ' + _times(b'"k":1', 4_000_000) + b"}"


@functools.cache
def _many_messages() -> bytes:
    one = b'{"role": "user", "content": "a"}'
    return b'{"messages": [' + _times(one, 800_000) + b"]}"


@functools.cache
def _nested() -> bytes:
    return b'{"prompt": "x", "messages": ' + b"[" * 10_000_000


@functools.cache
def _nested_in_bounds() -> bytes:
    """A thousand lists within each other, ten thousand times beside each other."""
    one = b"[" * 900 + b"]" * 900
    return _messages(b'"content": [' + _times(one, 10_000) + b"]")


@functools.cache
def _token_ids() -> bytes:
    return b'{"prompt": [' + _times(b"1", 15_000_000) + b"]}"


@functools.cache
def _prompts_of_ids() -> bytes:
    one = b"[" + _times(b"1", 30_000) + b"]"
    return b'{"prompt": [' + _times(one, 500) + b"]}"


@functools.cache
def _prompts_of_text() -> bytes:
    """As many prompts as one request may have, of which none alone is too long."""
    return (
        b'{"max_tokens": 1, "prompt": [' + _times(b'"' + b"import os " * 6000 + b'"', 512) + b"]}"
    )


@functools.cache
def _wide_prompts() -> bytes:
    """The same, with a character that has Python hold each text in four bytes a letter."""
    one = '"\U0001d518'.encode() + b"import os " * 6000 + b'"'
    return b'{"max_tokens": 1, "prompt": [' + _times(one, 512) + b"]}"


@functools.cache
def _digits() -> bytes:
    return b'{"prompt": "x", "max_tokens": ' + b"1" * 1_000_000 + b"}"


@functools.cache
def _digits_of_a_message() -> bytes:
    return _messages(b'"content": 0.' + b"1" * 30_000_000)


@functools.cache
def _escapes() -> bytes:
    return b'{"prompt": "' + rb"\u00e9" * 5_000_000 + b'"}'


@functools.cache
def _biases() -> bytes:
    """As many as fit: of a token each, in both forms."""
    pairs = ",".join(f"[{number},1]" for number in range(90_000))
    return b'{"prompt": "x", "max_tokens": 1, "logit_bias": [' + pairs.encode() + b"]}"


@functools.cache
def _stops() -> bytes:
    words = json.dumps([f"w{number}" for number in range(90_000)]).encode()
    return b'{"prompt": "x", "max_tokens": 1, "stop": ' + words + b"}"


@functools.cache
def _bad_words() -> bytes:
    words = json.dumps([f"w{number}" for number in range(90_000)]).encode()
    return b'{"prompt": "x", "max_tokens": 1, "bad_words": ' + words + b"}"


@functools.cache
def _token_lists() -> bytes:
    ids = _times(b"1", 500_000)
    return b'{"prompt": "x", "max_tokens": 1, "stop_token_ids": [' + ids + b"]}"


@functools.cache
def _tools() -> bytes:
    """A million bytes of tools, of a property each."""
    tools = [
        {
            "type": "function",
            "function": {"name": f"f{number}", "parameters": {"properties": {"a": {}}}},
        }
        for number in range(8000)
    ]
    return _messages(b'"content": "x"')[:-1] + b', "tools": ' + json.dumps(tools).encode() + b"}"


@functools.cache
def _blocks() -> bytes:
    """As many blocks of a message as a body may have lists and objects, and more than are read."""
    return b'{"messages": [{"role": "user", "content": [' + _times(_BLOCK, 60_000) + b"]}]}"


@functools.cache
def _items() -> bytes:
    item = b'{"role": "user", "content": "x"}'
    return b'{"max_output_tokens": 1, "input": [' + _times(item, 30_000) + b"]}"


@functools.cache
def _references() -> bytes:
    """Items that are kept nowhere."""
    named = (b'{"type":"item_reference","id":"%d"}' % number for number in range(30_000))
    return b'{"max_output_tokens": 1, "input": [' + b",".join(named) + b"]}"


@functools.cache
def _fields() -> bytes:
    return b'{"prompt": "x", ' + b",".join(b'"k%d":1' % n for n in range(1_000_000)) + b"}"


def _messages(fields: bytes) -> bytes:
    return b'{"messages": [{"role": "user", ' + fields + b"}]}"


def _client(path: str, body: Callable[[], bytes]) -> Callable[[Aim, int], None]:
    def ask(aim: Aim, index: int) -> None:
        data = body()  # which `prepare` has made
        with aim.connect() as connection:
            aim.seen["begun"] += 1
            connection.sendall(aim.request(path, data, index))
            aim.status(connection)

    vars(ask)["prepare"] = body
    return ask


empty_lists = _client("/v1/completions", _empty_lists)
fields = _client("/v1/completions", _fields)
same_key = _client("/v1/completions", _same_key)
keys_of_a_message = _client("/v1/chat/completions", _keys_of_a_message)
keys_to_template = _client("/apply-template", _keys_of_a_message)
many_messages = _client("/v1/chat/completions", _many_messages)
nested = _client("/v1/completions", _nested)
nested_in_bounds = _client("/v1/chat/completions", _nested_in_bounds)
token_ids = _client("/v1/completions", _token_ids)
prompts_of_ids = _client("/v1/completions", _prompts_of_ids)
prompts_of_text = _client("/v1/completions", _prompts_of_text)
wide_prompts = _client("/v1/completions", _wide_prompts)
digits = _client("/v1/completions", _digits)
digits_of_a_message = _client("/v1/chat/completions", _digits_of_a_message)
escapes = _client("/v1/completions", _escapes)
biases = _client("/v1/completions", _biases)
stops = _client("/v1/completions", _stops)
bad_words = _client("/v1/completions", _bad_words)
token_lists = _client("/v1/completions", _token_lists)
tools = _client("/v1/chat/completions", _tools)
blocks = _client("/v1/messages", _blocks)
blocks_that_are_counted = _client("/v1/messages/count_tokens", _blocks)
items = _client("/v1/responses", _items)
references = _client("/v1/responses", _references)
