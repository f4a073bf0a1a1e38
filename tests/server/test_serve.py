"""`hypo serve` as its clients see it: routes, streams, errors, and a worker that dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from outside.served import Reply, Served, free_port, serving, started, texts
from outside.terminal import assert_one_line, hypo_in_process
from repository import ROOT

from hypocenter import LLM
from hypocenter.server.pages.pages import DOCUMENTS

PROMPT = "def count_words(text):\n"


@dataclass(frozen=True)
class Start:
    """A server that is ready, and what it answered before."""

    served: Served
    health: Reply
    early: Reply
    stderr: tuple[str, ...]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    # With drafts all answers are the same, so every test here is one of them, too.
    environ = {"HYPO_ADMIN_KEY": "boss", "HYPO_SERVE_PARALLEL": "16", "HYPO_SERVE_SPEC": "ngram"}
    with started(tmp_path_factory.mktemp("served"), environ=environ) as served:
        health, early = served.get("/health"), served.post("/v1/completions", {"prompt": "a"})
        served.wait_ready()
        yield Start(served, health, early, tuple(served.stderr))


@pytest.fixture(scope="module")
def served(start: Start) -> Served:
    return start.served


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as llm:
        yield llm


def complete(served: Served, **body: Any) -> Any:
    reply = served.post("/v1/completions", {"prompt": PROMPT, "temperature": 0, **body})
    assert reply.status == 200, reply.body
    return reply.json


def num_of(served: Served, figure: str) -> float:
    """The sum of one of vLLM's figures of drafts."""
    lines = served.get("/metrics").body.decode().splitlines()
    name = f"vllm:spec_decode_num_{figure}_total"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


def test_drafts_are_counted_and_can_be_left_out(served: Served, llm: LLM) -> None:
    figures = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    before = {figure: num_of(served, figure) for figure in figures}
    prompt = "import os\nimport sys\nfrom pathlib"
    answer = complete(served, prompt=prompt, max_tokens=200)
    timings = answer["timings"]
    assert 0 < timings["draft_n_accepted"] <= timings["draft_n"]
    more = {figure: num_of(served, figure) - before[figure] for figure in figures}
    assert more["draft_tokens"] == timings["draft_n"]
    assert more["accepted_tokens"] == more["accepted_tokens_per_pos"] == timings["draft_n_accepted"]
    assert 0 < more["drafts"] <= more["draft_tokens"]
    plain = complete(served, prompt=prompt, max_tokens=200, drafts=False)
    assert "draft_n" not in plain["timings"]
    assert plain["choices"][0]["text"] == answer["choices"][0]["text"]
    assert plain["choices"][0]["text"] == llm.generate(prompt, max_tokens=200).text


def test_a_completion_is_what_the_model_says(served: Served, llm: LLM) -> None:
    expected = llm.generate(PROMPT, max_tokens=24)
    answer = complete(served, max_tokens=24)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, "length")
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["object"] == "text_completion"


def test_sampled_answers_follow_their_seeds(served: Served, llm: LLM) -> None:
    expected = [
        llm.generate(PROMPT, max_tokens=12, temperature=1.0, top_k=20, seed=seed).text
        for seed in (7, 8, 9)
    ]
    answer = complete(served, max_tokens=12, temperature=1.0, top_k=20, seed=7, n=3)
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]


def test_a_prompt_has_four_forms(served: Served, llm: LLM) -> None:
    ids = [llm.encode(text) for text in (PROMPT, "import ")]
    expected = [llm.generate(text, max_tokens=5).text for text in (PROMPT, "import ")]
    several: list[Any] = [[PROMPT, "import "], [list(one) for one in ids]]
    for prompt in several:
        answer = complete(served, prompt=prompt, max_tokens=5)
        assert [choice["text"] for choice in answer["choices"]] == expected
    for one in (PROMPT, list(ids[0])):
        assert complete(served, prompt=one, max_tokens=5)["choices"][0]["text"] == expected[0]


