"""`/slots/N?action=`: whose prompt is saved and restored, and where to. The worker is pretended."""

from __future__ import annotations

import asyncio
import hashlib
import json
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_strangers import Fake, bearer
from test_supervisor import FAULT, PretendedLife, life, make, run

from hypocenter import SamplingParams
from hypocenter.base.errors import UsageError
from hypocenter.server.fleet import slot_memory
from hypocenter.server.fleet.slot_memory import HeldPrompt, SlotMemory
from hypocenter.server.generation import Generation
from hypocenter.wire.messages import Failed, MovePrompt, PromptMoved

__all__ = ["life"]  # the fixture


class Moving(Fake):
    """A service whose worker moves prompts at once; `moved` has what it was asked."""

    def __init__(self, folder: Path, **more: Any) -> None:
        super().__init__(**more)
        self.service.slots = SlotMemory(folder, 2)
        self.moved: list[MovePrompt] = []
        self.told: Any = None
        self.replicas = [SimpleNamespace(number=0), SimpleNamespace(number=1)]

    async def move(self, replica: Any, message: MovePrompt) -> PromptMoved | Failed:
        self.moved.append(message)
        ids = (5, 6, 7) if message.action == "restore" else ()
        return self.told or PromptMoved(message.id, 16, 1000, ids)

    def ended(self, client: str, *ids: int, salt: str = "") -> None:
        """An answer of that client has ended."""
        one = Generation(1, "r", SamplingParams(), prompt=ids, cache_salt=salt, client=client)
        one.output_ids, one.replica = [9], 1
        assert self.service.slots is not None
        self.service.slots.note(one)

    def slot(self, path: str, *headers: tuple[str, str], **body: str) -> tuple[int, Any]:
        status, told = self.ask("POST", path, *headers, body=[json.dumps(body).encode()])
        return status, told

    def ask(self, method: str, path: str, *headers: tuple[str, str], **more: Any) -> Any:
        path, _, query = path.partition("?")
        return super().ask(method, path, *headers, query=query, **more)


def test_a_prompt_is_saved_restored_and_erased(tmp_path: Path) -> None:
    fake = Moving(tmp_path / "slots")
    assert stat.S_IMODE((tmp_path / "slots").stat().st_mode) == 0o700
    fake.ended("127.0.0.1", 1, 2)
    fake.ended("127.0.0.1", 3, 4)
    status, told = fake.slot("/slots/0?action=save", filename="a.bin")
    timing = told.pop("timings")
    assert (status, list(timing)) == (200, ["save_ms"])
    assert told == {"id_slot": 0, "filename": "a.bin", "n_saved": 16, "n_written": 1000}
    assert fake.slot("/slots/1?action=save", filename="b.bin")[0] == 200
    assert [one.token_ids for one in fake.moved] == [(3, 4, 9), (1, 2, 9)]
    assert fake.moved[0].path == str(tmp_path / "slots" / "a.bin")
    status, told = fake.slot("/slots/1?action=restore", filename="a.bin")
    assert (status, told["n_restored"], told["n_read"]) == (200, 16, 1000)
    assert fake.slot("/slots/1?action=erase") == (200, {"id_slot": 1, "n_erased": 16})
    assert fake.moved[-1].token_ids == (5, 6, 7), "those of the file"
    assert fake.slot("/slots/1?action=erase")[0] == 400, "it has nothing any more"
    assert fake.slot("/slots/0?action=erase")[0] == 200, "the other one is as it was"


def test_each_key_has_files_and_slots_of_its_own(tmp_path: Path) -> None:
    fake = Moving(tmp_path, api_keys=("one", "two"))
    first, second = (hashlib.sha256(key.encode()).hexdigest() for key in ("one", "two"))
    fake.ended(first, 1, 2, salt=f"{first}:mine")
    assert fake.slot("/slots/0?action=save", bearer("two"), filename="a")[0] == 400
    assert fake.slot("/slots/0?action=save", bearer("one"), filename="a")[0] == 200
    assert fake.slot("/slots/0?action=restore", bearer("two"), filename="a")[0] == 200
    saved, restored = fake.moved
    assert saved.path == str(tmp_path / first[:32] / "a")
    assert restored.path == str(tmp_path / second[:32] / "a")
    assert (saved.cache_salt, restored.cache_salt) == (f"{first}:mine", f"{second}:")


@pytest.mark.parametrize(
    "name", ["", "..", ".hidden", "a/b", "/etc/passwd", "a\0b", "ä", "x" * 101, "a b"]
)
def test_a_name_that_could_lead_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    fake = Moving(tmp_path)
    fake.ended("127.0.0.1", 1)
    status, told = fake.slot("/slots/0?action=save", filename=name)
    assert (status, told["error"]["param"]) == (400, "filename")
    assert fake.moved == []


def test_what_cannot_be_is_told(tmp_path: Path) -> None:
    fake = Moving(tmp_path)
    for path, said in (
        ("/slots/2?action=save", "from 0 to 1"),
        ("/slots/-1?action=save", "from 0 to 1"),
        ("/slots/0", "must be one of: save, restore, erase"),
        ("/slots/0?action=save", "slot 0 has nothing"),
    ):
        status, told = fake.slot(path, filename="a")
        assert status == 400
        assert said in told["error"]["message"]
    fake.told = Failed(1, "UsageError", "a is damaged; save it anew")
    status, told = fake.slot("/slots/0?action=restore", filename="a")
    assert (status, told["error"]["message"]) == (400, "a is damaged; save it anew")
    fake.service.slots = None
    status, told = fake.slot("/slots/0?action=save", filename="a")
    assert (status, told["error"]["code"]) == (400, "not_supported")


def test_a_folder_that_others_could_change_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(UsageError, match="--slot-save-path must be the user's own"):
        SlotMemory(tmp_path, 2)


def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_memory, "_MAX_TOKENS", 10)
    memory = SlotMemory(tmp_path, 2)
    for number in range(9):
        memory.put("ann", HeldPrompt((number,) * 3, "", 0))
    assert memory.get("ann", 1) == HeldPrompt((7, 7, 7), "", 0)
    assert memory.get("ann", 2) is None
    memory.put("bob", HeldPrompt((1,) * 5, "", 0))
    assert memory.get("ann", 0) is None, "who asked longest ago goes first"
    assert memory.get("bob", 0) is not None
    monkeypatch.setattr(slot_memory, "_MAX_CLIENTS", 1)
    memory.put("cy", HeldPrompt((1,), "", 0))
    assert memory.get("bob", 0) is None


def test_a_worker_that_dies_meanwhile_is_told_of(life: type[PretendedLife]) -> None:
    async def work() -> None:
        supervisor = make()
        message = MovePrompt(supervisor.next_id(), "save", "/tmp/a", (1,))
        told = await supervisor.move(supervisor.replicas[0], message)
        assert isinstance(told, Failed), "none is ready"
        await supervisor.start()
        [worker] = life.starts
        asking = asyncio.create_task(supervisor.move(supervisor.replicas[0], message))
        await asyncio.sleep(0)
        assert worker.sent == [message]
        worker.say(PromptMoved(message.id, 3))
        assert await asking == PromptMoved(message.id, 3)
        for said in (Failed(message.id, "UsageError", "no"), None):
            asking = asyncio.create_task(supervisor.move(supervisor.replicas[0], message))
            await asyncio.sleep(0)
            if said is not None:
                worker.say(said)
                assert await asking == said
        worker.die(FAULT)
        ended = await asking
        assert isinstance(ended, Failed)
        assert ended.message == "the worker ended meanwhile"
        await supervisor.stop(1)

    run(work())
