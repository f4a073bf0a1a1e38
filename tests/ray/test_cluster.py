"""The application on a Ray cluster of two nodes, all on this machine; one replica is killed."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from hypocenter.base.errors import UsageError
from hypocenter.base.package import bundled_model
from hypocenter.ray.application import application

NUM_STREAMS = 6
PORT = 18731


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    made.add_node(num_cpus=1)
    ray.init(address=made.address)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    deploy(min_replicas="2", max_replicas="2")
    yield made
    serve.shutdown()
    ray.shutdown()
    made.shutdown()


def deploy(**settings: str) -> None:
    """Have the application with these settings, whatever there was before."""
    given = {
        "model": str(bundled_model()),
        "options": "--device cpu -t 1 -c 256 -np 8 --no-spare",
        "drain_seconds": "30",
        "open_requests": "2",
        "upscale_seconds": "1",
        "downscale_seconds": "1",
    }
    serve.run(application({**given, **settings}), name="hypocenter")


def asked(number: int, **more: Any) -> dict[str, Any]:
    prompt = f"def f{number}(x):\n    return "
    return {"prompt": prompt, "max_tokens": 60, "seed": number, "temperature": 1.0, **more}


def post(body: dict[str, Any]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(body))
    return connection.getresponse()


def events(answer: Any) -> Iterator[Any]:
    for line in answer:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[6:])


def texts(at_piece: threading.Barrier | None = None) -> list[tuple[str, set[str]]]:
    """Of each stream: its text, and the ids that its pieces bear."""
    got: list[tuple[str, set[str]]] = [("", set())] * NUM_STREAMS

    def ask(number: int) -> None:
        answer = events(post(asked(number, stream=True)))
        said = [next(answer)]
        if at_piece is not None:
            at_piece.wait(60)
            at_piece.wait(60)  # a replica is killed in between
        said += answer
        assert all("error" not in event for event in said), said
        assert all("token_ids" not in choice for event in said for choice in event["choices"])
        whole = "".join(choice["text"] for event in said for choice in event["choices"])
        got[number] = whole, {event["id"] for event in said}

    threads = [threading.Thread(target=ask, args=[number]) for number in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    if at_piece is not None:
        at_piece.wait(60)
        kill_one()
        at_piece.wait(60)
    for thread in threads:
        thread.join()
    return got


def replica_actors() -> list[Any]:
    from ray.util.state import list_actors

    found = list_actors(filters=[("state", "=", "ALIVE")])
    return [one for one in found if "ModelReplica" in str(one.name)]


def kill_one() -> None:
    os.kill(replica_actors()[0].pid, signal.SIGKILL)


def test_both_nodes_have_a_replica_and_the_routes_are_openais(cluster: Cluster) -> None:
    assert len({one.node_id for one in replica_actors()}) == 2
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
    connection.request("GET", "/v1/models")
    told = json.loads(connection.getresponse().read())
    assert told["data"][0]["id"] == "demo-q8_0"
    refused = post({"prompt": "a", "max_tokens": -7})
    assert refused.status == 400
    assert "max_tokens" in json.loads(refused.read())["error"]["message"]


def test_streams_go_on_with_the_same_tokens_when_a_replica_is_killed(cluster: Cluster) -> None:
    expected = texts()
    assert all(text for text, _ in expected)
    got = texts(threading.Barrier(NUM_STREAMS + 1))
    assert [text for text, _ in got] == [text for text, _ in expected]
    assert all(len(ids) == 1 for _, ids in got), "a client sees one answer"
    whole = json.loads(post(asked(3)).read())
    assert whole["choices"][0]["text"] == expected[3][0]


def test_a_replica_that_is_to_go_ends_what_is_open_there(cluster: Cluster) -> None:
    expected = texts()
    got: list[list[tuple[str, set[str]]]] = []
    asking = threading.Thread(target=lambda: got.extend(texts() for _ in range(4)))
    asking.start()
    deploy(min_replicas="1", max_replicas="1")
    asking.join()
    assert [[text for text, _ in some] for some in got] == [[text for text, _ in expected]] * 4
    wait_for(1)


def test_a_load_brings_another_replica(cluster: Cluster) -> None:
    deploy(min_replicas="1", max_replicas="2")
    wait_for(1)
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            texts()

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        wait_for(2)
    finally:
        is_over.set()
        asking.join()


def wait_for(num: int) -> None:
    stop = time.monotonic() + 120
    while len(replica_actors()) != num:
        assert time.monotonic() < stop, replica_actors()
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"model": "m", "replicas": "2"}, "settings are model, options"),
        ({}, "missing required field `model`"),
        ({"model": "m", "min_replicas": "3", "max_replicas": "2"}, "min_replicas is 3"),
    ],
)
def test_settings_that_are_wrong_are_refused_in_one_line(given: dict[str, str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        application(given)