def test_echo_and_logprobs_are_what_an_evaluation_asks_for(served: Served, llm: LLM) -> None:
    ids = list(llm.encode(PROMPT))
    expected = llm.generate(ids, max_tokens=1, logprobs=1, prompt_logprobs=1)
    answer = complete(served, prompt=[ids], max_tokens=1, logprobs=1, echo=True)
    found = answer["choices"][0]["logprobs"]
    assert expected.prompt_logprobs is not None
    assert expected.logprobs is not None
    all_of_them = [*expected.prompt_logprobs, *expected.logprobs]
    assert found["token_logprobs"] == [one and one.logprob for one in all_of_them]
    assert found["top_logprobs"][0] is None
    assert all(
        max(table.values()) == one.top[0].logprob
        for table, one in zip(found["top_logprobs"][1:], all_of_them[1:], strict=True)
        if one is not None
    )
    for text, table in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True):
        assert text in table
    assert found["text_offset"][1:3] == [0, len(found["tokens"][1])]
    assert answer["choices"][0]["text"].endswith(PROMPT + expected.text)


def test_a_stream_is_the_answer_in_pieces(served: Served) -> None:
    whole = complete(served, max_tokens=20, logprobs=0)["choices"][0]
    with served.stream(
        "/v1/completions",
        {
            "prompt": PROMPT, "temperature": 0, "max_tokens": 20, "logprobs": 0,
            "stream_options": {"include_usage": True},
        },
    ) as stream:  # fmt: skip
        events = list(stream)
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 20
    assert texts(events) == whole["text"]
    pieces = [event["choices"][0] for event in events[:-2]]
    assert [piece["finish_reason"] for piece in pieces][-1] == "length"
    offsets = [offset for piece in pieces for offset in piece["logprobs"]["text_offset"]]
    assert offsets == whole["logprobs"]["text_offset"]


def test_a_second_prompt_finds_what_the_first_left(served: Served) -> None:
    prompt = "import os\nimport sys\n" * 8
    first = complete(served, prompt=prompt, max_tokens=2)
    second = complete(served, prompt=prompt, max_tokens=2)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 16
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    other = complete(served, prompt=prompt, max_tokens=2, cache_salt="mine")
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_model_without_template_cannot_chat(served: Served) -> None:
    reply = served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
    assert reply.status == 400
    assert "no chat template" in reply.json["error"]["message"]


