"""Fuzzed requests: `python -m attack.fuzzer PORT KEY BOSS SEED FIRST COUNT [MODEL…]` sends COUNT.

Each is made from the server's own /openapi.json, a table of nasty values and the number of the
request alone, so `… SEED NUMBER 1` sends one again. Prints as JSON what was answered, and what was
wrong with it.
"""

from __future__ import annotations

import http.client
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from attack.limits import FUZZ_SECONDS
from hypocenter.server.app import ADMIN_PATHS

#: Values that some program has failed at. Large ones stand in the attacks, which measure them.
NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 127, 128, 129, 255, 256, 512, 513, 1 << 15, (1 << 31) - 1,
    1 << 31, -(1 << 31), (1 << 32) - 1, 1 << 32, 1 << 53, (1 << 63) - 1, 1 << 63, -(1 << 63),
    (1 << 64) - 1, 1 << 64, 10**40, 0.0, -0.0, 0.1, 1.0, 1.5, -1.5, 1e-45, 5e-324, 1e308, -1e308,
    "", " ", "a", "0", "-1", "1.5", "null", "true", "NaN", "Infinity", "auto", "none", "required",
    "text", "json_object", "json_schema", "system", "user", "assistant", "tool", "developer",
    "\0", "\n", "\r\n", "\x1b[2J", "\x7f", "\x85", "\u2028", "\u202e", "\ufeff", "\uffff",
    "\ud800", "\udfff", "é", "e\u0301", "𝔘", "👩‍👩‍👧", "ß", "İ", "ﷺ", "../../etc/passwd",
    "%s%n", "{{7*7}}", "{% raw %}", "${x}", "<|end_of_text|>", "<|im_end|>", "<think>",
    "<tool_call>", "<script>", "' or 1=1", "a" * 257, "a" * 5000, "\\", '"', "root ::= ", "[a-z",
    "(a*)*", 'root ::= "a" | root', "root ::= x", "^$", "(?<=a)b", "\\p{L}", "a{1000000}",
    [], [[]], [None], [""], ["a"], [0], [-1], [1 << 31], [[0]], [[[]]], ["a", 0], [{}], ["a"] * 9,
    [0] * 600, [[0]] * 20, {}, {"": 0}, {"a": {}}, {"type": "object"}, {"type": "integer"},
    {"type": "nothing"}, {"type": ["string", "null"]}, {"$ref": "#"}, {"$ref": "#/x"}, {"$ref": 1},
    {"properties": []}, {"enum": []}, {"enum": [1, "a", None]}, {"const": {}}, {"anyOf": []},
    {"allOf": [{}]}, {"oneOf": [{}, {}]}, {"not": {}}, {"pattern": "["}, {"minimum": 1e400},
    {"minLength": -1}, {"maxItems": 0}, {"required": ["x"]}, {"multipleOf": 0}, {"0": 1.0},
    {"-1": 1}, {"x": 1}, {"99999999999": 1}, {"role": "user", "content": "hi"}, {"role": "user"},
    {"content": "hi"}, {"role": None, "content": None}, {"role": "user", "content": []},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    {"role": "assistant", "tool_calls": [{}]}, {"role": "tool", "content": "x"},
    {"type": "function", "function": {"name": "f", "parameters": {}}}, {"type": "function"},
    {"__class__": "x", "__proto__": {}}, {"a": {"b": {"c": {"d": {"e": {}}}}}},
)  # fmt: skip
#: Names of fields that are none of the document, of others' servers and of nobody.
FIELDS = (
    "best_of", "suffix", "functions", "guided_json", "audio", "modalities", "user", "metadata",
    "typical_p", "min_p", "mirostat", "n_predict", "cache_prompt", "id_slot", "samplers", "lora",
    "truncate_prompt_tokens", "prompt_embeds", "", "a\nb", "é", "\0", "x" * 300, "__class__",
    "reasoning_effort", "continue_final_message", "add_generation_prompt", "name", "template",
)  # fmt: skip
#: Whole bodies that are no JSON, or none that is asked for.
TEXTS = (
    b"", b" ", b"{", b"}", b"[]", b"null", b"0", b'"a"', b"{'a': 1}", b'{"prompt": NaN}', b"\xff",
    b'\xef\xbb\xbf{"prompt": "x"}', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"a": 1,}',
    b'{"prompt": "x"} x', b'{"prompt": "x", "prompt": "y"}', b'{"prompt": 1e999}', b"[" * 2000,
    b'{"a":' * 2000, b'{"prompt": "x", "max_tokens": 1' + b"0" * 400 + b"}", b"\0" * 100,
    b'{"prompt": "\\u0000", "max_tokens": 2}', b"--x\r\nContent-Disposition: x\r\n\r\n1\r\n--x--",
)  # fmt: skip
HEADERS = (
    ("Content-Type", "text/plain"), ("Content-Type", "multipart/form-data; boundary=x"),
    ("Content-Type", "application/json; charset=utf-16"), ("Content-Type", "\xff"),
    ("Content-Encoding", "gzip"), ("Accept", "text/event-stream"), ("Accept", "*/*;q=0"),
    ("X-Request-Id", "a" * 200), ("X-Request-Id", "a b"), ("X-Request-Id", "\xe9"),
    ("Range", "bytes=0-1"), ("Range", "bytes=-9999999999999999999"), ("If-None-Match", "*"),
    ("Upgrade", "h2c"), ("Upgrade", "websocket"), ("Cookie", "a=b; " * 100), ("TE", "trailers"),
    ("X-Forwarded-For", "1.2.3.4"), ("X-Forwarded-Host", "evil.example"), ("Forwarded", "for=x"),
    ("Accept-Encoding", "gzip"), ("Authorization", "Basic eDp5"), ("Expect", "nothing"),
    ("X-HTTP-Method-Override", "DELETE"), ("Content-Length", "5"), ("Transfer-Encoding", "gzip"),
    ("Host", "evil.example"), ("Origin", "https://evil.example"), ("Host", ""),
)  # fmt: skip
NAMES = (
    "x", "cmpl-0", "resp-0", "..", "%2e%2e", "%00", "%ff", "a%2fb", "%0d%0aX:%20y", "a" * 3000,
    "%F0%9F", "{name}", "%7Bname%7D", "-1", ";", "?", "%3f", "demo-q8_0", "cancel",
)  # fmt: skip
#: What stands for a number in an address, or behind it.
NUMBERS = ("0", "0", "1", "7", "-1", "1.5", "", "9" * 40, "0x1", "%20", "x")
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "QUERY", "get")
PATHS = (
    "/", "//", "/v1", "/v1/", "/v1/completions/", "//v1/completions", "/V1/COMPLETIONS", "/v1//x",
    "/debug", "/debug/", "/debug/x", "/%64ebug/requests", "/../debug/requests", "*", "/v1/x",
    "/live", "/report/x?until=9&code=%ff",
    "/health?x=%ff", "/slots?fail_on_no_slot=1", "/metrics?" + "a=b&" * 500, "/openapi.json#x",
)  # fmt: skip
#: Larger values are let through now and then; with every one of them a run would take a day.
_MANY = {
    "max_tokens": 8, "max_completion_tokens": 8, "max_output_tokens": 8, "n": 3, "min_tokens": 8,
}  # fmt: skip
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
#: How a stream ends that is whole, on whichever route.
_ENDS = (
    b"data: [DONE]\n\n", b"event: message_stop\n", b"event: response.completed\n",
    b"event: response.incomplete\n", b"event: response.failed\n", b"event: error\n",
)  # fmt: skip
_MAX_ANSWER_BYTES = 8 << 20
#: Headers by which a request contradicts its own body, and how that may be answered.
_FRAMING = {"content-length", "transfer-encoding", "host"}
_REFUSED_FRAMING = (408, 501)
_MAX_WRONG = 20


