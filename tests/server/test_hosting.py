"""Several models behind one server: who is loaded, who goes, who waits. Models are pretended."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import msgspec
import pytest
from test_strangers import FACTS

from hypocenter import EngineConfig
from hypocenter.base.errors import ModelTooLarge, UsageError
from hypocenter.server.api_error import ApiError
from hypocenter.server.app import make_app
from hypocenter.server.faults import FaultKeeper
from hypocenter.server.fleet.replica import CannotStart
from hypocenter.server.hosting import hosting as hosting_module
from hypocenter.server.hosting.host import Host
from hypocenter.server.hosting.hosting import Hosting
from hypocenter.server.hosting.terms import ModelTerms, require_own_names
from hypocenter.server.intake.bodies import Bodies
from hypocenter.server.routes import Service

TOO_LARGE = CannotStart(1, "it does not fit", (), ModelTooLarge.__name__)


class PretendedSupervisor:
    """Loads in no time, or fails as it is told; `log` hears of both ends."""

    def __init__(self, name: str, log: list[str], errors: dict[str, list[Exception]]) -> None:
        self._name, self._log, self._errors = name, log, errors
        self.facts: Any = None
        self.has_given_up = self.is_stopped = False
        self.num_left = self.num_questions = 0
        self.replicas: tuple[Any, ...] = ()

    @property
    def is_ready(self) -> bool:
        return self.facts is not None

    async def start(self) -> None:
        await asyncio.sleep(0)
        if errors := self._errors[self._name]:
            raise errors.pop(0)
        self.facts = msgspec.structs.replace(FACTS, name=self._name)
        self._log.append(f"+{self._name}")

    async def stop(self, seconds: float, reason: str = "") -> None:
        assert not self.is_stopped, "ended twice"
        self.is_stopped = True
        if self.facts is not None:
            self._log.append(f"-{self._name}")

    def fail_all(self, reason: str) -> None:
        pass

    def seconds_in_step(self) -> float | None:
        return None


class House:
    """A server of models that are called as in `names`; `log` has who came and went."""

    folder: ClassVar[Path]

    def __init__(self, *names: str, max_loaded: int = 0, **terms: dict[str, Any]) -> None:
        self.log: list[str] = []
        self.errors: dict[str, list[Exception]] = {name: [] for name in names}
        self.counted: list[str] = []
        first: Service | None = None
        hosts = []
        for name in names:
            own = terms.get(name, {})
            (path := self.folder / f"{name}.gguf").write_bytes(b"GGUF")
            given: dict[str, Any] = {"path": str(path), **own}
            given.setdefault("engine", EngineConfig(device="cpu"))
            one = ModelTerms(**given)
            make = self._maker(name)
            metrics: Any = SimpleNamespace(
                count=lambda what, replica=None: self.counted.append(what),
                follow=lambda supervisor: None,
                text=lambda: b"",
            )
            if first is None:
                faults = FaultKeeper(None, lambda: None)
                service = first = Service(
                    cast(Any, make()), metrics, one.all_names, one.path, 1000, one.num_open,
                    Bodies(100_000), faults,
                )  # fmt: skip
            else:
                service = first.beside(
                    cast(Any, make()), metrics, one.all_names, one.path, one.num_open
                )
            hosts.append(Host(one, service, cast(Any, make)))
        assert first is not None
        self.hosting = Hosting(hosts, max_loaded)
        self.app = make_app(self.hosting, admin_key="boss")

    def _maker(self, name: str) -> Callable[[], PretendedSupervisor]:
        return lambda: PretendedSupervisor(name, self.log, self.errors)

    def host(self, name: str) -> Host:
        return next(host for host in self.hosting.hosts if name in host.terms.all_names)

    async def ask(self, name: str) -> Client:
        """A request for that model, which is served until `end`."""
        client = Client()
        client.service = await self.hosting.choose(client.request, name)
        return client

    async def http(self, method: str, path: str, body: Any = None, key: str = "boss") -> Any:
        """Status and JSON of what the application answers."""
        sent: list[Any] = []
        parts = [b"" if body is None else msgspec.json.encode(body)]

        async def receive() -> Any:
            if not parts:
                await asyncio.sleep(60)
            return {"type": "http.request", "body": parts.pop(0), "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        path, _, query = path.partition("?")
        headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {key}".encode())]
        scope: dict[str, Any] = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(),
            "query_string": query.encode(), "headers": headers, "client": ("127.0.0.1", 9),
            "server": None, "scheme": "http", "http_version": "1.1", "root_path": "", "state": {},
        }  # fmt: skip
        await self.app(scope, receive, send)
        data = b"".join(message.get("body", b"") for message in sent)
        return sent[0]["status"], msgspec.json.decode(data)


@pytest.fixture(autouse=True)
def files_of_models(tmp_path: Path) -> None:
    """Have each model lie in a file that begins as one."""
    House.folder = tmp_path / "models"
    House.folder.mkdir()


class Client:
    """A request, and what is done when it has been answered."""

    def __init__(self) -> None:
        self._at_the_end: list[Callable[[], None]] = []
        self.service: Any = None
        state = SimpleNamespace(until_answered=self)
        self.request: Any = SimpleNamespace(state=state)

    def callback(self, work: Callable[..., None], *given: Any) -> None:
        self._at_the_end.append(lambda: work(*given))

    def end(self) -> None:
        for work in self._at_the_end:
            work()


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await work()

    asyncio.run(bounded())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_model_is_loaded_once_for_all_that_ask_at_once() -> None:
    async def work() -> None:
        house = House("a", "b")
        assert house.log == []
        found = await asyncio.gather(*(house.ask("a") for _ in range(5)))
        assert house.log == ["+a"]
        assert {one.service.facts.name for one in found} == {"a"}
        assert (await house.ask("b")).service.facts.name == "b"
        assert house.log == ["+a", "+b"], "there is room for both"

    run(work)


def test_the_one_used_longest_ago_makes_room() -> None:
    async def work() -> None:
        house = House("a", "b", "c", max_loaded=2)
        for name in ("a", "b", "a", "c"):
            (await house.ask(name)).end()
        assert house.log == ["+a", "+b", "-b", "+c"]
        assert house.host("b").state == "unloaded"

    run(work)


def test_who_answers_somebody_goes_when_that_has_ended_and_both_get_their_turn() -> None:
    async def work() -> None:
        house = House("a", "b", max_loaded=1)
        first = await house.ask("a")
        for_b = asyncio.create_task(house.ask("b"))
        await settle()
        assert house.log == ["+a"], "its answer is not ended for another model"
        again = asyncio.create_task(house.ask("a"))
        await settle()
        assert not again.done(), "nothing new, or b would never have its turn"
        first.end()
        b = await for_b
        assert house.log == ["+a", "-a", "+b"]
        assert not again.done()
        b.end()
        (await again).end()
        assert house.log == ["+a", "-a", "+b", "-b", "+a"]
        assert [(host.num_held, host.num_served) for host in house.hosting.hosts] == [(0, 0)] * 2

    run(work)


def test_a_pinned_model_never_goes() -> None:
    async def work() -> None:
        house = House("a", "b", max_loaded=1, a={"is_pinned": True, "idle_seconds": 1e-6})
        looking = asyncio.create_task(house.hosting.run())
        await settle()
        assert house.log == ["+a"], "it is loaded at the start"
        with pytest.raises(ApiError, match="no room for b: a are pinned"):
            await house.ask("b")
        await asyncio.sleep(hosting_module._LOOK_SECONDS * 1.5)
        looking.cancel()
        assert house.log == ["+a"]

    run(work)


def test_a_model_that_nobody_asks_is_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting_module, "_LOOK_SECONDS", 0.01)

    async def work() -> None:
        house = House("a", "b", a={"idle_seconds": 0.05})
        looking = asyncio.create_task(house.hosting.run())
        one = await house.ask("a")
        (await house.ask("b")).end()
        await asyncio.sleep(0.2)
        assert house.log == ["+a", "+b"], "it answers somebody"
        one.end()
        while house.log == ["+a", "+b"]:
            await asyncio.sleep(0.01)
        assert house.log == ["+a", "+b", "-a"], "b was to stay"
        looking.cancel()

    run(work)


def test_a_model_that_fails_is_told_in_one_line_and_hurts_no_other() -> None:
    async def work() -> None:
        house = House("a", "b")
        busy = await house.ask("b")
        house.errors["a"] = [CannotStart(1, "a.gguf is no GGUF file:\n it begins with MZ")]
        for _ in range(2):
            with pytest.raises(ApiError) as caught:
                await house.ask("a")
            expected = "the model 'a' cannot be loaded: a.gguf is no GGUF file: it begins with MZ"
            assert (caught.value.status, caught.value.message) == (503, expected)
        assert house.counted.count("load_failed") == 1, "the same file is not tried at once"
        assert house.log == ["+b"]
        assert house.host("b").service is busy.service
        assert [host.num_held for host in house.hosting.hosts] == [2, 1], "until it is answered"
        await house.hosting.load("a")  # whoever has the admin key may try at once
        assert house.log == ["+b", "+a"]

    run(work)


def test_nobody_makes_room_for_what_is_no_model(tmp_path: Path) -> None:
    async def work() -> None:
        (path := tmp_path / "a.gguf").write_bytes(b"MZ")
        house = House("a", "b", max_loaded=1, a={"path": str(path)})
        (await house.ask("b")).end()
        with pytest.raises(ApiError, match="begins with b'MZ', but a GGUF file with b'GGUF'"):
            await house.ask("a")
        path.unlink()
        with pytest.raises(ApiError, match=r"a.gguf: No such file"):
            await house.ask("a")
        assert house.log == ["+b"]
        path.write_bytes(b"GGUF")
        (await house.ask("a")).end()
        assert house.log == ["+b", "-b", "+a"]

    run(work)


def test_others_go_where_memory_is_short_but_for_no_other_error() -> None:
    async def work() -> None:
        house = House("a", "b", "c")
        (await house.ask("a")).end()
        (await house.ask("b")).end()
        house.errors["c"] = [TOO_LARGE]
        (await house.ask("c")).end()
        assert house.log == ["+a", "+b", "-a", "+c"]
        house.errors["a"] = [CannotStart(1, "damaged", (), "BadModelFile")]
        with pytest.raises(ApiError, match="damaged"):
            await house.ask("a")
        assert house.log == ["+a", "+b", "-a", "+c"]
        house.errors["a"] = [TOO_LARGE] * 3
        with pytest.raises(ApiError, match="it does not fit"):
            await house.hosting.load("a")
        assert house.log[4:] == ["-b", "-c"], "alone it does not fit either"

    run(work)


def test_workers_that_end_for_good_leave_other_models_alone() -> None:
    async def work() -> None:
        house = House("a", "b")
        (await house.ask("a")).end()
        (await house.ask("b")).end()
        cast(Any, house.host("a").service.supervisor).has_given_up = True
        await house.hosting._look_at(house.host("a"), looks_at_file=False)
        assert house.host("a").state == "failed"
        assert house.log == ["+a", "+b", "-a"]
        assert await house.http("GET", "/health") == (200, {"status": "ok"})
        assert (await house.ask("b")).service.facts.name == "b"

    run(work)


def test_a_client_that_leaves_ends_neither_the_loading_nor_others() -> None:
    async def work() -> None:
        house = House("a", "b", max_loaded=1)
        first = await house.ask("b")
        leaving, staying = (asyncio.create_task(house.ask("a")) for _ in range(2))
        await settle()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        first.end()
        assert (await staying).service.facts.name == "a"
        assert house.host("a").num_served == 1

    run(work)


def test_no_more_wait_for_a_model_than_may() -> None:
    async def work() -> None:
        terms = {"engine": EngineConfig(device="cpu", max_batch_requests=1), "max_queued": 1}
        house = House("a", "b", max_loaded=1, a=terms)
        first = await house.ask("b")
        waiting = [asyncio.create_task(house.ask("a")) for _ in range(2)]
        await settle()
        with pytest.raises(ApiError, match="2 requests wait for a or are answered, at most 2"):
            await house.ask("a")
        first.end()
        await asyncio.gather(*waiting)

    run(work)


def test_a_file_that_changes_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        (path := tmp_path / "a.gguf").write_bytes(b"GGUF one")
        house = House("a", "b", a={"path": str(path)})
        (await house.ask("a")).end()
        host = house.host("a")
        host.look_at_file()
        assert not host.has_file_changed
        path.write_bytes(b"GGUF another one")
        for _ in range(3):
            host.look_at_file()
        assert (
            len([r for r in caplog.records if "has changed since a was loaded" in r.message]) == 1
        )
        card = house.hosting.card("a")
        assert card.status.file_changed
        await house.hosting.unload("a")
        await house.hosting.load("a")
        assert not house.hosting.card("a").status.file_changed
        os.unlink(path)
        host.look_at_file()
        assert host.has_file_changed

    run(work)


def test_routes_of_models(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        house = House("a", "b", a={"names": ("a", "short")})
        status, told = await house.http("GET", "/v1/models")
        assert status == 200
        assert [one["id"] for one in told["data"]] == ["a", "short", "b"]
        assert {one["status"]["value"] for one in told["data"]} == {"unloaded"}
        assert told["data"][0]["meta"] is None
        assert await house.http("POST", "/models/load", {"model": "short"}) == (
            200,
            {"success": True},
        )
        status, card = await house.http("GET", "/v1/models/a")
        assert (card["status"]["value"], card["max_model_len"]) == ("loaded", 64)
        status, told = await house.http("POST", "/models/load", {"model": "c"})
        assert status == 404
        assert "name one of: a, short, b" in told["error"]["message"]
        status, told = await house.http("POST", "/models/unload", {"model": "a"}, key="guess")
        assert status == 401
        one = await house.ask("a")
        status, told = await house.http("POST", "/models/unload", {"model": "a"})
        assert (status, told["error"]["code"]) == (409, "model_in_use")
        status, told = await house.http("POST", "/models/unload", {"model": "a", "force": True})
        assert (status, house.log) == (200, ["+a", "-a"])
        one.end()
        status, card = await house.http("GET", "/v1/models/a")
        assert card["status"]["value"] == "unloaded"
        assert card["max_model_len"] == 64, "it is known still"
        status, told = await house.http("GET", "/props?model=b")
        assert (status, told["error"]["code"]) == (503, "model_not_loaded")
        assert house.log == ["+a", "-a"], "who looks loads nothing"
        for body, code in (({}, 400), ({"model": "c"}, 404), ({"model": 7}, 400)):
            status, told = await house.http("POST", "/v1/completions", {"prompt": "a", **body})
            assert status == code, told
        assert (await house.http("GET", "/ready"))[0] == 200
        assert house.host("a").num_held == 0

    run(work)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/api/embed", {"input": "a"}),
    ],
)
def test_routes_of_vectors_choose_a_model_too(path: str, body: dict[str, Any]) -> None:
    """The models of these tests write text, which is said once the right one is loaded."""

    async def work() -> None:
        house = House("a", "b")
        for name in ("b", "b:latest"):
            status, told = await house.http("POST", path, {"model": name, **body})
            assert status == 400, told
        assert house.log == ["+b"]
        status, told = await house.http("GET", "/api/tags")
        assert [(one["name"], bool(one["size"])) for one in told["models"]] == [
            ("a", False), ("b", True),
        ]  # fmt: skip
        status, told = await house.http("GET", "/api/ps")
        assert [one["name"] for one in told["models"]] == ["b"]
        status, told = await house.http("POST", path, {"model": "c", **body})
        assert (status, "name one of: a, b" in str(told)) == (404, True)

    run(work)


def test_a_server_that_ends_tells_who_waits_for_a_model() -> None:
    async def work() -> None:
        house = House("a", "b", max_loaded=1)
        await house.ask("a")
        waiting = asyncio.create_task(house.ask("b"))
        await settle()
        house.hosting.fail_all("the server is shutting down")
        with pytest.raises(ApiError, match="shutting down"):
            await waiting
        await house.hosting.stop(1)
        assert house.log == ["+a", "-a"]

    run(work)


def test_two_models_of_one_name_are_refused() -> None:
    engine = EngineConfig()
    a, b = (ModelTerms(path=path, engine=engine) for path in ("/x/m.gguf", "/y/m.gguf"))
    with pytest.raises(UsageError, match="two models have the name 'm', /x/m"):
        require_own_names([a, b])


def test_on_a_gpu_two_caches_of_no_given_size_are_in_each_others_way() -> None:
    def on(device: str, kv_tokens: int | None = None) -> ModelTerms:
        return ModelTerms(path="m", engine=EngineConfig(device=device, kv_tokens=kv_tokens))

    assert on("cuda").is_in_the_way_of(on("cuda:0"))
    assert on("cuda", 100).is_in_the_way_of(on("cuda:0"))
    assert not on("cuda", 100).is_in_the_way_of(on("cuda", 100))
    assert not on("cuda:1").is_in_the_way_of(on("cuda:0"))
    assert not on("cpu").is_in_the_way_of(on("cpu"))


def test_a_file_that_failed_is_tried_again_once_it_is_another(tmp_path: Path) -> None:
    async def work() -> None:
        (path := tmp_path / "a.gguf").write_bytes(b"GGUF half")
        house = House("a", "b", a={"path": str(path)})
        house.errors["a"] = [CannotStart(1, "it ends early")]
        with pytest.raises(ApiError, match="it ends early"):
            await house.ask("a")
        path.write_bytes(b"GGUF and all of it")
        assert (await house.ask("a")).service.facts.name == "a"

    run(work)


def test_a_request_whose_model_is_unloaded_by_force_is_to_try_again(tmp_path: Path) -> None:
    """It was chosen while it was loaded; its body came later."""
    faults = FaultKeeper(None, lambda: None)
    metrics: Any = SimpleNamespace()
    service = Service(
        cast(Any, SimpleNamespace(facts=None)), metrics, ("scores",), str(tmp_path), 1000, 4,
        Bodies(1000), faults,
    )  # fmt: skip
    with pytest.raises(ApiError, match="the model scores was unloaded meanwhile") as refused:
        _ = service.facts
    assert (refused.value.status, refused.value.retry) == (503, True)


def test_who_asks_for_a_model_to_be_loaded_waits_for_one_load() -> None:
    """Others may unload it again at once, and again: that is no reason to wait for ever."""

    async def work() -> None:
        house = House("a", "b")

        async def unload_at_once() -> None:
            while True:
                if house.host("a").is_loaded:
                    await house.hosting.unload("a", is_forced=True)
                await asyncio.sleep(0)

        unloading = asyncio.create_task(unload_at_once())
        try:
            await house.hosting.load("a")
        finally:
            unloading.cancel()
        assert house.log.count("+a") == 1

    run(work)