BAD = {
    "no JSON": (b"{", 400, None),
    "no prompt": ({}, 400, "prompt"),
    "a number for a text": ({"prompt": 5}, 400, "prompt"),
    "mixed": ({"prompt": ["a", 5]}, 400, "prompt"),
    "too many tokens": ({"prompt": [5] * 600}, 400, None),
    "no such token": ({"prompt": [9999]}, 400, None),
    "temperature": ({"prompt": "a", "temperature": -1}, 400, "temperature"),
    "n": ({"prompt": "a", "n": 0}, 400, "n"),
    "a huge n": ({"prompt": "a", "n": 10**30}, 400, "n"),
    "logprobs": ({"prompt": "a", "logprobs": 21}, 400, "logprobs"),
    "max_tokens": ({"prompt": "a", "max_tokens": -5}, 400, "max_tokens"),
    "seed": ({"prompt": "a", "seed": 0.5}, 400, "seed"),
    "best_of": ({"prompt": "a", "best_of": 2}, 400, "best_of"),
    "suffix": ({"prompt": "a", "suffix": "b"}, 400, "suffix"),
    "logit_bias": ({"prompt": "a", "logit_bias": {"5": 101}}, 400, "logit_bias"),
    "a bias of a text": ({"prompt": "a", "logit_bias": [["Hello", -1]]}, 400, "logit_bias"),
    "a bias of true": ({"prompt": "a", "logit_bias": {"5": True}}, 400, "logit_bias"),
    "a bias of no token": ({"prompt": "a", "logit_bias": {"99999": 1}}, 400, "logit_bias"),
    "a negative token": ({"prompt": "a", "logit_bias": {"-1": 1}}, 400, "logit_bias"),
    "a number of biases": ({"prompt": "a", "logit_bias": 5}, 400, "logit_bias"),
    "many biases": (
        {"prompt": "a", "logit_bias": {str(n): 1 for n in range(1025)}}, 400, "logit_bias",
    ),
    "stop_token_ids": ({"prompt": "a", "stop_token_ids": [99999]}, 400, "stop_token_ids"),
    "many stop_token_ids": ({"prompt": "a", "stop_token_ids": [5] * 129}, 400, "stop_token_ids"),
    "min_tokens": ({"prompt": "a", "min_tokens": 9, "max_tokens": 8}, 400, "min_tokens"),
    "min_tokens of 16": ({"prompt": "a", "min_tokens": 17}, 400, "min_tokens"),
    "allowed_token_ids": ({"prompt": "a", "allowed_token_ids": [99999]}, 400, "allowed_token_ids"),
    "none allowed": ({"prompt": "a", "allowed_token_ids": []}, 400, "allowed_token_ids"),
    "bad_words": ({"prompt": "a", "bad_words": [""]}, 400, "bad_words"),
    "nothing left": (
        {"prompt": "a", "allowed_token_ids": [5], "logit_bias": [[5, False]]}, 400, None,
    ),
    "tools": ({"prompt": "a", "tools": [{}]}, 400, "tools"),
    "stop": ({"prompt": "a", "stop": ["a"] * 17}, 400, None),
    "model": ({"prompt": "a", "model": "gpt-4"}, 404, "model"),
    "surrogate": (b'{"prompt": "\\ud800"}', 400, None),
    "deep": (b'{"prompt": ' + b"[" * 100_000, 400, None),
    "long": (b'{"prompt": "' + b"a" * (33 << 20), 413, None),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_the_form_that_clients_read(served: Served, case: str) -> None:
    body, status, param = BAD[case]
    reply = served.post("/v1/completions", body)
    assert reply.status == status, reply.body
    error = reply.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["message"]
    assert reply.headers["x-request-id"]


def test_a_prompt_that_is_too_long_says_so_in_the_words_that_clients_seek(served: Served) -> None:
    error = served.post("/v1/completions", {"prompt": [5] * 600}).json["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 512 tokens" in error["message"]


def test_fields_that_nobody_knows_are_named(served: Served) -> None:
    body = {"prompt": "a", "max_tokens": 1, "frobnicate": 1, "user": "me", "tools": []}
    reply = served.post("/v1/completions", body)
    assert (reply.status, reply.headers["x-ignored-fields"]) == (200, "frobnicate")


def test_unknown_addresses_and_methods_have_the_same_form(served: Served) -> None:
    for reply in (served.get("/v1/nothing"), served.get("/v1/completions")):
        assert reply.status in (404, 405)
        assert set(reply.json["error"]) == {"message", "type", "param", "code"}


def test_tokens_there_and_back(served: Served, llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello there", add_special=False)
    assert served.post("/tokenize", {"content": "hello there"}).json["tokens"] == ids
    with_bos = served.post("/tokenize", {"prompt": "hello there"}).json["tokens"]
    assert with_bos == llm.tokenizer.encode("hello there")
    assert served.post("/detokenize", {"tokens": ids}).json["content"] == "hello there"
    pieces = served.post("/tokenize", {"content": "é", "with_pieces": True}).json["tokens"]
    found = [p["piece"].encode() if isinstance(p["piece"], str) else p["piece"] for p in pieces]
    assert b"".join(map(bytes, found)) == "é".encode()


def test_it_describes_itself(served: Served) -> None:
    assert served.get("/health").json["status"] == "ok"
    [model] = served.get("/v1/models").json["data"]
    assert (model["id"], model["max_model_len"]) == ("demo-q8_0", 512)
    assert served.get("/v1/models/demo-q8_0").json["id"] == "demo-q8_0"
    assert served.get("/v1/models/x").status == 404
    assert served.get("/props").json["total_slots"] == 16
    assert len(served.get("/slots").json) == 16
    complete(served, max_tokens=3)
    text = served.get("/metrics").body.decode()
    assert 'vllm:generation_tokens_total{engine="0",model_name="demo-q8_0"}' in text
    assert "vllm:num_requests_running" in text


def test_debug_routes_need_the_admin_key(served: Served) -> None:
    environment = Path(f"/proc/{served.worker_pid}/environ").read_bytes()
    assert b"HYPO_ADMIN_KEY" not in environment
    assert served.get("/debug/requests").status == 401
    answer = served.get("/debug/requests", headers={"Authorization": "Bearer boss"})
    assert answer.json["engine"]["num_running"] == 0
    assert served.get("/debug/faults", headers={"Authorization": "Bearer boss"}).status == 200


def wait_idle(served: Served, seconds: float = 60.0) -> None:
    stop = time.monotonic() + seconds
    headers = {"Authorization": "Bearer boss"}
    while (seen := served.get("/debug/requests", headers=headers).json)["open"] or seen["engine"][
        "num_running"
    ]:
        assert time.monotonic() < stop, seen
        time.sleep(0.02)


def wait_until_none_is_open(served: Served, seconds: float = 60.0) -> None:
    """The server has ended all requests, whatever the worker knows of it."""
    stop = time.monotonic() + seconds
    headers = {"Authorization": "Bearer boss"}
    while seen := served.get("/debug/requests", headers=headers).json["open"]:
        assert time.monotonic() < stop, seen
        time.sleep(0.02)


LONG: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 480, "ignore_eos": True}


def test_a_client_that_leaves_ends_its_request(served: Served) -> None:
    before = num_steps(served)
    with served.stream("/v1/completions", {**LONG, "n": 8}) as stream:
        next(stream)
        # What the worker does meanwhile is no sign of how soon the server hears of the end.
        os.kill(served.worker_pid, signal.SIGSTOP)
    wait_until_none_is_open(served)
    os.kill(served.worker_pid, signal.SIGCONT)
    wait_idle(served)
    assert 0 < num_steps(served) - before < 0.9 * LONG["max_tokens"]


def num_steps(served: Served) -> int:
    """Those of the engine."""
    seen = served.get("/debug/requests", headers={"Authorization": "Bearer boss"}).json
    return int(seen["engine"]["num_steps"])


def test_a_request_can_be_looked_at_and_cancelled(served: Served) -> None:
    assert served.get("/v1/requests/nothing").status == 404
    assert served.post("/v1/requests/nothing/cancel", {}).status == 404
    with served.stream("/v1/completions", LONG) as stream:
        name = next(stream)["id"]
        assert served.get(f"/v1/requests/{name}").json["status"] == "in_progress"
        assert served.post(f"/v1/requests/{name}/cancel", {}).json["status"] == "cancelling"
        events = list(stream)
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "cancelled"
    assert served.get(f"/v1/requests/{name}").json["status"] == "completed"


EACH_WAY: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 11},
    "penalties": {"temperature": 0.8, "seed": 12, "frequency_penalty": 0.5},
    "stop": {"temperature": 1.0, "seed": 13, "stop": ["nobody~", "wrote\n\n\nthis"]},
}


