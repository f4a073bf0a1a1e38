"""Who may ask, see and cancel what: the application alone, without network and worker."""

from __future__ import annotations

import asyncio
import hashlib
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hypocenter.server import app
from hypocenter.server.app import make_app
from hypocenter.server.faults import FaultKeeper
from hypocenter.server.generation import AnswerOrder, Generation
from hypocenter.server.hosting.host import Host
from hypocenter.server.hosting.hosting import Hosting
from hypocenter.server.hosting.terms import ModelTerms
from hypocenter.server.inquiry import Inquiry
from hypocenter.server.intake.bodies import Bodies
from hypocenter.server.openapi import document
from hypocenter.server.routes import Service
from hypocenter.settings.config import EngineConfig, SamplingParams
from hypocenter.wire.messages import Accepted, Ending, Piece, ServedModel

FACTS = ServedModel(
    name="m", architecture="llama", quantisation="Q8_0", num_parameters=1, file_bytes=1,
    context_length=64, trained_length=64, vocab_size=9, bos_id=1, eos_id=2, bos_text="",
    eos_text="", chat_template="", device="cpu", instruction_set="", max_requests=2,
    block_size=16, num_blocks=4, step_tokens=512, longest_token_bytes=8,
)  # fmt: skip
PATH = "/home/someone/models/m.gguf"


def hosting_of(service: Service) -> Hosting:
    """The one model of a service, which is loaded."""
    terms = ModelTerms(path=PATH, names=service.names, engine=EngineConfig())
    host = Host(terms, service, lambda: service.supervisor)
    host.state = "loaded"
    return Hosting([host], loads_on_demand=False)


class Fake:
    """A supervisor with two generations, and a service around it."""

    def __init__(self, **more: Any) -> None:
        self.facts, self.has_given_up, self.is_ready = FACTS, False, True
        self.replicas = [SimpleNamespace()]  # one, of which nothing is told
        self.ended_early: list[str] = []
        self.of_clients = [self._generation(1, "cmpl-one"), self._generation(2, "cmpl-two")]
        self.num_left = self.num_questions = 0
        self.held: list[int] = []
        self.num_left = self.num_questions = 0
        metrics = SimpleNamespace(count=lambda what: None, note=lambda *_: None)
        faults = FaultKeeper(None, lambda: None)
        self.service = Service(
            cast(Any, self), cast(Any, metrics), ("m",), PATH, 1000, 4, Bodies(10_000), faults
        )
        self.app = make_app(hosting_of(self.service), **more)

    def _generation(self, number: int, name: str) -> Any:
        return SimpleNamespace(
            id=number, name=name, prompt_ids=(5, 6), output_ids=[7], is_done=False
        )

    def next_id(self) -> int:
        return 1

    def end_early(self, generation: Any) -> None:
        self.ended_early.append(generation.name)

    def submit(self, generation: Generation) -> None:
        """Take a request, note what bodies hold from then on, and answer."""

        def answer() -> None:
            self.held.append(self.service.bodies.num_bytes)
            generation.take(Piece(1, "b", (7,), ending=Ending("stop")))

        self.held.append(self.service.bodies.num_bytes)
        generation.take(Accepted(1))
        asyncio.get_running_loop().call_later(0.05, answer)

    def open(self, name: str, client: str) -> None:
        """A request of that client, which runs."""
        params = SamplingParams(seed=1)
        self.service.open[name] = Inquiry(cast(Any, self), name, AnswerOrder(["a"], params))
        self.service.clients[name] = client

    def ask(self, method: str, path: str, *headers: tuple[str, str], peer: str = "127.0.0.1",
            body: list[bytes] | None = None, query: str = "") -> tuple[int, Any]:  # fmt: skip
        """Status and JSON of an answer; each part of `body` that is read leaves the list."""
        sent: list[Any] = []
        parts = body if body is not None else [b""]

        async def receive() -> Any:
            if not parts:
                await asyncio.sleep(60)  # the client stays connected
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        async def send(message: Any) -> None:
            sent.append(message)
            self.client = scope["state"].get("client")

        named = [(name.lower().encode(), value.encode()) for name, value in headers]
        if not any(name == b"host" for name, _ in named):
            named.append((b"host", b"localhost"))
        scope: dict[str, Any] = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(),
            "query_string": query.encode(), "headers": named, "client": (peer, 9), "server": None,
            "scheme": "http", "http_version": "1.1", "root_path": "", "state": {},
        }  # fmt: skip
        asyncio.run(self.app(scope, receive, send))
        data = b"".join(message.get("body", b"") for message in sent)
        is_json = (b"content-type", b"application/json") in sent[0]["headers"]
        return sent[0]["status"], json.loads(data) if is_json else data