@dataclass
class Answered:
    """How many of each status; what was wrong, each with the number of its request."""

    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0


@dataclass
class Sent:
    """One request as it is to be sent."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes | None


class Maker:
    """Makes requests of the server's document. `models` are the names of one that writes, one that
    embeds and one that scores; "" where there is only one."""

    def __init__(
        self,
        document: dict[str, Any],
        key: str,
        boss: str,
        models: tuple[str, str, str] = ("", "", ""),
    ) -> None:
        self._schemas = document["components"]["schemas"]
        self._key, self._boss, self._models = key, boss, models
        self._operations = [
            (method.upper(), path, told)
            for path, methods in document["paths"].items()
            for method, told in methods.items()
        ]
        posts = [one for one in self._operations if one[0] == "POST"]
        # What several paths lead to is one of the choices, as what only one path leads to.
        whats = dict.fromkeys(told["summary"] for *_, told in posts)
        self._posts = [[one for one in posts if one[2]["summary"] == what] for what in whats]

    def make(self, chosen: random.Random) -> Sent:
        """A request of any kind: most are POSTs with a body that is nearly right."""
        lot = chosen.random()
        from_all = chosen.choice(self._posts) if lot < 0.8 else self._operations
        method, path, told = chosen.choice(from_all)
        if lot > 0.97:
            method, path = chosen.choice(METHODS), chosen.choice(PATHS)
        elif lot > 0.95:
            method = chosen.choice(METHODS)
        if lot <= 0.97:
            path = self._address(chosen, path, told)
        key = self._boss if path.startswith(ADMIN_PATHS) else self._key
        headers = [("Authorization", f"Bearer {key}"), ("Content-Type", "application/json")]
        if chosen.random() < 0.05:
            headers.append(chosen.choice(HEADERS))
        body = self._body(chosen, told, path) if method not in ("GET", "HEAD") else None
        return Sent(method, path, headers, body)

    def _address(self, chosen: random.Random, path: str, told: dict[str, Any]) -> str:
        """The path with something for what it leaves open, and some parameters behind it."""
        asked = []
        found: tuple[str, ...]
        for one in told.get("parameters", ()):
            name, words = one["name"], one["schema"].get("enum", ())
            if one["in"] == "path":
                found = NUMBERS if name == "number" else NAMES
                path = path.replace(f"{{{name}}}", chosen.choice(found))
            elif one["required"] or chosen.random() < 0.5:
                found = words if words and chosen.random() < 0.8 else (*NAMES, *NUMBERS)
                if name == "model" and chosen.random() < 0.8:
                    found = (self._model_of(path),)
                asked.append(f"{name}={chosen.choice(found)}")
        return f"{path}?{'&'.join(asked)}" if asked else path

    def _model_of(self, path: str) -> str:
        """The one that a route is for."""
        if "/models/" in path:
            return self._models[-1]  # whose absence hurts few
        return self._models[(1 if "embed" in path else -1 if "rank" in path else 0)]

    def _body(self, chosen: random.Random, told: dict[str, Any], path: str) -> bytes | None:
        content = told.get("requestBody", {}).get("content", {})
        if not content:
            return chosen.choice((None, b"", b"{}"))
        if chosen.random() < 0.05:
            return chosen.choice(TEXTS)
        value = self._right(chosen, content["application/json"]["schema"], 0)
        for _ in range(chosen.choice((0, 0, 1, 1, 1, 2, 4))):
            value = self._spoil(chosen, value)
        if isinstance(value, dict):
            if value.get("model") in self._models and chosen.random() < 0.8:
                value["model"] = self._model_of(path)
            _bound(chosen, value, is_ollamas=path.startswith("/api/"))
        text = json.dumps(value, ensure_ascii=chosen.random() < 0.5)
        data = text.encode("utf-8", "surrogatepass")
        if chosen.random() < 0.02:
            data = data[: chosen.randrange(len(data) + 1)]
        return data

    def _right(self, chosen: random.Random, schema: dict[str, Any], depth: int) -> Any:
        """A value that the document allows."""
        if "$ref" in schema:
            return self._right(chosen, self._schemas[schema["$ref"].rpartition("/")[2]], depth)
        if "anyOf" in schema:
            return self._right(chosen, chosen.choice(schema["anyOf"]), depth)
        match schema.get("type"):
            case "object" if "properties" in schema:
                required = set(schema.get("required", ()))
                return {
                    name: self._named(chosen, name, told, depth)
                    for name, told in schema["properties"].items()
                    if name in required or chosen.random() < 0.12
                }
            case "object":
                return chosen.choice(({}, {"a": 1}, {"type": "object"}, {"type": "string"}))
            case "array" if "prefixItems" in schema:
                return [self._right(chosen, one, depth + 1) for one in schema["prefixItems"]]
            case "array":
                num = chosen.choice((0, 1, 1, 2, 3)) if depth < 4 else 0
                return [self._right(chosen, schema.get("items", {}), depth + 1) for _ in range(num)]
            case "string":
                return chosen.choice(("", "a", "x = ", "import os\n", "é", "def f(x):"))
            case "integer":
                return chosen.choice((0, 1, 2, 5, 20, 40, 200))
            case "number":
                return chosen.choice((0, 0.5, 0.9, 1, 1.5, 2))
            case "boolean":
                return chosen.random() < 0.5
            case "null":
                return None
        return chosen.choice(NASTY)

    def _named(self, chosen: random.Random, name: str, told: dict[str, Any], depth: int) -> Any:
        """A field that is right in more than its type, often enough that requests get through."""
        if name == "model":
            return chosen.choice(self._models)
        if name == "messages" and chosen.random() < 0.8:
            says = chosen.choice(("hi", "", "import os", "é" * 20))
            return [{"role": chosen.choice(("user", "system")), "content": says}]
        return self._right(chosen, told, depth + 1)

    def _spoil(self, chosen: random.Random, value: Any) -> Any:
        """The value with one part of it replaced, added, taken away or doubled."""
        if isinstance(value, dict) and value:
            name = chosen.choice([*value])
            lot = chosen.random()
            if lot < 0.25:
                other = chosen.choice(FIELDS) if chosen.random() < 0.4 else self._field(chosen)
                return {**value, other: chosen.choice(NASTY)}
            if lot < 0.3:
                return {left: kept for left, kept in value.items() if left != name}
            return {**value, name: self._spoil(chosen, value[name])}
        if isinstance(value, list) and value and chosen.random() < 0.7:
            place = chosen.randrange(len(value))
            if chosen.random() < 0.2:
                return value * chosen.choice((2, 50))
            return [*value[:place], self._spoil(chosen, value[place]), *value[place + 1 :]]
        return chosen.choice(NASTY)

    def _field(self, chosen: random.Random) -> str:
        """A field of one of the bodies, perhaps of another route's."""
        name = chosen.choice([name for name in self._schemas if name.endswith("Body")])
        found: str = chosen.choice([*self._schemas[name]["properties"]])
        return found