def test_a_worker_that_dies_is_a_pause(served: Served) -> None:
    expected = {
        way: complete(served, **{**LONG, **more})["choices"][0]["text"]
        for way, more in EACH_WAY.items()
    }
    got: dict[str, list[Any]] = {way: [] for way in EACH_WAY}

    def read(way: str) -> None:
        with served.stream("/v1/completions", {**LONG, **EACH_WAY[way]}) as stream:
            got[way] += stream

    threads = [threading.Thread(target=read, args=[way]) for way in EACH_WAY]
    for thread in threads:
        thread.start()

    def share() -> float:
        """Of the answer that is furthest behind. A busy server joins pieces."""
        return min(len(texts(got[way])) / len(expected[way]) for way in EACH_WAY)

    for wanted, number in ((0.01, signal.SIGKILL), (0.4, signal.SIGSEGV)):
        while share() < wanted and any(thread.is_alive() for thread in threads):
            time.sleep(0.005)
        served.kill_worker(number)
    for thread in threads:
        thread.join()
    assert {way: texts(events) for way, events in got.items()} == expected
    assert all(events[-1] == "[DONE]" for events in got.values())
    assert all(sum(bool(texts([e])) for e in events) > 20 for events in got.values())
    text = served.get("/metrics").body.decode()
    assert "hypocenter:requests_resumed_total" in text
    assert served.get("/health").status == 200


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
@pytest.mark.tier("whole")
def test_the_next_worker_reads_what_the_one_before_computed(served: Served, number: int) -> None:
    """In the blocks of its cache; `cached_tokens` then counts them like its own."""
    prompt = f"import os\nimport sys  # {number}\n" * 8
    first = complete(served, prompt=prompt, max_tokens=8)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] < 16
    served.kill_worker(number)
    served.wait_ready()
    second = complete(served, prompt=prompt, max_tokens=8)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 64
    assert second["choices"][0]["text"] == first["choices"][0]["text"]


