"""What an operator does with a server: signals, log, sockets, TLS, refusals at the start."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import itertools
import json
import os
import pty
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from outside.served import Served, free_port, serving
from outside.terminal import HYPO, assert_one_line, hypo_in_process
from repository import ROOT

from hypocenter.base.own_folder import own_folder

TLS = ROOT / "tests/fixtures/tls"
PROMPT = "def count_words(text):\n"
LONG = {"prompt": PROMPT, "temperature": 0, "max_tokens": 300, "ignore_eos": True}
ISO = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def wait_until(holds: Callable[[], Any], seconds: float = 60) -> Any:
    """What it returns, once that is something."""
    stop = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < stop, "it did not come"
        time.sleep(0.05)
    return found


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


@dataclass
class Watched:
    """A server with keys, a prefix and a log of JSON; `folder` is where it runs."""

    served: Served
    folder: Path
    temporary: Path
    runs: Path

    @property
    def events(self) -> list[dict[str, Any]]:
        files = [self.folder / "log.1", self.folder / "log"]
        lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
        return [json.loads(line) for line in lines]

    def told(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        return [
            one for one in self.events if one["event"] == event and fields.items() <= one.items()
        ]

    def send(self, number: int) -> None:
        self.served.process.send_signal(number)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    temporary, runs = folder / "tmp", folder / "runs"
    temporary.mkdir()
    (folder / "keys").write_text("one\n")
    words = ["--api-key-file", "keys", "--admin-key", "boss", "--root-path", "/llm", "-np", "8"]
    words += ["--log-file", "log", "--log-format", "json", "--log-level", "debug"]
    environ = {"TMPDIR": str(temporary), "HYPO_RUN_DIR": str(runs)}
    with serving(folder, *words, environ=environ) as served:
        yield Watched(served, folder, temporary, runs)


def complete(watched: Watched, **body: Any) -> Any:
    asked = {"prompt": PROMPT, "temperature": 0, **body}
    reply = watched.served.post("/v1/completions", asked, headers=key("one"))
    assert reply.status == 200, reply.body
    return reply


def test_each_request_is_a_line_of_json_with_the_same_fields(watched: Watched) -> None:
    reply = complete(watched, max_tokens=6, prompt="import os\n" * 20)
    name = reply.headers["x-request-id"]
    [line] = wait_until(lambda: watched.told("request", request_id=name))
    usage = reply.json["usage"]
    assert set(line) == {
        "time", "level", "event", "message", "peer", "key", "method", "path", "status",
        "prompt_tokens", "cached_tokens", "output_tokens", "ttft_seconds", "outcome", "resumed",
        "seconds", "request_id",
    }  # fmt: skip
    assert re.fullmatch(ISO, line["time"])
    assert (line["peer"], line["method"], line["path"]) == ("127.0.0.1", "POST", "/v1/completions")
    assert (line["status"], line["outcome"], line["level"]) == (200, "completed", "info")
    assert line["prompt_tokens"] == usage["prompt_tokens"]
    assert line["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert line["output_tokens"] == 6
    assert 0 < line["ttft_seconds"] <= line["seconds"]
    assert line["key"] == hashlib.sha256(b"one").hexdigest()[:8]
    again = complete(watched, max_tokens=1, prompt="import os\n" * 20)
    [line] = wait_until(lambda: watched.told("request", request_id=again.headers["x-request-id"]))
    assert line["cached_tokens"] > 16
    refused = watched.served.get("/v1/models", headers=key("wrong"))
    [line] = wait_until(lambda: watched.told("request", request_id=refused.headers["x-request-id"]))
    assert (line["status"], line["key"], line["prompt_tokens"]) == (401, None, None)


def test_no_key_no_prompt_and_no_answer_is_logged(watched: Watched) -> None:
    secret = "swordfish"
    reply = complete(watched, max_tokens=2, prompt=f"# {secret}\n")
    watched.served.get("/v1/models", headers=key(secret))
    path = f"/v1/models?{secret}"
    last = watched.served.get(path, headers=key("one")).headers["x-request-id"]
    wait_until(lambda: watched.told("request", request_id=last))
    text = json.dumps(watched.events)
    assert secret not in text
    assert reply.json["choices"][0]["text"] not in text


def test_clients_are_not_told_in_which_folder_the_model_lies(watched: Watched) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]}
    reply = watched.served.post("/v1/chat/completions", body, headers=key("one"))
    said = reply.json["error"]["message"]
    assert said.startswith("demo-q8_0.gguf has no chat template")


def test_who_left_is_told_from_who_got_all(watched: Watched) -> None:
    mine = {**key("one"), "x-request-id": "leaver"}
    with watched.served.stream("/v1/completions", LONG, headers=mine) as stream:
        next(stream)
    [line] = wait_until(lambda: watched.told("request", request_id="leaver"))
    assert (line["outcome"], line["status"]) == ("cancelled", 200)
    assert 0 < line["output_tokens"] < 300


def test_probes_are_logged_where_somebody_debugs(watched: Watched) -> None:
    name = watched.served.get("/health").headers["x-request-id"]
    [line] = wait_until(lambda: watched.told("request", request_id=name))
    assert line["level"] == "debug"


def test_a_prefix_may_come_or_not_and_keys_hold_below_it(watched: Watched) -> None:
    served = watched.served
    for path in ("/v1/models", "/llm/v1/models"):
        assert served.get(path, headers=key("one")).status == 200
        assert served.get(path).status == 401
    assert served.get("/llm/health").status == 200
    assert served.get("/llm/debug/requests", headers=key("one")).status == 401
    assert served.get("/llm/debug/requests", headers=key("boss")).status == 200
    for path in ("/llm/llm/v1/models", "/llmx/v1/models"):
        assert served.get(path, headers=key("one")).status == 404
    assert served.get("/openapi.json", headers=key("one")).json["servers"] == [{"url": "/llm"}]


def test_a_dead_worker_and_its_successor_are_one_line(watched: Watched) -> None:
    with watched.served.stream("/v1/completions", LONG, headers=key("one")) as stream:
        next(stream)
        lost = watched.served.kill_worker()
        assert list(stream)[-1] == "[DONE]"
    [line] = wait_until(lambda: watched.told("worker_took_over"))
    found = re.fullmatch(
        rf"worker {lost} was ended by SIGKILL; worker (\d+) took over after (\d+\.\d) s, "
        "1 request goes on",
        line["message"],
    )
    assert found, line
    assert (int(found[1]), line["num_open"]) == (line["pid"], 1)
    assert watched.told("worker_ended", pid=lost)
    wait_until(lambda: watched.told("request", resumed=1))


def test_a_hang_up_reads_keys_again_and_opens_the_log_anew(watched: Watched) -> None:
    served, keys = watched.served, watched.folder / "keys"
    with served.stream("/v1/completions", LONG, headers=key("one")) as stream:
        next(stream)
        (watched.folder / "log").rename(watched.folder / "log.1")
        keys.write_text("two\none\n")
        watched.send(signal.SIGHUP)
        [line] = wait_until(lambda: watched.told("reloaded"))
        assert line["message"] == "SIGHUP: read again: 2 API keys, the log file"
        assert (line["reloaded"], line["failed"]) == (["2 API keys", "the log file"], [])
        assert '"reloaded"' in (watched.folder / "log").read_text()
        assert served.get("/v1/models", headers=key("two")).status == 200
        assert list(stream)[-1] == "[DONE]"  # who was let in stays
    keys.write_text("\n")
    watched.send(signal.SIGHUP)
    [line] = wait_until(lambda: watched.told("reloaded", level="error"))
    assert "--api-key-file keys holds no key" in line["message"]
    assert served.get("/v1/models", headers=key("two")).status == 200
    assert served.get("/v1/models").status == 401
    keys.write_text("one\n")
    watched.send(signal.SIGHUP)
    wait_until(lambda: served.get("/v1/models", headers=key("two")).status == 401)


def test_usr1_opens_the_log_anew(watched: Watched) -> None:
    log = watched.folder / "log"
    shutil.copyfile(log, watched.folder / "log.1")
    log.unlink()
    watched.send(signal.SIGUSR1)
    wait_until(log.exists)
    name = complete(watched, max_tokens=1).headers["x-request-id"]
    wait_until(lambda: name in log.read_text())
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_log_that_cannot_be_opened_anew_goes_on_in_the_old_one(watched: Watched) -> None:
    log = watched.folder / "log"
    log.rename(watched.folder / "log.1")
    log.mkdir()
    watched.send(signal.SIGUSR1)
    old = watched.folder / "log.1"
    wait_until(lambda: "--log-file" in old.read_text())
    log.rmdir()
    watched.send(signal.SIGUSR1)
    wait_until(log.exists)


def test_neither_workers_nor_who_they_start_die_of_the_servers_signals(watched: Watched) -> None:
    before = watched.served.get("/debug/requests", headers=key("boss")).json
    below = [int(pid) for pid in _below(watched.served.process.pid)]
    assert before["worker_pid"] in below
    for pid in below:
        for number in (signal.SIGHUP, signal.SIGUSR1):
            os.kill(pid, number)
    complete(watched, max_tokens=4)
    after = watched.served.get("/debug/requests", headers=key("boss")).json
    assert after["worker_pid"] == before["worker_pid"]
    assert after["spare_pid"] == before["spare_pid"]
    assert set(below) <= set(_below(watched.served.process.pid))


def _below(pid: int) -> list[int]:
    found = subprocess.run(
        ["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    return [int(one) for one in found] + [deeper for one in found for deeper in _below(int(one))]


def test_gaps_of_the_metrics_are_those_that_a_client_sees(watched: Watched) -> None:
    def sums() -> tuple[float, float]:
        text = watched.served.get("/metrics", headers=key("one")).body.decode()
        found = dict(
            re.findall(r"^vllm:inter_token_latency_seconds_(sum|count)\{.*\} (\S+)$", text, re.M)
        )
        return float(found["sum"]), float(found["count"])

    before = sums()
    worker = watched.served.worker_pid
    going_on = threading.Timer(2.0, os.kill, [worker, signal.SIGCONT])
    times = []
    with watched.served.stream("/v1/completions", LONG, headers=key("one")) as stream:
        for event in stream:
            if event != "[DONE]" and event["choices"]:
                times.append(time.monotonic())
            if len(times) == 2:
                os.kill(worker, signal.SIGSTOP)
                going_on.start()
    after = sums()
    assert after[1] - before[1] == 299  # each gap is a sample
    # The stall is one of them, and their sum is the time from the first piece to the last one.
    assert max(then - now for now, then in itertools.pairwise(times)) > 1
    assert after[0] - before[0] == pytest.approx(times[-1] - times[0], abs=1.0)
    text = watched.served.get("/metrics", headers=key("one")).body.decode()
    buckets = re.findall(
        r"^vllm:inter_token_latency_seconds_bucket\{.*le=\"([^\"]+)\".*\} (\S+)$", text, re.M
    )
    assert float(buckets[-1][1]) - float(dict(buckets)["1.0"]) >= 1


def test_figures_can_be_read_one_by_one(watched: Watched) -> None:
    text = watched.served.get("/metrics", headers=key("one")).body.decode()
    assert "_created" not in text
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.M))
    assert len(helps) > 20
    for name, words in helps.items():
        assert len(words.split()) >= 3, (name, words)
        assert words.endswith("."), (name, words)
    assert len(set(helps.values())) == len(helps)
    for line in text.splitlines():
        if line.startswith("vllm:"):
            assert 'engine="0"' in line
            assert "model_name=" in line


@pytest.mark.tier("whole")
def test_a_report_is_told_of_while_it_is_written(watched: Watched) -> None:
    watched.served.kill_worker(signal.SIGSEGV)
    watched.served.wait_ready()

    def faults() -> list[Any]:
        return list(watched.served.get("/debug/faults", headers=key("boss")).json["faults"])

    [fault] = wait_until(faults)
    states = set()

    def written() -> Any:
        fault = faults()[0]
        states.add(fault["report_state"])
        return fault if fault["report"] else None

    fault = wait_until(written, 120)
    assert states == {"being written", "written"}
    assert (fault["report_state"], "SIGSEGV" in fault["report"]) == ("written", True)
    bundle = Path(fault["bundle"])
    assert bundle.parent == watched.folder / "hypo-faults"
    assert (bundle / "report.md").stat().st_mode & 0o777 == 0o600
    assert (bundle / "report.html").stat().st_mode & 0o777 == 0o600
    assert bundle.parent.stat().st_mode & 0o777 == 0o700
    # Links that somebody puts there lead nowhere.
    (bundle / "report.md").rename(bundle / "kept.md")
    (bundle / "report.md").symlink_to(bundle / "kept.md")
    (bundle.parent / "fault-99999999-000000").symlink_to(bundle)
    assert [(one["bundle"], one["report"]) for one in faults()] == [(str(bundle), None)]


@pytest.mark.tier("whole")
def test_what_a_killed_server_leaves_goes_with_the_next_start(watched: Watched) -> None:
    """The last one of this server."""
    below = _below(watched.served.process.pid)
    watched.served.process.kill()
    watched.served.process.wait()
    wait_until(lambda: not any(_is_running(pid) for pid in below), 60)
    assert list(watched.temporary.glob("hypo-serve-*"))
    assert list(watched.runs.glob("doctor-*"))
    with (
        own_folder("hypo-serve-", watched.temporary) as sockets,
        own_folder("doctor-", watched.runs) as runs,
    ):
        assert list(watched.temporary.iterdir()) == [sockets]
        assert list(watched.runs.glob("doctor-*")) == [runs]
    assert list(watched.temporary.iterdir()) == []


def _is_running(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


# -- a socket, TLS and a terminal -----------------------------------------------------------------


@dataclass
class Private:
    """A server with TLS at a Unix socket, started from a terminal; `master` is our end of that."""

    process: subprocess.Popen[bytes]
    socket: Path
    folder: Path
    master: int

    def connect(self, context: ssl.SSLContext) -> ssl.SSLSocket:
        with socket.socket(socket.AF_UNIX) as plain:
            plain.connect(str(self.socket))
            return context.wrap_socket(plain, server_hostname="localhost")

    def get(self, path: str, trusted: str = "one") -> tuple[int, bytes]:
        with self.connect(ssl.create_default_context(cafile=TLS / f"{trusted}.pem")) as secure:
            secure.sendall(
                f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
            )
            answer = http.client.HTTPResponse(secure)
            answer.begin()
            return answer.status, answer.read()

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Private]:
    folder = tmp_path_factory.mktemp("private")
    for name in ("pem", "key"):
        shutil.copyfile(TLS / f"one.{name}", folder / f"now.{name}")
    path = Path(tempfile.mkdtemp(prefix="hypo-test-")) / "s"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    words = ["--uds", str(path), "--ssl-certfile", "now.pem", "--ssl-keyfile", "now.key"]
    process, master = _on_a_terminal([*HYPO, "serve", *words, "--log-file", "log"], folder)
    try:
        server = Private(process, path, folder, master)
        wait_until(lambda: (folder / "log").exists() and "serving" in server.log, 120)
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        shutil.rmtree(path.parent)


def _on_a_terminal(command: Sequence[str], folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """As the leader of a session whose terminal it is, so that closing that hangs it up."""
    master, slave = pty.openpty()
    code = "import fcntl, os, signal, sys, termios; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    code += "fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command],
        cwd=folder, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    return process, master


def test_a_unix_socket_is_for_its_user_alone(private: Private) -> None:
    """The one that was there, where nobody listened, was replaced."""
    assert private.socket.lstat().st_mode & 0o777 == 0o600
    assert f"curl --cacert FILE --unix-socket {private.socket} https://localhost/" in private.log
    status, body = private.get("/health")
    assert (status, json.loads(body)["status"]) == (200, "ok")
    private.get("/v1/models")
    line = wait_until(lambda: re.search(r"^(.*) GET /v1/models 200 .*$", private.log, re.M))
    assert re.fullmatch(rf"{ISO} INFO    unix", line[1])


def test_a_socket_somebody_listens_at_is_left(private: Private) -> None:
    assert _refusal("--uds", str(private.socket)) == (
        2, f"hypo: --uds {private.socket}: another server listens there; name another path"
    )  # fmt: skip
    assert private.get("/health")[0] == 200


def test_tls_is_1_2_or_later(private: Private) -> None:
    def context(version: ssl.TLSVersion) -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=TLS / "one.pem")
        made.set_ciphers("ALL:@SECLEVEL=0")
        made.minimum_version = made.maximum_version = version
        return made

    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        with private.connect(context(version)) as secure:
            assert secure.version() == f"TLSv1.{version.name[-1]}"
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old = context(ssl.TLSVersion.TLSv1_1)
    with pytest.raises(ssl.SSLError, match=r"EOF occurred|protocol version"):
        private.connect(old)


def test_a_hang_up_renews_the_certificate(private: Private) -> None:
    shutil.copyfile(TLS / "two.pem", private.folder / "now.pem")
    private.process.send_signal(signal.SIGHUP)  # half of the pair is new
    wait_until(lambda: "the key is not that of the certificate" in private.log)
    assert private.get("/health")[0] == 200
    shutil.copyfile(TLS / "two.key", private.folder / "now.key")
    private.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "read again: the certificate, the log file" in private.log)
    assert private.get("/health", trusted="two")[0] == 200
    with pytest.raises(ssl.SSLCertVerificationError):
        private.get("/health", trusted="one")


@pytest.mark.tier("whole")
def test_bench_serve_reaches_a_socket(private: Private, tmp_path: Path) -> None:
    done = subprocess.run(
        [*HYPO, "bench-serve", "--url", "https://localhost", "--uds", str(private.socket),
         "-n", "2", "--output-length", "3", "--json", "-q"],
        capture_output=True, text=True, timeout=60,
        env={**os.environ, "SSL_CERT_FILE": str(private.folder / "now.pem")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (json.loads(done.stdout)["num_errors"], json.loads(done.stdout)["num_requests"]) == (
        0,
        2,
    )


@pytest.mark.tier("whole")
def test_a_server_whose_terminal_is_closed_drains(private: Private) -> None:
    """The last one of this server. A client that is being answered gets all of it."""
    trusted = (
        "two"
        if (private.folder / "now.pem").read_bytes() == (TLS / "two.pem").read_bytes()
        else "one"
    )
    got: list[tuple[int, bytes]] = []
    num_tokens = 500  # so many take longer than it takes to see the first ones

    def ask() -> None:
        with private.connect(ssl.create_default_context(cafile=TLS / f"{trusted}.pem")) as secure:
            data = json.dumps({**LONG, "max_tokens": num_tokens})
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            head += f"Content-Length: {len(data)}"
            secure.sendall(f"{head}\r\nConnection: close\r\n\r\n{data}".encode())
            answer = http.client.HTTPResponse(secure)
            answer.begin()
            got.append((answer.status, answer.read()))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: b"n_decoded" in private.get("/slots", trusted)[1]
               and json.loads(private.get("/slots", trusted)[1])[0]["n_decoded"] > 0)  # fmt: skip
    os.close(private.master)
    asking.join(60)
    assert got[0][0] == 200
    assert json.loads(got[0][1])["usage"]["completion_tokens"] == num_tokens
    assert private.process.wait(60) == 0
    assert "SIGHUP, for its terminal is gone: stopping; 1 open answer may end" in private.log
    assert re.search(r"INFO    stopped after \d+ requests for an answer$", private.log.strip())
    assert not private.socket.exists()


# -- what is refused at the start -----------------------------------------------------------------


def _refusal(*words: str, folder: Path | None = None, **environ: str) -> tuple[int, str]:
    """The exit code and the one line of `hypo serve` that does not start."""
    done = subprocess.run(
        [*HYPO, "serve", *words], cwd=folder, capture_output=True, text=True, timeout=120,
        env={**os.environ, **environ},
    )  # fmt: skip
    told = [line for line in done.stderr.splitlines() if not re.match(rf"{ISO} INFO ", line)]
    assert_one_line("\n".join(told))
    return done.returncode, told[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--chat-template-file", "bad.jinja"], "chat template 'given': line 1: unexpected '}'"),
        (["--kv-tokens", "10", "-c", "512"], "--kv-tokens is 10, but one context, of 512 tokens"),
        (["-c", "100000"], "-c/--ctx-size is 100000, but the model was trained for 512"),
        (
            ["--kv-tokens", "200000000"],
            r"cpu: 572\.22 GiB asked for \(weights .*smaller --kv-tokens, a smaller -c/--ctx-size",
        ),
    ],
    ids=["template", "cache", "context", "memory"],
)
@pytest.mark.tier("whole")
def test_what_every_client_would_meet_is_refused_at_the_start(
    words: list[str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.jinja").write_text("{{ m.content }")
    code, line = _refusal(*words, "--port", str(free_port()), folder=tmp_path)
    assert (code, bool(re.search(f"^hypo: {said}", line))) == (2, True), line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--uds", "file"], "--uds {here}/file is there and is no socket"),
        (["--uds", "x" * 200], "it has more than 107 bytes"),
        (["--uds", "no/folder"], "--uds {here}/no/folder: No such file"),
        (["--root-path", "llm"], "--root-path is 'llm', but must be like /llm"),
        (["--root-path", "/llm/"], "--root-path is '/llm/', but must be like /llm"),
        (["--ssl-keyfile", "one.key"], "--ssl-keyfile needs --ssl-certfile"),
        (["--ssl-certfile", "no.pem"], "--ssl-certfile {here}/no.pem: No such file"),
        (["--ssl-certfile", "file"], "no PEM of a pair"),
        (["--ssl-certfile", "one.pem"], "no PEM of a pair"),
        (
            ["--ssl-certfile", "one.pem", "--ssl-keyfile", "two.key"],
            "the key is not that of the certificate",
        ),
        (["--ssl-certfile", "one.pem", "--ssl-keyfile", "locked.key"], "the key is encrypted"),
        (["--log-file", "no/log"], "--log-file {here}/no/log: No such file"),
        (["--log-file", "."], "--log-file {here}: Is a directory"),
        (["--log-file", "pipe"], "--log-file {here}/pipe: No such device"),
        (["--bundles", "file/x"], "--bundles {here}/file/x: {here}/file is no folder"),
        (["--api-key-file", "no"], "--api-key-file no: No such file"),
        (["--api-key-file", "file", "--api-key", ""], "an --api-key is empty"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_files_folders_and_ports_are_refused_before_a_model_is_loaded(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in TLS.iterdir():
        shutil.copyfile(file, tmp_path / file.name)
    (tmp_path / "file").write_text("no PEM\n")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hypocenter.server.serve.Supervisor", None)  # it would start a worker
    done = hypo_in_process("serve", "--port", str(free_port()), *words)
    assert_one_line(done.stderr, said.format(here=tmp_path))
    assert done.returncode == 2


def test_a_folder_for_runs_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    code, line = _refusal("--port", str(free_port()), HYPO_RUN_DIR=str(tmp_path))
    assert code == 2
    assert line.startswith(f"hypo: {tmp_path} is not this user's alone, but what runs record")


@pytest.mark.tier("whole")
def test_a_full_log_disk_ends_nothing(tmp_path: Path) -> None:
    """Nor does a reader that reads no more; both are counted."""
    with open("/dev/full", "wb") as full:
        port = free_port()
        process = subprocess.Popen(
            [*HYPO, "serve", "--port", str(port), "-t", "64"], cwd=tmp_path, stderr=full, text=True
        )
    served = Served(process, port)
    try:
        wait_until(lambda: _is_up(served), 120)
        served.kill_worker()
        served.wait_ready()
        assert served.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status == 200
        text = served.get("/metrics").body.decode()
        found = re.search(r"^hypocenter:log_lines_lost_total\{.*\} (\S+)$", text, re.M)
        assert found
        assert float(found[1]) >= 8
    finally:
        process.terminate()
        assert process.wait(60) == 0


def _is_up(served: Served) -> bool:
    with contextlib.suppress(OSError):
        return served.get("/health").status == 200
    return False