def _bound(chosen: random.Random, body: dict[str, Any], *, is_ollamas: bool) -> None:
    if is_ollamas:  # whose bodies say it among others
        if isinstance(body.get("options") or {}, dict) and chosen.random() < 0.95:
            body["options"] = {**(body.get("options") or {}), "num_predict": _MANY["max_tokens"]}
        return
    for name, most in _MANY.items():
        value = body.get(name)
        if isinstance(value, int) and value > most and chosen.random() < 0.95:
            body[name] = most
    if all(body.get(name) is None for name in _LENGTHS):
        body["max_tokens"] = _MANY["max_tokens"]


def problem(path: str, status: int, headers: dict[str, str], body: bytes, seconds: float) -> str:
    """What is wrong with the answer of a path; nothing when all is well."""
    if seconds > FUZZ_SECONDS:
        return f"took {seconds:.1f} s"
    if status >= 500:
        is_known = b"unavailable_error" in body or b"overloaded_error" in body
        is_said = status == 503 and is_known and "retry-after" in headers
        return "" if is_said else f"status {status}: {body[:300]!r}"
    kind = headers.get("content-type", "")
    if status >= 400 and kind.startswith("application/json"):
        told = json.loads(body).get("error") if body else {"message": "HEAD"}
        # Ollama's routes tell an error as a text, all others as a record with a message. Where a
        # connection carries no HTTP any more, nobody knows which route was meant.
        is_text = isinstance(told, str) and path.startswith("/api/")
        is_record = isinstance(told, dict) and isinstance(told.get("message"), str)
        is_told = not body or is_text or is_record
        return "" if is_told else f"no error of the form: {body[:300]!r}"
    if kind.startswith("text/event-stream"):
        last = body[body.rfind(b"event: ") :] if b"event: " in body else body[-2000:]
        is_whole = last.endswith(_ENDS[0]) or last.startswith(_ENDS[1:]) or b'"error"' in last
        return "" if is_whole else f"a stream without an end: {body[-300:]!r}"
    if kind.startswith("application/x-ndjson"):
        try:
            lines = [json.loads(line) for line in body.removesuffix(b"\n").split(b"\n")]
        except ValueError as error:
            return f"a line that is no JSON ({error}): {body[:300]!r}"
        if not all(isinstance(line, dict) for line in lines):
            return f"a line that is no record: {body[:300]!r}"
        is_ended = lines[-1].get("done") is True or "error" in lines[-1]
        is_ended = is_ended and body.endswith(b"\n")
        return "" if is_ended else f"a stream without an end: {body[-300:]!r}"
    if kind.startswith("application/json") and body:
        json.loads(body)
    return ""