@pytest.mark.tier("whole")
def test_a_worker_that_stands_still_is_replaced(tmp_path: Path) -> None:
    """Within a step or between two: nobody waits for it longer than its deadline."""
    with serving(tmp_path, "--deadline", "1", "--bundles", "") as served:
        expected = complete(served, **LONG)["choices"][0]["text"]
        for _ in range(10):
            with served.stream("/v1/completions", LONG) as stream:
                got = [next(stream)]
                stopped = served.kill_worker(signal.SIGSTOP)
                got += stream
            assert texts(got) == expected
            if served.worker_pid != stopped:
                break
            os.kill(stopped, signal.SIGCONT)  # it had said all of it before it stopped
        assert served.worker_pid != stopped
        figures = served.get("/metrics").body.decode()
        assert re.search(r"^hypocenter:faults_total\{.*\} 1\.0$", figures, re.MULTILINE), figures


@pytest.mark.tier("whole")
def test_what_a_fault_left_is_a_bundle_with_its_report(served: Served, tmp_path: Path) -> None:
    before = served.get("/debug/faults", headers={"Authorization": "Bearer boss"}).json["faults"]
    served.kill_worker(signal.SIGABRT)
    served.wait_ready()
    stop = time.monotonic() + 60
    while True:
        found = served.get("/debug/faults", headers={"Authorization": "Bearer boss"}).json["faults"]
        if len(found) > len(before) and all(one["report"] for one in found):
            break
        assert time.monotonic() < stop, (found, served.stderr)
        time.sleep(0.1)
    assert "SIGABRT" in found[0]["report"]
    assert any(re.search(r"worker \d+ was ended by SIGABRT", line) for line in served.stderr)


def test_the_process_that_clients_talk_to_loads_no_engine(served: Served) -> None:
    worker = Path(f"/proc/{served.worker_pid}/maps").read_text()
    assert "llvmlite" in worker
    server = Path(f"/proc/{served.process.pid}/maps").read_text()
    for name in ("llvmlite", "numba", "torch", "tokenizers"):
        assert f"/{name}/" not in server
    blocked = ["numba", "torch", "triton", "tokenizers"]
    blocked += [f"hypocenter.{room}" for room in ("engine", "model", "kernels", "device")]
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); "
    code += "import hypocenter.server.serve, hypocenter.cli.verbs.serve"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


