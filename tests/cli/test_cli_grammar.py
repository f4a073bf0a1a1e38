"""`hypo run` with a schema or a grammar: valid answers, and refusals that name the option."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from models.demo_variants import demo_that_chats
from outside.terminal import hypo_in_process
from repository import DEMO

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
FIXED = ("-t", "1", "--seed", "5", "--temp", "1", "-n", "60")


@pytest.fixture
def schema(tmp_path: Path) -> str:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    return str(path)


@pytest.fixture
def grammar(tmp_path: Path) -> Path:
    return tmp_path / "answer.gbnf"


def test_an_answer_is_valid_by_the_schema_of_a_file(schema: str, tmp_path: Path) -> None:
    chat_model = str(demo_that_chats(tmp_path / "chat.gguf"))
    for asked in ((str(DEMO), "-p", "n = "), (chat_model, "How many?")):
        done = hypo_in_process("run", *asked, "--json-schema", schema, "-q", *FIXED)
        assert done.returncode == 0, done.stderr
        Draft202012Validator(SCHEMA).validate(json.loads(done.stdout))


def test_an_answer_follows_the_grammar_of_a_file(grammar: Path) -> None:
    grammar.write_text('root ::= ("ab" | "é"){2} "\\n"\n')
    done = hypo_in_process("run", "-p", "x", "--grammar", str(grammar), "--json", *FIXED)
    answer = json.loads(done.stdout)
    assert re.fullmatch("(ab|é){2}\n", answer["text"])
    assert answer["finish_reason"] == "stop"


def test_a_json_object_is_asked_for_without_a_file() -> None:
    done = hypo_in_process("run", "-p", "x", "--json-object", "-q", *FIXED)
    assert done.stdout.startswith("{")


def test_refusals_name_the_option(schema: str, grammar: Path) -> None:
    def told(*args: str) -> str:
        done = hypo_in_process("run", "-p", "x", "-t", "1", *args)
        assert (done.returncode, done.stdout) == (2, "")
        return done.stderr

    grammar.write_text("root ::= foo")
    assert "--grammar is 'root ::= foo', but Failed to convert" in told("--grammar", str(grammar))
    both = told("--json-schema", schema, "--grammar", str(grammar))
    assert "both --json-schema and --grammar; give one" in both
    grammar.write_text('{"type": "foo"}')
    unknown = told("--json-schema", str(grammar))
    assert '--json-schema is \'{"type": "foo"}\', but Invalid type: foo' in unknown
    grammar.write_text("{")
    assert "--json-schema is '{', but must be JSON" in told("--json-schema", str(grammar))
    grammar.write_text("{}")
    both = told("--json-schema", str(grammar), "--json-object")
    assert "--json-object is True, but json_schema is given as well" in both
    grammar.write_bytes(b"\xff")
    assert "is not UTF-8, but a grammar must be" in told("--grammar", str(grammar))
    grammar.write_text("x" * 70000)
    assert "is no grammar: up to 65536 characters" in told("--grammar", str(grammar))
    assert "No such file" in told("--grammar", str(grammar) + ".gone")
    assert "--ignore-eos is True, but an answer" in told("--ignore-eos", "--json-object")
