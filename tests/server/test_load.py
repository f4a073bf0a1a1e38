"""What the measuring clients report, and that workers may be killed beneath them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from outside.served import Served, free_port, serving

from faults.report import environment_of, module_command
from hypocenter.base.errors import HypoError, UsageError
from hypocenter.cli.verbs.bench_serve import bench_serve
from hypocenter.server.load import Load, figures_of, make_requests, run_load
from hypocenter.server.load_client import Asked
from hypocenter.settings.environment import key_of_clients


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    words = ("-np", "8", "--api-key", "k", "--no-spare")
    with serving(tmp_path_factory.mktemp("served"), *words) as served:
        yield served


def hypo(*words: str) -> Any:
    command = [sys.executable, "-P", "-m", "hypocenter", *words, "--json", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return json.loads(done.stdout)


def test_figures_of_requests_whose_times_are_known() -> None:
    asked = [
        Asked("a", 3, start=10.0, end=11.0, times=[10.2, 10.4, 11.0], num_output_tokens=3),
        Asked("b", 3, start=10.0, end=12.0, times=[11.0, 12.0], num_output_tokens=3),
        Asked("c", 3, start=10.0, end=10.1, error="status 500"),
    ]
    figures = figures_of(asked, 2.0)
    assert (figures.num_requests, figures.num_errors, figures.first_error) == (3, 1, "status 500")
    assert figures.output_tokens_per_second == 3.0
    assert figures.requests_per_second == 1.0
    assert figures.ttft_ms == pytest.approx({"mean": 600, "p50": 200, "p90": 1000, "p99": 1000})
    assert figures.tpot_ms["mean"] == pytest.approx((400 + 500) / 2)
    assert figures.itl_ms["p50"] == pytest.approx(600)
    assert figures.e2el_ms["p99"] == pytest.approx(2000)


def test_the_same_seed_asks_the_same() -> None:
    load = Load(url="http://x", num_requests=200, lengths="sharegpt", seed=3, shared_prefix=5)
    first, again = list(make_requests(load)), list(make_requests(load))
    assert first == again
    assert len({request.output_length for request in first}) > 50
    prompts = [request.prompt for request in first]
    assert len({" ".join(prompt.split()[:5]) for prompt in prompts if isinstance(prompt, str)}) == 1
    assert all(isinstance(prompt, str) for prompt in prompts)


def test_a_server_is_measured(served: Served) -> None:
    url = f"http://127.0.0.1:{served.port}"
    words = ["-n", "12", "-np", "4", "--prompt-length", "10", "--output-length", "6"]
    figures = hypo("bench-serve", "--url", url, "--api-key", "k", *words)
    assert (figures["num_requests"], figures["num_errors"]) == (12, 0)
    assert figures["output_tokens"] == 12 * 6
    assert figures["prompt_tokens"] >= 120
    assert 0 < figures["ttft_ms"]["p50"] <= figures["e2el_ms"]["p50"]
    assert "k" not in figures["load"].values()
    asked = Load(url=url, api_key="k", num_requests=5, concurrency=None, rate=50.0, output_length=4)
    assert run_load(asked)[0].output_tokens == 20


def test_a_server_that_refuses_or_is_not_there(served: Served) -> None:
    with pytest.raises(HypoError, match=r"status 401; it wants a key .*: --api-key, HYPO_API_KEY"):
        run_load(Load(url=f"http://127.0.0.1:{served.port}"))
    load = Load(url=f"http://127.0.0.1:{served.port}", model="m", num_requests=1)
    with pytest.raises(HypoError, match=r"status 401: .*--api-key, HYPO_API_KEY"):
        bench_serve(load, as_json=True, quiet=True)
    with pytest.raises(HypoError, match="does not answer"):
        run_load(Load(url=f"http://127.0.0.1:{free_port()}"))
    with pytest.raises(UsageError, match="like http://"):
        run_load(Load(url="localhost:8080"))
    with pytest.raises(UsageError, match="either a concurrency or a rate"):
        Load(url="http://x", rate=1.0)


@pytest.mark.parametrize("cause", ["SIGKILL", "illegal access"])
@pytest.mark.tier("sim")  # `test_serve.py` has one that dies and its successor
def test_workers_are_killed_and_no_answer_changes(cause: str) -> None:
    asked = ("--kills", "2", "--streams", "3", "--tokens", "40")
    if cause == "SIGKILL":
        figures = hypo("kill-serve", *asked)
    else:
        command = [*module_command("faults"), "serve", *asked, "--json"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=200, env=environment_of()
        )
        assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
        figures = json.loads(done.stdout)
    assert (figures["num_kills"], figures["num_errors"], figures["num_changed"]) == (2, 0, 0)
    assert figures["num_answers"] >= 3
    assert figures["num_pauses"] >= 3
    assert figures["cause"] == cause


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("http://127.0.0.1:8080", "ours"),
        ("http://localhost:8080/v1", "ours"),
        ("https://a.example", "ours"),
        ("http://a.example", None),
        ("http://[", None),
    ],
)
def test_a_key_of_the_environment_goes_where_nobody_else_reads_it(
    url: str, key: str | None
) -> None:
    theirs = {"OPENAI_API_KEY": "theirs"}
    assert key_of_clients(url, {"HYPO_API_KEY": "ours"} | theirs) == key
    assert key_of_clients(url, theirs) == (key and "theirs")
    assert key_of_clients(url, {}) is None