def bearer(key: str) -> tuple[str, str]:
    return "Authorization", f"Bearer {key}"


@pytest.fixture
def keyed() -> Fake:
    return Fake(api_keys=["one", "two"], admin_key="boss")


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (bearer("one"), 200), (("Authorization", "bearer two"), 200), (("x-api-key", "one"), 200),
        (bearer("boss"), 200), (("Authorization", "one"), 401),
        (("Authorization", "Basic one"), 401), (bearer("three"), 401), (bearer(""), 401),
        (("Authorization", "Bearer"), 401),
        (("Authorization", ""), 401), (("Authorization", "Bearerone"), 401),
    ],
)  # fmt: skip
def test_a_key_comes_as_a_bearer_or_by_its_own_header(
    keyed: Fake, header: tuple[str, str], status: int
) -> None:
    assert keyed.ask("GET", "/version", header)[0] == status


def test_the_document_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counting(*given: Any) -> Any:
        made.append(given)
        return document(*given)

    monkeypatch.setattr(app, "document", counting)
    paths = [f"/{number}" for number in range(2)]
    for path in paths:
        fake = Fake(root_path=path)
        for _ in range(3):
            status, told = fake.ask("GET", "/openapi.json")
            assert (status, told["servers"]) == (200, [{"url": path}])
    assert [given[2] for given in made] == paths


def test_the_document_tells_of_what_stands_behind_an_address() -> None:
    paths = document(app.TABLE, "1")["paths"]
    number, action, model = paths["/slots/{number}"]["post"]["parameters"]
    assert [one["in"] for one in (number, action, model)] == ["path", "query", "query"]
    assert action["required"]
    assert action["schema"] == {"type": "string", "enum": ["save", "restore", "erase"]}
    assert (model["name"], model["required"]) == ("model", False)
    assert "parameters" not in paths["/version"]["get"]


def test_a_client_is_known_by_its_key_or_by_its_address(keyed: Fake) -> None:
    keyed.ask("GET", "/version", bearer("one"))
    assert keyed.client == hashlib.sha256(b"one").hexdigest()
    open_to_all = Fake()
    open_to_all.ask("GET", "/version", bearer("one"), peer="192.0.2.1")
    assert open_to_all.client == "192.0.2.1"


def test_a_request_is_its_own_keys_affair(keyed: Fake) -> None:
    keyed.open("cmpl-one", hashlib.sha256(b"one").hexdigest())
    for key, status in (("two", 404), ("one", 200), ("boss", 200)):
        assert keyed.ask("GET", "/v1/requests/cmpl-one", bearer(key))[0] == status
        assert keyed.ask("POST", "/v1/requests/cmpl-one/cancel", bearer(key))[0] == status
    assert len(keyed.ended_early) == 2
    unknown = keyed.ask("GET", "/v1/requests/cmpl-xyz", bearer("two"))[1]["error"]
    others = keyed.ask("GET", "/v1/requests/cmpl-one", bearer("two"))[1]["error"]
    assert others == {**unknown, "message": unknown["message"].replace("xyz", "one")}
    keyed.service.remember(keyed.service.open["cmpl-one"], "cancelled")
    for key, status in (("two", 404), ("one", 200), ("boss", 200)):
        assert keyed.ask("GET", "/v1/requests/cmpl-one", bearer(key))[0] == status
        assert keyed.ask("POST", "/v1/requests/cmpl-one/cancel", bearer(key))[0] == status


def test_without_keys_the_id_is_the_key() -> None:
    fake = Fake()
    fake.open("cmpl-one", "192.0.2.1")
    assert fake.ask("POST", "/v1/requests/cmpl-one/cancel")[0] == 200
    assert fake.ask("GET", "/v1/requests/cmpl-two")[0] == 404


def test_clients_are_forgotten_with_their_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hypocenter.server.routes._MAX_REMEMBERED", 2)
    fake = Fake()
    for number in range(5):
        fake.open(f"cmpl-{number}", "a")
        fake.service.remember(fake.service.open[f"cmpl-{number}"], "completed")
    assert set(fake.service.clients) == set(fake.service.ended) == {"cmpl-3", "cmpl-4"}


