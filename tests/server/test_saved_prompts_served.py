"""`/slots` as llama-server's clients use it, with a server killed and started anew between."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from outside.served import Served, serving

RULES = "".join(f"# rule {number}: keep it short\n" for number in range(20))
ASKED = {"prompt": RULES + "def f", "max_tokens": 8, "temperature": 0, "logprobs": 1}
#: Tokens of a block of the cache: what is behind the last whole one is computed again.
BLOCK = 16


def server(stack: ExitStack, folder: Path) -> Served:
    """One that saves prompts in `folder`, for two keys."""
    keys = ("--api-key", "one", "--api-key", "two")
    words = (*keys, "--slot-save-path", str(folder / "slots"), "--device", "cpu", "-c", "512")
    return stack.enter_context(serving(folder, *words))


def answer(one: Served, key: str = "one") -> tuple[Any, int]:
    """Text with log probabilities, and how many tokens of the prompt were not computed.

    The prompt's number of tokens is the first thing of what it says.
    """
    told = one.post("/v1/completions", ASKED, headers=bearer(key)).json
    [choice] = told["choices"]
    num_tokens = told["usage"]["prompt_tokens"]
    said = (
        num_tokens,
        choice["text"],
        choice["logprobs"]["tokens"],
        choice["logprobs"]["token_logprobs"],
    )
    assert told["timings"]["prompt_n"] + cached(told) == num_tokens
    return said, cached(told)


def cached(told: Any) -> int:
    return int((told["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def move(one: Served, action: str, key: str = "one") -> Any:
    path = f"/slots/0?action={action}"
    return one.post(path, {"filename": "rules.bin"}, headers=bearer(key))


@pytest.mark.tier("whole")
def test_a_saved_prompt_outlives_its_server(tmp_path: Path) -> None:
    with ExitStack() as stack:
        one = server(stack, tmp_path)
        said, num_cached = answer(one)
        assert num_cached == 0
        saved = move(one, "save").json
        assert saved["n_saved"] >= said[0] // BLOCK * BLOCK > 4 * BLOCK
        one.process.send_signal(signal.SIGKILL)
        assert one.process.wait(30) == -signal.SIGKILL
    with ExitStack() as stack:
        one = server(stack, tmp_path)
        assert move(one, "restore", "two").status == 400, "it is the other key's"
        restored = move(one, "restore").json
        assert restored["n_restored"] == saved["n_saved"]
        assert restored["n_read"] == saved["n_written"]
        assert answer(one, "two") == (said, 0), "of another key nothing is found"
        again, num_cached = answer(one)
        assert again == said
        assert num_cached == (said[0] - 1) // BLOCK * BLOCK, "all but the last, which is asked for"
    [file] = (tmp_path / "slots").rglob("rules.bin")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with ExitStack() as stack:
        one = server(stack, tmp_path)
        refused = move(one, "restore")
        assert (refused.status, "is damaged" in refused.json["error"]["message"]) == (400, True)
        assert answer(one) == (said, 0), "it is computed again"
