"""What the prefix cache saves an agent, turn by turn: prompt tokens, cached tokens, first token.

An agent sends its system prompt, its tools and all that was said before with every turn. Some
clients put a line near the top that differs each time. Four conversations are measured, each on a
server of its own: nothing changes at the top; the same while a title request and another
conversation come between turns; a line near the top changes; the prefix cache is off. Writes
benchmarks/results/serve_agent.json.

    python benchmarks/serve_agent.py [model.gguf]
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import platform
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serve_process import free_port, own_command, running

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests/support"))

from models.demo_variants import demo_that_chats  # noqa: E402

Message = dict[str, str]


@dataclass(frozen=True)
class Turn:
    prompt_tokens: int
    cached_tokens: int
    first_token_ms: float


@dataclass(frozen=True)
class Variant:
    name: str
    line_changes: bool = False
    others_between: bool = False
    options: tuple[str, ...] = ()


VARIANTS = (
    Variant("nothing changes"),
    Variant("nothing changes, others between", others_between=True),
    Variant("a line near the top changes", line_changes=True),
    Variant("no prefix cache", options=("--no-prefix-cache",)),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", nargs="?", help="with a chat template; else the bundled model")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--prefix-tokens", type=int, default=4000)
    parser.add_argument("--answer-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/serve_agent.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(demo_that_chats(Path(folder) / "demo-that-chats.gguf"))
        measured = {variant.name: _measure(model, variant, options) for variant in VARIANTS}
    _show(measured)
    report = {
        "model": Path(model).name,
        "machine": platform.machine(),
        "prefix_tokens": options.prefix_tokens,
        "answer_tokens": options.answer_tokens,
        "turns": {name: [asdict(turn) for turn in turns] for name, turns in measured.items()},
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _measure(model: str, variant: Variant, options: argparse.Namespace) -> list[Turn]:
    port = free_port()
    context = options.prefix_tokens + options.turns * (options.answer_tokens + 256) + 512
    command = own_command(model, port, "-c", str(context), "-np", "4", *variant.options)
    turns = []
    with running(command, port):
        _ask(port, [{"role": "user", "content": "warm up " * 40}], options.answer_tokens)
        tools = _text_of(port, "tool", options.prefix_tokens)
        others = _text_of(port, "another agent's tool", options.prefix_tokens)
        said: list[Message] = []
        for number in range(options.turns):
            said.append({"role": "user", "content": f"Result {number}: " + _digits(number, 6)})
            system = _system(tools, number if variant.line_changes else 0)
            turn, answer = _ask(port, [system, *said], options.answer_tokens)
            turns.append(turn)
            said.append({"role": "assistant", "content": answer})
            if variant.others_between:
                title = {"role": "user", "content": "A title, please: " + json.dumps(said)}
                _ask(port, [title], 8)
                _ask(port, [_system(others, number), said[-2]], options.answer_tokens)
    return turns


def _system(tools: str, number: int) -> Message:
    """The line that may change stands behind two others."""
    lines = ["You are an agent that works on code.", "Use the tools that are described below."]
    return {"role": "system", "content": "\n".join([*lines, f"id: {_digits(number, 1)}", tools])}


def _text_of(port: int, name: str, num_tokens: int) -> str:
    """Descriptions of tools, of about so many tokens."""
    lines: list[str] = []
    while True:
        for number in range(len(lines), len(lines) + 10):
            lines.append(f"{name} {number}: reads a file, {_digits(number, 1)}, and returns lines")
        found = _post(port, "/tokenize", {"content": "\n".join(lines)})
        if json.loads(found.read())["count"] >= num_tokens:
            return "\n".join(lines)


def _digits(number: int, num: int) -> str:
    """Text that nothing else begins with."""
    return " ".join(hashlib.sha256(f"{number} {n}".encode()).hexdigest()[:12] for n in range(num))


def _ask(port: int, messages: list[Message], num_tokens: int) -> tuple[Turn, str]:
    began, first, text = time.perf_counter(), 0.0, ""
    usage: dict[str, Any] = {}
    answer = _post(
        port,
        "/v1/chat/completions",
        {
            "messages": messages, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        },
    )  # fmt: skip
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise SystemExit(f"the server says: {event['error']}")
        for choice in event["choices"]:
            text += choice["delta"].get("content", "")
            first = first or (time.perf_counter() if text else 0.0)
        usage = event.get("usage") or usage
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Turn(usage["prompt_tokens"], cached, 1e3 * (first - began)), text


def _post(port: int, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", path, json.dumps(body))
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"{path}: status {answer.status}: {answer.read(500)!r}")
    return answer


def _show(measured: dict[str, list[Turn]]) -> None:
    print("| turn | prompt tokens | " + " | ".join(f"{name}: cached, ms" for name in measured), "|")
    print("|---" * (2 + len(measured)) + "|")
    for number, turns in enumerate(zip(*measured.values(), strict=True), 1):
        cells = [f"{turn.cached_tokens}, {turn.first_token_ms:.0f}" for turn in turns]
        print(f"| {number} | {turns[0].prompt_tokens} | " + " | ".join(cells), "|")


if __name__ == "__main__":
    sys.exit(main())
