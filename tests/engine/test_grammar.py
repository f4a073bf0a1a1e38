"""Answers that are held to a form: valid, the same each time, and of no concern to others."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from jsonschema import Draft202012Validator
from models.random_schemas import random_schema
from pretended.fake_runner import batches_of, fake_engine

from hypocenter import LLM, SamplingParams
from hypocenter.base.errors import BadSetting, GrammarError, HypoError, UsageError
from hypocenter.engine import grammar
from hypocenter.engine.grammar import Grammars, MaskCost
from hypocenter.engine.grammar_worker import read_form
from hypocenter.engine.request import Request
from hypocenter.settings.grammar_text import MAX_GRAMMAR_BYTES, MAX_SCHEMA_DEPTH

PROMPT = "import json\n"
WARM = SamplingParams(temperature=1.0, seed=7, max_tokens=480)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,7}$"},
        "age": {"type": "integer", "minimum": 1, "maximum": 130},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LETTERS = "start: /a{2,4}/"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_threads=1, context_length=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def grammars(llm: LLM) -> Grammars:
    return Grammars(llm.tokenizer, llm.vocab_size)


@pytest.fixture(autouse=True)
def _nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """The library writes to stderr by itself, unless it is told not to."""
    yield
    assert capfd.readouterr() == ("", "")


def ids_of(mask: Any) -> set[int]:
    return set(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist())


# Answers

#: Seeds of schemas: few in the fast tier, for each takes a third of a second.
PARTS = [range(6), *(range(first, first + 20) for first in range(6, 546, 20))]


@pytest.mark.parametrize("part", range(len(PARTS)))
@pytest.mark.tier("sim", fast=lambda case: case.part == 0)
def test_every_answer_is_valid_by_its_schema(llm: LLM, part: int) -> None:
    seeds = PARTS[part]
    schemas = [random_schema(seed) for seed in seeds]
    params = [replace(WARM, seed=seed, json_schema=random_schema(seed)) for seed in seeds]
    answers = llm.generate([PROMPT] * len(seeds), params)
    for schema, answer in zip(schemas, answers, strict=True):
        assert answer.finish_reason == "stop", schema  # their types are bounded: none is too long
        Draft202012Validator(schema).validate(json.loads(answer.text))
    assert len({answer.text for answer in answers}) > len(seeds) // 2


def test_any_json_object(llm: LLM) -> None:
    answers = llm.sample(PROMPT, 20, WARM, json_object=True, max_tokens=300)
    ended = [answer.text for answer in answers if answer.finish_reason == "stop"]
    assert len(ended) > 10
    assert all(isinstance(json.loads(text), dict) for text in ended)
    assert all(answer.text.startswith("{") for answer in answers)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ('start: "yes" | "no"', "yes|no"),
        ('root ::= "yes" | "no"', "yes|no"),
        ("start: /[a-f]{3}/ num\nnum: /[0-9]{1,2}/", "[a-f]{3}[0-9]{1,2}"),
        ('root ::= item{2}\nitem ::= "- " [a-z]+ "\\n"', "(- [a-z]+\n){2}"),
        ('start: %json {"type": "boolean"} "!"', "(true|false)!"),
        ('start: "é" | "日本"', "é|日本"),
    ],
)
def test_an_answer_is_of_its_grammar(llm: LLM, text: str, pattern: str) -> None:
    for answer in llm.sample(PROMPT, 8, WARM, grammar=text):
        assert answer.finish_reason == "stop"
        assert re.fullmatch(pattern, answer.text)


def test_a_chat_and_a_stream_are_held_too(llm: LLM) -> None:
    pieces = list(llm.stream(PROMPT, WARM, json_schema=PERSON))
    assert pieces[-1].finish_reason == "stop"
    Draft202012Validator(PERSON).validate(json.loads("".join(piece.text for piece in pieces)))
    with LLM(num_threads=1, chat_template="chatml") as chatting:
        answer = chatting.chat([{"role": "user", "content": "Who?"}], WARM, json_schema=PERSON)
    Draft202012Validator(PERSON).validate(json.loads(answer.text))


def test_penalties_and_filters_choose_among_what_is_allowed(llm: LLM) -> None:
    for extra in ({"repeat_penalty": 1.3}, {"top_k": 1}, {"top_p": 0.1}, {"temperature": 0.0}):
        fields: dict[str, Any] = {"json_schema": PERSON, **extra}
        answer = llm.generate(PROMPT, WARM, **fields)
        Draft202012Validator(PERSON).validate(json.loads(answer.text))


# Beside others, and again


def test_free_requests_beside_held_ones_have_the_tokens_that_they_have_alone(llm: LLM) -> None:
    free = [replace(WARM, seed=seed, max_tokens=24) for seed in range(3)]
    penalised = replace(WARM, repeat_penalty=1.2, max_tokens=24)
    greedy = SamplingParams(max_tokens=24)
    held = [replace(WARM, seed=seed, json_schema=PERSON) for seed in range(3)]
    params = [free[0], held[0], greedy, held[1], free[1], penalised, held[2], free[2]]
    alone = [llm.generate(PROMPT, one).token_ids for one in params]
    together = [one.token_ids for one in llm.generate([PROMPT] * len(params), params)]
    assert together == alone
    assert [one.token_ids for one in llm.generate([PROMPT] * 3, held)] == [
        alone[place] for place in (1, 3, 6)
    ]


def test_a_preempted_request_goes_on_where_it_stood(llm: LLM) -> None:
    params = replace(WARM, json_schema=PERSON)
    expected = llm.generate(PROMPT, params).token_ids
    request = llm.request(PROMPT, params)
    llm.engine.submit(request)
    while not request.done:
        llm.engine.step()
        if len(request.output_ids) in (3, 6) and not request.done:
            llm.engine.scheduler.preempt(request)
    assert request.num_preemptions == 2
    assert tuple(request.output_ids) == expected


def test_a_matcher_is_made_again_from_the_tokens_of_a_request(llm: LLM, grammars: Grammars) -> None:
    params = replace(WARM, json_schema=PERSON)
    token_ids = llm.generate(PROMPT, params).token_ids
    told = msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams)
    assert told == params
    first = grammars.matcher(params)
    assert first is not None
    for num in range(len(token_ids)):
        again = grammars.matcher(told, token_ids[:num])
        assert again is not None
        mask = first.mask()
        assert (again.mask() == mask).all()
        assert (first.mask() == mask).all()  # as after an interrupted step
        assert first.accept(token_ids[num]) == (num == len(token_ids) - 1)


class Free:
    """A matcher that allows everything."""

    cost = MaskCost()

    def mask(self) -> Any:
        return np.full(2, -1, np.int32)

    def accept(self, token_id: int) -> bool:
        return False


def test_no_step_runs_ahead_of_a_token_that_decides_the_next_mask() -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    outputs = []
    for matcher in (None, Free()):
        engine = fake_engine(runs_ahead=True)
        request, other = (engine.request([number, 1, 4], params) for number in (3, 5))
        request.matcher = matcher  # type: ignore[assignment]
        for one in (request, other):
            engine.submit(one)
        while engine.step():
            pass
        outputs.append((request.output_ids, other.output_ids))
        num_ahead = sum(batch.ids_on_device for batch in batches_of(engine))
        assert num_ahead == (9 if matcher is None else 0)
    assert outputs[0] == outputs[1]


# Ends


def test_end_tokens_are_allowed_where_the_grammar_may_stop_and_nowhere_else(
    llm: LLM, grammars: Grammars
) -> None:
    (letter,) = llm.tokenizer.encode("a", add_special=False, at_start=False)
    matcher = grammars.matcher(SamplingParams(grammar=LETTERS))
    assert matcher is not None
    seen = []
    for number in range(4):
        seen.append(llm.tokenizer.end_ids <= ids_of(matcher.mask()))
        assert matcher.accept(letter) == (number == 3)
    assert seen == [False, False, True, True]


def test_an_answer_that_is_whole_takes_no_end_token(llm: LLM) -> None:
    answer = llm.generate(PROMPT, grammar='start: "a" "b" "c"')
    assert (answer.text, answer.finish_reason) == ("abc", "stop")
    assert llm.tokenizer.end_ids.isdisjoint(answer.token_ids)


def test_other_ends_come_first(llm: LLM) -> None:
    short = llm.generate(PROMPT, WARM, json_schema=PERSON, max_tokens=2)
    assert (short.finish_reason, len(short.token_ids)) == ("length", 2)
    stopped = llm.generate(PROMPT, WARM, json_schema=PERSON, stop='"age"')
    assert stopped.finish_reason == "stop"
    assert '"age"' not in stopped.text
    assert stopped.text.startswith("{")
    none = llm.generate(PROMPT, WARM, json_schema=PERSON, max_tokens=0)
    assert (none.text, none.finish_reason) == ("", "length")


def test_log_probabilities_are_those_of_the_model(llm: LLM) -> None:
    answer = llm.generate(PROMPT, WARM, json_schema=PERSON, logprobs=3)
    ids = [*answer.prompt_token_ids, *answer.token_ids]
    logits = llm.logits(ids).astype(np.float64)
    first = len(answer.prompt_token_ids) - 1
    assert answer.logprobs is not None
    num_elsewhere = 0
    for place, told in enumerate(answer.logprobs):
        row = logits[first + place]
        wanted = row[told.token_id] - np.log(np.exp(row - row.max()).sum()) - row.max()
        assert told.logprob == pytest.approx(wanted, abs=1e-4)
        num_elsewhere += told.token_id not in [other.token_id for other in told.top]
    assert num_elsewhere  # the model by itself would have gone on otherwise


# Refusals

CHILD = {"type": "object", "properties": {"child": {"$ref": "#/$defs/n"}}}
#: What each is answered with; "..." stands for anything.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": "{"}, "json_schema is '{', but must be JSON: Expecting property name"),
    ({"json_schema": "[1]"}, "json_schema is '[1]', but must be a JSON object"),
    ({"json_schema": {"a": {1}}}, "json_schema is {'a': {1}}, but must be plain JSON: Object of"),
    ({"json_schema": {"a": float("nan")}}, "json_schema is {'a': nan}, but must be plain JSON"),
    ({"json_schema": "\ud800"}, "json_schema is '\\ud800', but must be valid Unicode"),
    (
        {"json_schema": {"enum": ["x" * MAX_GRAMMAR_BYTES]}},
        "json_schema has 65550 bytes, but at most 65536 are allowed",
    ),
    (
        {"json_schema": '{"items":' * 65 + "{}" + "}" * 65},
        f"json_schema has 66 levels, but at most {MAX_SCHEMA_DEPTH} are allowed; put some",
    ),
    (
        {"json_schema": {"properties": {"a": {"items": {"type": "foo"}}, "b": {}}}},
        "json_schema is ..., but #/properties/a/items: Invalid type: foo",
    ),
    ({"json_schema": {"not": {}}}, "json_schema is '{\"not\": {}}', but Unimplemented keys"),
    (
        {"json_schema": {"$defs": {"n": {"not": {}}}, "items": {"$ref": "#/$defs/n"}}},
        "json_schema is ..., but #/$defs/n: Unimplemented keys",
    ),
    ({"json_schema": {"$ref": "#/a"}}, "json_schema is ..., but Pointer '/a' does not exist"),
    ({"json_schema": {"$ref": "http://x.y"}}, "json_schema is ..., but Resource 'http://x.y"),
    (
        {"json_schema": {"prefixItems": [{}, {"pattern": "("}]}},
        "json_schema is ..., but #/prefixItems/1: regex parse error: ( error: unclosed group",
    ),
    (
        {"json_schema": {"type": "integer", "minimum": 3, "maximum": 2}},
        "json_schema is ..., but Unsatisfiable schema: minimum (3) is greater than maximum (2)",
    ),
    ({"json_schema": {"enum": []}}, "json_schema is '{\"enum\": []}', but Unsatisfiable schema"),
    (
        {"json_schema": {"$ref": "#/$defs/n", "$defs": {"n": {**CHILD, "required": ["child"]}}}},
        "json_schema is ..., but #/$defs/n: no text is valid, since each holds another of it",
    ),
    ({"json_schema": {"$ref": "#"}}, "json_schema is ..., but #: no text is valid, since each"),
    ({"grammar": " "}, "grammar is ' ', but must have a rule: start (Lark) or root (GBNF)"),
    ({"grammar": "x" * 65537}, "grammar has 65537 bytes, but at most 65536 are allowed"),
    ({"grammar": "start: foo"}, 'grammar is ..., but line 1, column 8: unknown name: "foo"'),
    ({"grammar": "start: /(/"}, "grammar is 'start: /(/', but line 1, column 8: invalid regex"),
    ({"grammar": "root ::= foo"}, "grammar is ..., but Failed to convert the grammar from GBNF"),
    ({"grammar": "nonsense"}, "grammar is 'nonsense', but "),
    ({"grammar": "start: <|nope|>"}, "grammar is ..., but line 1, column 8: unknown special"),
    ({"grammar": "start: " + "(" * 30000}, "grammar is ..., but ... too deeply nested"),
    ({"grammar": "root ::= " + "(" * 30000}, "grammar is ..., but ... maximum recursion depth"),
    (
        {"json_object": True, "grammar": LETTERS},
        "grammar is 'start: /a{2,4}/', but json_object is given as well; an answer is held to one",
    ),
    (
        {"json_schema": {}, "grammar": LETTERS},
        "grammar is 'start: /a{2,4}/', but json_schema is given as well",
    ),
    (
        {"json_object": True, "ignore_eos": True},
        "ignore_eos is True, but an answer that is held to json_object ends where that ends",
    ),
    ({"json_schema": 5}, "json_schema is 5, but must be a dict, or a text of JSON, or None"),
    ({"grammar": 5}, "grammar is 5, but must be a text: Lark or GBNF, or None"),
    ({"json_object": 1}, "json_object is 1, but must be True or False"),
]


@pytest.mark.parametrize(("fields", "told"), REFUSED)
def test_a_form_that_cannot_be_read_is_refused_before_anything_runs(
    llm: LLM, fields: dict[str, Any], told: str
) -> None:
    pattern = "^" + re.escape(told).replace(r"\.\.\.", ".*")
    for call in (llm.generate, llm.stream):
        with pytest.raises(UsageError, match=pattern) as caught:
            call(PROMPT, **fields)
        assert len(str(caught.value)) < 400
        assert "\n" not in str(caught.value)
    assert not llm.engine.step()


#: Twice as much work with each pattern more.
HUGE = {
    "allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrs"]
}
SLOW = {"type": "integer", "multipleOf": 999983}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (-9, "json_schema was not read: the process that reads it was ended by SIGKILL, and not"),
        (-15, "json_schema was not read: the process that reads it was ended by SIGTERM, and not"),
        (-24, "but reading it takes more than 5 s$"),
        (-11, r"but reading it takes more than \d+ MiB of memory \(exit code -11\)"),
    ],
)
def test_what_ended_the_process_that_reads_a_form_is_told(
    monkeypatch: pytest.MonkeyPatch, code: int, said: str
) -> None:
    monkeypatch.setattr(grammar, "_MAX_SECONDS", 5.0)
    done = subprocess.CompletedProcess([], code, b"")
    monkeypatch.setattr(subprocess, "run", lambda *given, **named: done)
    with pytest.raises(UsageError, match=said):
        grammar._read("json_schema", "{}")


def test_reading_a_form_has_limits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "_MAX_SECONDS", 60.0)
    monkeypatch.setattr(grammar, "_MAX_BYTES", 64 << 20)
    with pytest.raises(UsageError, match="but reading it takes more than 64 MiB of memory"):
        llm.request(PROMPT, json_schema=HUGE)
    monkeypatch.undo()
    monkeypatch.setattr(grammar, "_MAX_SECONDS", 0.5)
    with pytest.raises(UsageError, match=r"but reading it takes more than 0.5 s$"):
        llm.request(PROMPT, json_schema=SLOW)
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(UsageError, match=r"^sys.executable is empty, but reading grammar needs"):
        llm.request(PROMPT, grammar='start: "not read before"')
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(UsageError, match=r"grammar cannot be read: /nowhere/python: No such file"):
        llm.request(PROMPT, grammar='start: "not read before"')


def test_who_reads_a_form_ends_by_itself_when_nobody_waits_any_more() -> None:
    asked = json.dumps({"field": "json_schema", "text": json.dumps(SLOW)})
    folders = grammar._import_folders()
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", grammar._PROGRAM, str(1 << 29), "1", *folders],
        input=asked.encode(), capture_output=True, timeout=100,
    )  # fmt: skip
    assert done.returncode < 0
    assert done.stdout == b""


def test_a_form_is_read_once_for_all_requests_that_have_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def read_here(field: str, text: str) -> str:
        read.append(text)
        return read_form(field, text)

    monkeypatch.setattr(grammar, "_read", read_here)
    grammars = Grammars(llm.tokenizer, llm.vocab_size)
    matchers = [grammars.matcher(SamplingParams(json_schema=PERSON)) for _ in range(3)]
    assert read == [json.dumps(PERSON)]
    assert len({id(matcher) for matcher in matchers}) == 3


def test_a_recursive_schema_that_can_end_is_taken(llm: LLM) -> None:
    pair = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "minItems": 2, "maxItems": 2}
    leaf = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"$ref": "#/$defs/tree", "$defs": {"tree": {"anyOf": [pair, leaf]}}}
    for fields in (
        {"json_schema": schema},
        {"json_schema": {"$ref": "#/$defs/n", "$defs": {"n": CHILD}}},
    ):
        ended = [
            answer.text
            for answer in llm.sample(PROMPT, 8, WARM, **fields)  # type: ignore[arg-type]
            if answer.finish_reason == "stop"
        ]
        assert ended
        for text in ended:
            Draft202012Validator(fields["json_schema"]).validate(json.loads(text))


#: Reads well; but the row of its first letter has more items than a row may have.
WIDE = "(" + " | ".join(f'"w{number}x"' for number in range(5000)) + ")"
#: An answer comes to its choices behind the tokens that are tried before it runs.
TOO_WIDE = f"start: /[a-c]{{40}}/ {WIDE}"


def test_a_form_that_fails_at_once_is_refused_before_it_runs(llm: LLM) -> None:
    with pytest.raises(BadSetting, match="Current row has 5001 items"):
        llm.request(PROMPT, WARM, grammar=f"start: {WIDE}")


def test_a_matcher_that_fails_within_a_step_ends_its_own_request_alone(llm: LLM) -> None:
    free = replace(WARM, max_tokens=12)
    expected = [
        llm.generate(PROMPT, one).token_ids for one in (free, replace(WARM, json_schema=PERSON))
    ]
    first = llm.request(PROMPT, free)
    failing = llm.request(PROMPT, WARM, grammar=TOO_WIDE)
    others = [first, llm.request(PROMPT, WARM, json_schema=PERSON)]
    for request in (first, failing, others[1]):
        llm.engine.submit(request)
    while llm.engine.step():
        llm.engine.check_integrity()
    assert [tuple(request.output_ids) for request in others] == expected
    assert isinstance(failing.error, GrammarError)
    assert str(failing.error).startswith("grammar: Parser Error: Current row has ")
    assert "\n" not in str(failing.error)


def test_a_grammar_without_an_end_is_refused_and_does_not_run_on(llm: LLM) -> None:
    with pytest.raises(BadSetting, match="parser error: Too many items"):
        llm.generate(PROMPT, grammar='start: "a" start', max_tokens=50)


def test_what_a_step_cannot_go_on_with_is_raised_when_its_token_is_taken(
    llm: LLM, grammars: Grammars
) -> None:
    matcher = grammars.matcher(SamplingParams(grammar='start: "yes"'))
    assert matcher is not None
    (end_id,) = llm.tokenizer.end_ids
    with pytest.raises(GrammarError, match="doesn't satisfy the grammar"):
        matcher.accept(99)
    assert ids_of(matcher.mask()) >= {0, 99, end_id}  # of no account, for:
    with pytest.raises(GrammarError, match="doesn't satisfy the grammar"):
        matcher.accept(end_id)


def test_a_vocabulary_without_an_end_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "end_ids", frozenset())
    with pytest.raises(UsageError, match="json_object is given, but the model's vocabulary names"):
        Grammars(llm.tokenizer, llm.vocab_size).matcher(SamplingParams(json_object=True))


# The library


def test_a_run_without_a_form_does_not_load_the_library(tmp_path: Path) -> None:
    program = """
import sys
from hypocenter import LLM
with LLM(num_threads=1, context_length=64) as llm:
    llm.generate("x", max_tokens=2)
    assert "llguidance" not in sys.modules
    llm.generate("x", json_object=True, max_tokens=2)
    assert "llguidance" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_form_is_kept_as_text_that_cannot_change() -> None:
    schema: dict[str, Any] = {"type": "object"}
    params = SamplingParams(json_schema=schema)
    schema["type"] = "string"
    assert params.json_schema == '{"type": "object"}'
    assert params == SamplingParams(json_schema='{"type": "object"}')
    assert params.constraint == ("json_schema", '{"type": "object"}')
    assert SamplingParams().constraint is None


def test_errors_are_those_of_the_package() -> None:
    assert issubclass(GrammarError, HypoError)
    assert not issubclass(GrammarError, UsageError)
    with pytest.raises(BadSetting) as caught:
        SamplingParams(grammar="")
    assert (caught.value.field, caught.value.value) == ("grammar", "")


def test_a_request_without_a_form_has_no_matcher(llm: LLM) -> None:
    request: Request = llm.request(PROMPT)
    assert request.matcher is None
