"""Several models behind one server that is a process, and a disk cache that outlives it."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from outside.served import Served, serving

from hypocenter.base.package import bundled_model

KEY = {"Authorization": "Bearer key-of-the-admin"}
PROMPT = "def count_words(text):\n    # counts the words of a text, and returns how many\n" * 3


def complete(served: Served, model: str, headers: dict[str, str] | None = None) -> Any:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    reply = served.post("/v1/completions", body, headers=headers)
    assert reply.status == 200, reply.body
    return reply.json


def states(served: Served) -> dict[str, str]:
    return {one["id"]: one["status"]["value"] for one in served.get("/v1/models").json["data"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (models := tmp_path / "models").mkdir()
    for name in ("a", "b", "c"):
        shutil.copyfile(bundled_model(), models / f"{name}.gguf")
    (models / "junk.gguf").write_bytes(b"no model at all")
    return models


@pytest.mark.tier("sim")
def test_models_come_and_go_and_a_death_is_of_one(folder: Path, tmp_path: Path) -> None:
    words = ("--models-dir", str(folder), "--models-max", "2", "--device", "cpu", "-c", "256")
    more = ("--admin-key", "key-of-the-admin", "--canary-minutes", "0")
    with serving(tmp_path, *words, *more) as served:
        assert set(states(served).values()) == {"unloaded"}
        expected = complete(served, "a")["choices"][0]["text"]
        assert complete(served, "b")["choices"][0]["text"] == expected
        assert states(served) == {"a": "loaded", "b": "loaded", "c": "unloaded", "junk": "unloaded"}
        refused = served.post("/v1/completions", {"model": "junk", "prompt": "a"})
        assert refused.status == 503
        assert "the model 'junk' cannot be loaded: " in refused.json["error"]["message"]
        assert states(served)["junk"] == "failed"
        complete(served, "b")
        pids = {name: worker_of(served, name) for name in "ab" if states(served)[name] == "loaded"}
        assert "b" in pids
        complete(served, "c")
        assert states(served)["c"] == "loaded"
        os.kill(worker_of(served, "c"), signal.SIGKILL)
        if states(served)["b"] == "loaded":
            assert worker_of(served, "b") == pids["b"]
        assert complete(served, "c")["choices"][0]["text"] == expected
        assert served.post("/models/unload", {"model": "c"}, headers=KEY).status == 200
        assert states(served)["c"] == "unloaded"
        text = served.get("/metrics").body.decode()
        assert 'hypocenter:worker_restarts_total{engine="0",model_name="c"} 1.0' in text
        assert 'hypocenter:worker_restarts_total{engine="0",model_name="b"} 0.0' in text
        assert 'hypocenter:model_load_failures_total{model_name="junk"} 1.0' in text


def worker_of(served: Served, name: str) -> int:
    pid = served.get(f"/debug/requests?model={name}", headers=KEY).json["worker_pid"]
    assert isinstance(pid, int)
    return pid


@pytest.mark.tier("sim")
def test_what_was_read_outlives_the_server_and_is_of_one_client(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    words = ("--device", "cpu", "-c", "512", "--disk-cache", str(cache), "--canary-minutes", "0")
    keys = ("--api-key", "one", "--api-key", "two")
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))

    def cached(answer: Any) -> int:
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    with serving(tmp_path, *words, *keys) as served:
        first = complete(served, "", one)
        assert cached(first) == 0
        until = time.monotonic() + 60
        while not list(cache.rglob("*.kv")):
            assert time.monotonic() < until, served.stderr
            complete(served, "", one)
        served.process.kill()  # with all its workers' memory
    with serving(tmp_path, *words, *keys) as served:
        again = complete(served, "", one)
        assert cached(again) >= 16
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        assert cached(complete(served, "", two)) == 0
        text = served.get("/metrics", headers=one).body.decode()
        assert 'hypocenter:disk_cache_blocks_read_total{engine="0"' in text