@pytest.mark.tier("whole")
def test_keys_let_in(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n\ntwo\n")
    words = ("--api-key", "three", "--api-key-file", "keys")
    with started(tmp_path, *words, environ={"HYPO_API_KEY": "four"}) as served:
        while served.get("/health").status != 200:
            time.sleep(0.05)
        for path in ("/v1/models", "/metrics", "/tokenizer_info", "/nothing"):
            reply = served.get(path)
            assert (reply.status, reply.json["error"]["code"]) == (401, "invalid_api_key")
        for key in ("one", "two", "three", "four"):
            headers = {"Authorization": f"Bearer {key}"}
            assert served.get("/v1/models", headers=headers).status == 200
        for key in ("", "five", "onetwo", "é"):
            headers = {"Authorization": f"Bearer {key}".encode().decode("latin-1")}
            assert served.get("/v1/models", headers=headers).status == 401
        environment = Path(f"/proc/{served.worker_pid}/environ").read_bytes()
        assert b"HYPO_API_KEY" not in environment
        assert served.get("/debug/requests", headers={"x-api-key": "one"}).status == 403


@pytest.mark.tier("whole")
def test_ports_models_and_packages_that_are_not_there(served: Served, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "hypocenter", "serve"]

    def refusal(*words: str) -> tuple[int, str]:
        done = subprocess.run(
            [*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stderr.splitlines()[-1]

    code, line = refusal("--port", str(served.port))
    assert (code, "in use" in line, "--port" in line) == (2, True, True)
    done = hypo_in_process("serve", "nothing.gguf")
    assert done.returncode == 2
    assert_one_line(done.stderr, "hypo: nothing.gguf: no such file")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF no")
    code, line = refusal("bad.gguf", "--port", str(free_port()))
    assert (code, "bad.gguf" in line) == (1, True)
    assert hypo_in_process("serve", "--port", "70000").returncode == 2
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError(name='uvicorn')")
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    assert done.returncode == 2
    assert "pip install 'hypocenter[server]'" in done.stderr


def test_sigterm_lets_open_answers_end(tmp_path: Path) -> None:
    with serving(tmp_path) as served, served.stream("/v1/completions", LONG) as stream:
        next(stream)
        served.process.send_signal(signal.SIGTERM)
        events = list(stream)
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert served.process.wait(30) == 0
    assert not any("SIGKILL" in line for line in served.stderr)  # its worker ends by itself


@pytest.mark.tier("whole")
def test_a_second_sigterm_does_not(tmp_path: Path) -> None:
    many = {**LONG, "n": 24}
    with serving(tmp_path, "-np", "4") as served, served.stream("/v1/completions", many) as stream:
        next(stream)
        served.process.send_signal(signal.SIGTERM)
        while not any("stopping; " in line for line in served.stderr):  # two at once are one
            time.sleep(0.02)
        served.process.send_signal(signal.SIGTERM)
        events = list(stream)
        assert served.process.wait(30) == 0
    assert "shutting down" in events[-1]["error"]["message"]
    assert not Path(f"/proc/{served.process.pid}").exists()


#: Fields of clients, to the parameters that they stand for.
TOKEN_FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "OpenAI's": ({"logit_bias": {"300": 4, "260": -100}}, {"logit_bias": {300: 4, 260: -100}}),
    "llama-server's": (
        {"logit_bias": [[300, 4.5], [260, False]]}, {"logit_bias": {300: 4.5, 260: False}},
    ),
    "llama-server's map": ({"logit_bias": {"361": False}}, {"logit_bias": {361: False}}),
    "allowed": ({"allowed_token_ids": [5, 6, 7, 300]}, {"allowed_token_ids": [5, 6, 7, 300]}),
    "stop": ({"stop_token_ids": [499, 13]}, {"stop_token_ids": [499, 13]}),
    "ends": (
        {"stop_token_ids": [499, 260], "min_tokens": 8},
        {"stop_token_ids": [499, 260], "min_tokens": 8},
    ),
    "words": (
        {"bad_words": ["Return the", "Dictionary"]}, {"bad_words": ["Return the", "Dictionary"]},
    ),
    "nothing": (
        {"logit_bias": {}, "min_tokens": 0, "stop_token_ids": [], "bad_words": [],
         "allowed_token_ids": None}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", TOKEN_FIELDS)
def test_fields_of_single_tokens_do_what_they_do_in_python(
    served: Served, llm: LLM, way: str
) -> None:
    fields, params = TOKEN_FIELDS[way]
    for more in ({"temperature": 0}, {"temperature": 1.0, "seed": 5}):
        reply = served.post(
            "/v1/completions", {"prompt": PROMPT, "max_tokens": 20, **fields, **more}
        )
        assert (reply.status, reply.headers.get("x-ignored-fields")) == (200, None), reply.body
        [choice] = reply.json["choices"]
        expected = llm.generate(PROMPT, max_tokens=20, **params, **more)
        assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish_reason)
        assert reply.json["usage"]["completion_tokens"] == len(expected.token_ids)
        free = llm.generate(PROMPT, max_tokens=20, **more)
        assert (expected.token_ids == free.token_ids) == (not params)


@pytest.mark.tier("whole")
def test_fields_of_single_tokens_outlive_their_worker(served: Served) -> None:
    # What ends an answer is likely from the first token on; but only `min_tokens` later it may.
    body = {
        "prompt": PROMPT, "temperature": 1.0, "seed": 22, "max_tokens": 400, "min_tokens": 300,
        "stop_token_ids": [200, 13], "logit_bias": {"300": 2, "733": False},
        "bad_words": ["self", "the end"], "frequency_penalty": 0.3,
    }  # fmt: skip
    expected = complete(served, **body)
    with served.stream("/v1/completions", body) as stream:
        events = [next(stream) for _ in range(20)]
        served.kill_worker()
        events += stream
    assert texts(events) == expected["choices"][0]["text"]
    assert expected["choices"][0]["finish_reason"] == "stop"
    assert 300 < expected["usage"]["completion_tokens"] < 400


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "OpenAI's": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "vLLM's": {"structured_outputs": {"json": SCHEMA}},
    "llama-server's": {"json_schema": SCHEMA},
}


@pytest.mark.parametrize("way", FORMS)
def test_answers_keep_to_a_schema(served: Served, way: str) -> None:
    body = {"max_tokens": 200, "temperature": 1.0, "seed": 3, **FORMS[way]}
    [choice] = complete(served, **body)["choices"]
    jsonschema.validate(json.loads(choice["text"]), SCHEMA)
    assert choice["finish_reason"] == "stop"


def test_a_grammar_and_any_object(served: Served) -> None:
    grammar = {"grammar": 'start: ("yes" | "no") "!"', "temperature": 1.0, "seed": 4}
    assert complete(served, **grammar)["choices"][0]["text"] in ("yes!", "no!")
    body = {"response_format": {"type": "json_object"}, "max_tokens": 300, "seed": 5}
    reply = complete(served, temperature=1.0, **body)["choices"][0]
    if reply["finish_reason"] == "stop":
        assert isinstance(json.loads(reply["text"]), dict)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"grammar": "start: ("}, "grammar"),
        ({"json_schema": {"type": "nothing"}}, "json_schema"),
        ({"json_schema": {"enum": []}}, "json_schema"),
        ({"json_schema": SCHEMA, "grammar": 'start: "a"'}, "grammar"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "choice"),
        ({"guided_json": {"enum": []}}, "json_schema"),
        ({"guided_whitespace_pattern": "a"}, "guided_whitespace_pattern"),
    ],
)
def test_a_form_that_cannot_be_is_refused(served: Served, more: Any, param: str) -> None:
    reply = served.post("/v1/completions", {"prompt": "a", **more})
    assert (reply.status, reply.json["error"]["param"]) == (400, param), reply.body


