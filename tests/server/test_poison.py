"""A request that kills its worker, each time anew, harms nobody else."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from outside.served import free_port, launched, texts

from faults.serving import planted_server
from faults.serving.planted_worker import Plant
from hypocenter import LLM, EngineConfig
from hypocenter.base.package import bundled_model

#: A token of the vocabulary that no prompt and no answer here has but the poison.
POISON_ID = 4000
NUM_OTHERS = 4


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with LLM(num_threads=1) as llm:
        answers = [
            llm.generate(prompt(n), temperature=1.0, seed=n, max_tokens=60) for n in range(8)
        ]
        assert all(
            POISON_ID not in (*a.token_ids, *llm.encode(prompt(n))) for n, a in enumerate(answers)
        )
        return [answer.text for answer in answers]


def prompt(number: int) -> str:
    return f"def read_{number}(path):\n"


@pytest.mark.tier("sim")  # `test_supervisor.py` has the rule, with pretended workers
def test_a_poison_is_quarantined_and_others_have_their_tokens(
    tmp_path: Path, expected: list[str]
) -> None:
    (tmp_path / "count").mkdir()
    plant = Plant(folder=str(tmp_path / "count"), num_planted=1000, poison_id=POISON_ID)
    order = planted_server.ServerOrder(
        model=str(bundled_model()),
        engine=EngineConfig(device="cpu", num_threads=1, max_batch_requests=8),
        port=free_port(),
        admin_key="boss",
        plant=msgspec.json.encode(plant).decode(),
    )
    got: dict[int, str] = {}
    failed: list[Any] = []

    def complete(number: int) -> None:
        body = {"prompt": prompt(number), "temperature": 1.0, "seed": number, "max_tokens": 60}
        with served.stream("/v1/completions", body) as stream:
            got[number] = texts(list(stream))

    with launched(tmp_path, planted_server.command(order), order.port) as served:
        served.wait_ready()
        threads = [threading.Thread(target=complete, args=[n]) for n in range(NUM_OTHERS)]
        for thread in threads:
            thread.start()
        poison = threading.Thread(
            target=lambda: failed.append(
                served.post("/v1/completions", {"prompt": [POISON_ID], "max_tokens": 5})
            )
        )
        poison.start()
        while poison.is_alive() and len([*Path(plant.folder).iterdir()]) < 2:
            time.sleep(0.01)  # the others come when the first worker has died
        threads += [threading.Thread(target=complete, args=[n]) for n in range(NUM_OTHERS, 8)]
        for thread in threads[NUM_OTHERS:]:
            thread.start()
        for thread in [*threads, poison]:
            thread.join()
        assert [got[number] for number in range(8)] == expected
        [reply] = failed
        assert reply.status == 500
        assert reply.json["error"]["code"] == "quarantined"
        metrics = served.get("/metrics").body.decode()
        assert re.search(r"^hypocenter:quarantined_requests_total\S* 1.0$", metrics, re.M)
        assert re.search(r"^hypocenter:faults_total\S* 3.0$", metrics, re.M)
        served.wait_ready()
        complete(0)
        assert got[0] == expected[0]