def test_slots_show_a_client_its_own_requests(keyed: Fake) -> None:
    keyed.service.clients["cmpl-one"] = hashlib.sha256(b"one").hexdigest()
    for key, ids in (("one", [1, -1]), ("two", [-1, -1]), ("boss", [1, 2])):
        slots = keyed.ask("GET", "/slots", bearer(key))[1]
        assert [slot["id_task"] for slot in slots] == ids
        assert [slot["n_prompt_tokens"] for slot in slots] == [2 * (number > 0) for number in ids]
        assert all(slot["is_processing"] for slot in slots)
    assert [slot["id_task"] for slot in Fake().ask("GET", "/slots")[1]] == [1, 2]


def test_where_the_model_lies_is_for_the_admin_or_where_there_are_no_keys(keyed: Fake) -> None:
    for key, path in (("one", "m.gguf"), ("boss", PATH)):
        assert keyed.ask("GET", "/props", bearer(key))[1]["model_path"] == path
    assert Fake().ask("GET", "/props")[1]["model_path"] == PATH


def test_pages_and_names_are_looked_at_before_keys_and_routes() -> None:
    local = Fake(is_local=True, allowed_hosts=["llm.example.com"], cors_origins=["https://a.b"])
    paths = ("/version", "/props", "/nothing", "/v1/models", "/debug/requests")
    for path in paths:
        assert local.ask("GET", path, ("Host", "evil.example"))[0] == 403
        assert local.ask("GET", path, ("Origin", "http://evil.example"))[0] == 403
    assert local.ask("GET", "/version", ("Host", "llm.example.com"))[0] == 200
    status, answer = local.ask("POST", "/v1/completions", ("Sec-Fetch-Site", "cross-site"))
    assert (status, answer["error"]["code"]) == (403, "cross_site")
    # Who checks its health may call it by an address that it does not know.
    health = ("Host", "10.1.2.3:8080")
    local.service.supervisor.seconds_in_step = lambda: None  # type: ignore[method-assign]
    assert local.ask("GET", "/health", health)[0] == 200
    assert local.ask("GET", "/health", ("Origin", "http://evil.example"))[0] == 403


def test_pages_that_are_allowed_still_ask_beforehand() -> None:
    fake = Fake(is_local=True, cors_origins=["https://a.b"], api_keys=["one"])
    asked = (("Access-Control-Request-Method", "POST"), ("Sec-Fetch-Site", "cross-site"))
    assert fake.ask("OPTIONS", "/v1/completions", ("Origin", "https://a.b"), *asked)[0] == 200
    assert fake.ask("OPTIONS", "/v1/completions", ("Origin", "https://c.d"), *asked)[0] == 403


# -- bodies ----------------------------------------------------------------------------------------


def test_no_body_is_read_when_there_is_no_room() -> None:
    fake = Fake()
    fake.service.max_open = 0
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = [b"{}"]
        status, answer = fake.ask("POST", path, body=body)
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        assert body == [b"{}"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_body_counts_until_the_worker_has_taken_it(*, stream: bool) -> None:
    fake = Fake()
    body = [json.dumps({"prompt": "a", "stream": stream}).encode()]
    num_bytes = len(body[0])
    assert fake.ask("POST", "/v1/completions", body=body)[0] == 200
    before, after = fake.held
    assert before > num_bytes
    assert after == 0
    assert fake.service.bodies.num_bytes == 0


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize",
             "/apply-template"],
)  # fmt: skip
def test_bodies_are_read_within_their_limits_and_forgotten(path: str) -> None:
    fake = Fake()
    body = [b" " * 400] * 5
    status, answer = fake.ask("POST", path, body=body)
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    assert len(body) == 2
    fake.service.bodies = Bodies(1000)
    body = [b" " * 400] * 5
    status, answer = fake.ask("POST", path, body=body)
    assert (status, answer["error"]["code"]) == (429, "bodies_full")
    assert len(body) == 3
    assert fake.service.bodies.num_bytes == 0
    fake.service.max_body_bytes = fake.service.bodies.max_bytes = 1 << 20
    status, answer = fake.ask("POST", path, body=[b"[" * 70_000, b"never read"])
    assert (status, answer["error"]["code"]) == (400, "body_too_complex")
    assert fake.service.bodies.num_bytes == 0
    assert fake.ask("POST", path, body=[b'{"model": "x"}'])[0] in (400, 404)
    big = b'{"new": "' + b"a" * (1 << 20)
    fake.service.max_body_bytes = fake.service.bodies.max_bytes = 1 << 30
    status, answer = fake.ask("POST", path, body=[big, b'"}'])
    assert (status, answer["error"]["param"]) == (400, "new")