@pytest.mark.tier("whole")
def test_a_form_outlives_its_worker(served: Served) -> None:
    schema = {"type": "array", "items": SCHEMA, "minItems": 8, "maxItems": 8}
    body = {
        "prompt": PROMPT, "temperature": 1.0, "seed": 21, "max_tokens": 480,
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    }  # fmt: skip
    expected = complete(served, **body)["choices"][0]["text"]
    with served.stream("/v1/completions", body) as stream:
        events = [next(stream) for _ in range(10)]
        served.kill_worker()
        events += stream
    assert texts(events) == expected
    jsonschema.validate(json.loads(expected), schema)


def _lines_of_the_page() -> list[str]:
    text = (ROOT / "docs" / "serving.md").read_text()
    blocks = re.findall(r"^```sh served\n(.*?)^```", text, re.S | re.M)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("line", _lines_of_the_page())
def test_a_line_of_the_page_runs(served: Served, line: str) -> None:
    command = line.replace("localhost:8080", f"127.0.0.1:{served.port}")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert '{"error"' not in done.stdout


def test_the_routes_of_the_page_are_those_of_the_server(served: Served) -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    named = set(re.findall(r"`(GET|POST|DELETE) (/[\w/.-]+)`", page))
    named -= {("GET", path) for path in DOCUMENTS}  # who does not ask for HTML gets none
    assert len(named) >= 18
    for method, path in named:
        reply = served.ask(method, path, {} if method == "POST" else None)
        is_known = f"there is no {path} here" not in reply.body.decode()
        assert (reply.status != 405, is_known) == (True, True), (path, reply.body)


def test_before_a_model_is_loaded_it_says_so(start: Start) -> None:
    if start.health.status != 200:
        assert start.health.json["error"]["message"] == "Loading model"
        assert start.health.headers["retry-after"]
        assert start.early.status in (200, 503)
    assert complete(start.served, max_tokens=1)["choices"]
    assert not any("Traceback" in line for line in start.stderr), start.stderr


def _hits(served: Served) -> float:
    text = served.get("/metrics").body.decode()
    found = re.search(r"^vllm:prefix_cache_hits_total{.*} (.*)$", text, re.M)
    assert found is not None
    return float(found[1])


def test_several_answers_read_their_prompt_once(served: Served) -> None:
    prompt = "def only_here(argument):\n    return argument\n" * 6
    before = _hits(served)
    answer = complete(served, prompt=prompt, n=4, max_tokens=3, temperature=1.0, seed=1)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    num_blocks = answer["usage"]["prompt_tokens"] // 16
    assert num_blocks > 3
    assert _hits(served) - before >= 3 * 16 * (num_blocks - 1)
    with served.stream("/v1/completions", {"prompt": [prompt, "a"], "n": 2, "max_tokens": 2,
                                           "temperature": 0}) as stream:  # fmt: skip
        events = [event for event in stream if event != "[DONE]"]
    assert {event["choices"][0]["index"] for event in events} == {0, 1, 2, 3}