def send(connection: http.client.HTTPConnection, sent: Sent) -> tuple[int, dict[str, str], bytes]:
    """Its answer: status, headers by small names, body."""
    names = {name.lower() for name, _ in sent.headers}
    connection.putrequest(
        sent.method, sent.path, skip_host="host" in names, skip_accept_encoding=True
    )
    for name, value in sent.headers:
        connection.putheader(name, value.encode("latin-1"))
    if "content-length" not in names:
        connection.putheader("Content-Length", str(len(sent.body or b"")))
    connection.endheaders(sent.body)
    answer = connection.getresponse()
    named = {name.lower(): value for name, value in answer.getheaders()}
    return answer.status, named, answer.read(_MAX_ANSWER_BYTES)


def fuzz(port: int, maker: Maker, seed: str, numbers: range) -> Answered:
    """Send requests of these numbers on a connection that is kept while the server keeps it."""
    said = Answered()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=FUZZ_SECONDS + 5)
    for number in numbers:
        sent = maker.make(random.Random(f"{seed}/{number}"))
        began, is_fresh = time.monotonic(), connection.sock is None
        is_framed = any(name.lower() in _FRAMING for name, _ in sent.headers)
        try:
            status, headers, body = send(connection, sent)
            seconds = time.monotonic() - began
            said.statuses[str(status)] += 1
            if is_framed and status in _REFUSED_FRAMING:
                continue  # it waited for the rest of a body, or knows no such encoding
            wrong = problem(sent.path, status, headers, body, seconds)
            said.slowest = max(said.slowest, seconds)
        except (OSError, http.client.HTTPException, ValueError) as error:
            # Headers that contradict each other may end a connection without a word.
            said.statuses[type(error).__name__] += 1
            is_stale = not is_fresh and not isinstance(error, TimeoutError | ValueError)
            wrong = "" if is_framed or is_stale else f"{type(error).__name__}: {error}"
            connection.close()
        if wrong and len(said.wrong) < _MAX_WRONG:
            said.wrong.append(f"{number}: {wrong}; {sent.method} {sent.path} {sent.body!r}"[:2000])
    connection.close()
    return said


def _of_kinds(models: Sequence[str]) -> tuple[str, str, str]:
    """The names of a model that writes, one that embeds and one that scores; "": the only one."""
    writing, embedding, scoring = models or ("", "", "")
    return writing, embedding, scoring


def main(words: list[str]) -> None:
    """Fuzz, and print how it went."""
    port, key, boss, seed, first, count, *models = words
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
    connection.request("GET", "/openapi.json", headers={"Authorization": f"Bearer {key}"})
    document = json.loads(connection.getresponse().read())
    maker = Maker(document, key, boss, _of_kinds(models))
    connection.close()
    said = fuzz(int(port), maker, seed, range(int(first), int(first) + int(count)))
    print(json.dumps(vars(said)))


if __name__ == "__main__":
    main(sys.argv[1:])
