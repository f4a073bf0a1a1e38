"""Models are fetched from a hub on loopback that also breaks off, lies, damages and hangs."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session, file_download, scan_cache_dir, try_to_load_from_cache
from outside.loopback_hub import COMMIT, Hub, Repository, go_offline, running_hub, use

from hypocenter.base.errors import HubError, ModelNotFound
from hypocenter.hub import cached, listing
from hypocenter.hub.cached import Removed
from hypocenter.hub.find import find_model
from hypocenter.hub.names import FileAddress, HubName
from hypocenter.settings.cache_folder import private_folder

Q4, Q8 = os.urandom(300_000), os.urandom(500_000)
PARTS = [os.urandom(100_000) for _ in range(3)]
TINY = {
    "tiny-Q4_K_M.gguf": Q4,
    "tiny-Q8_0.gguf": Q8,
    **{f"BF16/tiny-BF16-{n:05}-of-00003.gguf": part for n, part in enumerate(PARTS, 1)},
    "README.md": b"hello",
}
NAME = "acme/tiny-GGUF"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with running_hub(plain__files=Repository({"a b.gguf": Q4})) as hub:
        hub.repositories[NAME] = Repository(dict(TINY))
        use(hub, tmp_path, monkeypatch)
        yield hub
    close_session()
    private_folder.cache_clear()


def find(text: str, said: list[str] | None = None, **more: Any) -> Path:
    say = (lambda text: None) if said is None else said.append
    return find_model(text, architectures=frozenset({"llama"}), say=say, **more)


def partial_files() -> list[Path]:
    return list(cached.repository_folder(NAME).rglob("*" + cached.INCOMPLETE))


def test_a_model_is_fetched_once_and_then_found(hub: Hub) -> None:
    shares: list[float] = []
    said: list[str] = []
    path = find(f"{NAME}:q4_k_m", said, progress=lambda what, share: shares.append(share))
    assert path.read_bytes() == Q4
    assert path.name == "tiny-Q4_K_M.gguf"
    assert said == [f"{NAME}: Q4_K_M (292.97 KiB), one of 6 files"]
    assert shares == [*sorted(shares[:-1]), 1.0]
    num_asked = len(hub.asked)
    assert find(f"{NAME}:Q4_K_M") == find(NAME) == path
    assert len(hub.asked) == num_asked, "nobody is asked for what is here"


def test_it_lies_where_other_tools_look(hub: Hub, tmp_path: Path) -> None:
    path = find(f"{NAME}:Q4_K_M")
    assert path == tmp_path / "hub" / "models--acme--tiny-GGUF" / "snapshots" / COMMIT / path.name
    assert path.is_symlink()
    assert path.resolve().name == hashlib.sha256(Q4).hexdigest()
    assert try_to_load_from_cache(NAME, path.name) == str(path)
    [repository] = scan_cache_dir(tmp_path / "hub").repos
    assert (repository.repo_id, repository.size_on_disk) == (NAME, len(Q4))


def test_what_another_tool_fetched_is_found(hub: Hub) -> None:
    path = file_download.hf_hub_download(NAME, "tiny-Q8_0.gguf")
    num_asked, said = len(hub.asked), list[str]()
    assert str(find(NAME, said)) == path
    assert len(hub.asked) == num_asked
    assert said == [f"{NAME}: Q8_0 (488.28 KiB), which is here; `hypo pull` asks for others"]


def test_all_parts_of_a_model_are_fetched(hub: Hub) -> None:
    path = find(f"{NAME}:bf16")
    assert path.name == "tiny-BF16-00001-of-00003.gguf"
    assert [one.read_bytes() for one in sorted(path.parent.iterdir())] == PARTS
    assert find(f"{NAME}:BF16") == path
    sorted(path.parent.iterdir())[1].unlink()
    assert find(f"{NAME}:BF16") == path, "what is missing is fetched again"
    assert len(list(path.parent.iterdir())) == 3


def test_a_stream_that_breaks_off_goes_on_where_it_was(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    monitored = logging.getLogger("huggingface_hub")
    monitored.addHandler(caplog.handler)
    hub.breaks_after, hub.num_breaks = 70_000, 3
    assert find(f"{NAME}:Q4_K_M").read_bytes() == Q4
    assert [span for _, span in hub.files_asked()] == [
        "",
        *(f"bytes={n * 70_000}-" for n in (1, 2, 3)),
    ]
    monitored.removeHandler(caplog.handler)
    assert caplog.text == "", "what a user sees is ours"


def test_so_does_a_process_that_comes_later(hub: Hub) -> None:
    hub.breaks_after, hub.num_breaks = 1000, 1
    interrupts = iter([KeyboardInterrupt])

    def progress(what: str, share: float) -> None:
        if share > 0:
            for error in interrupts:
                raise error

    with pytest.raises(KeyboardInterrupt):
        find(f"{NAME}:Q8_0", progress=progress)
    [partial] = partial_files()
    size = partial.stat().st_size
    hub.num_breaks = 0
    assert find(f"{NAME}:Q8_0").read_bytes() == Q8
    assert hub.files_asked()[-1][1] == (f"bytes={size}-" if size else "")
    assert partial_files() == []


def test_what_came_before_is_used(hub: Hub) -> None:
    blob = (
        cached.repository_folder(NAME)
        / "blobs"
        / (hashlib.sha256(Q8).hexdigest() + cached.INCOMPLETE)
    )
    blob.parent.mkdir(parents=True)
    blob.write_bytes(Q8[:400_000])
    assert find(f"{NAME}:Q8_0").read_bytes() == Q8
    assert [span for _, span in hub.files_asked()] == ["bytes=400000-"]


@pytest.mark.parametrize("left", [b"x" * 100, b"x" * 600_000])
def test_what_came_before_and_is_wrong_is_not_kept(hub: Hub, left: bytes) -> None:
    blob = (
        cached.repository_folder(NAME)
        / "blobs"
        / (hashlib.sha256(Q8).hexdigest() + cached.INCOMPLETE)
    )
    blob.parent.mkdir(parents=True)
    blob.write_bytes(left)
    if len(left) < len(Q8):
        with pytest.raises(HubError, match=r"its hub says .*; what came was removed; try again"):
            find(f"{NAME}:Q8_0")
    assert find(f"{NAME}:Q8_0").read_bytes() == Q8


def test_a_server_that_begins_anew_is_understood(hub: Hub) -> None:
    hub.breaks_after, hub.num_breaks, hub.ignores_range = 70_000, 1, True
    assert find(f"{NAME}:Q4_K_M").read_bytes() == Q4


def test_bytes_that_are_not_those_promised_are_removed(hub: Hub) -> None:
    hub.damages = True
    with pytest.raises(HubError) as raised:
        find(f"{NAME}:Q4_K_M")
    assert hashlib.sha256(Q4).hexdigest() in str(raised.value)
    assert cached.find_cached(HubName(NAME, "Q4_K_M")) is None
    assert partial_files() == []
    hub.damages = False
    assert find(f"{NAME}:Q4_K_M").read_bytes() == Q4


@pytest.mark.parametrize("num_said", [100, 900_000])
def test_a_hub_that_lies_about_sizes_is_told_of(hub: Hub, num_said: int) -> None:
    hub.size_said = num_said
    said = f"{NAME}/tiny-Q4_K_M.gguf: {hub.url} said {num_said} bytes, but sends 300000; try again"
    with pytest.raises(HubError, match=said):
        find(f"{NAME}:Q4_K_M")
    hub.size_said = None
    assert find(f"{NAME}:Q4_K_M").read_bytes() == Q4


def test_a_hub_that_gives_no_digest_of_use_is_told_of(hub: Hub) -> None:
    hub.sha256_said = "../../../evil"
    with pytest.raises(HubError, match=r"gives no digest of it, but '\.\./"):
        find(f"{NAME}:Q4_K_M")


def test_a_hub_that_hangs_is_left(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "LIST_SECONDS", 0.2)
    hub.hang_seconds = 1.0
    said = f"{NAME}:Q4_K_M: {hub.url} is too slow: no whole answer in 0.2 s"
    with pytest.raises(HubError, match=said):
        find(f"{NAME}:Q4_K_M")


def test_a_hub_that_is_not_there_is_told_of(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"http://127\.0\.0\.1:9 does not answer: .*refused"):
        find(f"{NAME}:Q4_K_M")


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'{"siblings": 3}', b"<html>"])
def test_a_hub_that_answers_nonsense_is_told_of(hub: Hub, body: bytes) -> None:
    hub.list_body = body
    with pytest.raises(ModelNotFound, match=r"no list of files|no GGUF file"):
        find(NAME)


def test_a_hub_in_trouble_is_told_of(hub: Hub) -> None:
    hub.status = 500
    with pytest.raises(HubError, match="answered with status 500; try again later"):
        find(NAME)


def test_a_wrong_name_is_answered_with_the_like(hub: Hub) -> None:
    with pytest.raises(HubError) as raised:
        find("someone/tiny-GGUF:Q4_K_M")
    assert f"{hub.url} has no model someone/tiny-GGUF, or it is private" in str(raised.value)
    assert f"like it are {NAME}; for a private one give HF_TOKEN" in str(raised.value)


@pytest.mark.parametrize("access", ["gated", "private"])
def test_a_token_lets_in(hub: Hub, access: str, monkeypatch: pytest.MonkeyPatch) -> None:
    says = {
        "gated": f"accepted its terms; accept them at {hub.url}/{NAME}, and give your token by HF_",
        "private": "or it is private, and no file here is called that; ",
    }
    hub.repositories[NAME].access = access
    with pytest.raises(HubError) as raised:
        find(f"{NAME}:Q4_K_M")
    assert says[access] in str(raised.value)
    assert "HF_TOKEN" in str(raised.value)
    monkeypatch.setenv("HF_TOKEN", "hf_letmein")
    assert find(f"{NAME}:Q4_K_M").read_bytes() == Q4


def test_offline_what_is_here_is_found_and_nothing_else(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = find(f"{NAME}:Q4_K_M")
    go_offline(monkeypatch, is_offline=True)
    assert find(NAME) == path
    with pytest.raises(HubError, match="Q8_0 is not here, and HF_HUB_OFFLINE forbids"):
        find(f"{NAME}:Q8_0")


def test_an_architecture_that_is_not_run_costs_no_download(hub: Hub) -> None:
    hub.repositories[NAME].architecture = "mamba3"
    with pytest.raises(ModelNotFound, match="'mamba3', which is not run here yet"):
        find(NAME)
    assert hub.files_asked() == []


def test_no_space_is_told_before_anything_comes(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 1000))
    with pytest.raises(
        HubError, match=r"292.97 KiB are to come, but .* has 1000 B free; `hypo models"
    ):
        find(f"{NAME}:Q4_K_M")
    assert hub.files_asked() == []


def test_the_hubs_newest_is_fetched_when_it_is_asked_for(hub: Hub) -> None:
    old = find(f"{NAME}:Q4_K_M")
    hub.repositories[NAME] = Repository({**TINY, "tiny-Q4_K_M.gguf": Q8}, commit="d" * 40)
    assert find(f"{NAME}:Q4_K_M") == old
    new = find(f"{NAME}:Q4_K_M", is_newest=True)
    assert (new.read_bytes(), old.read_bytes()) == (Q8, Q4)
    assert find(f"{NAME}:Q4_K_M") == new


def test_two_that_want_the_same_fetch_it_once(hub: Hub) -> None:
    hub.hang_seconds = 0.1
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(find(f"{NAME}:Q4_K_M"))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() for path in paths] == [Q4] * 3
    assert len(hub.files_asked()) == 1


def test_a_file_of_any_server_is_fetched_once(hub: Hub) -> None:
    hub.breaks_after, hub.num_breaks = 1000, 1
    path = find(f"{hub.url}/a%20b.gguf")
    assert (path.name, path.read_bytes()) == ("a b.gguf", Q4)
    num_asked = len(hub.asked)
    assert find(f"{hub.url}/a%20b.gguf") == path
    assert len(hub.asked) == num_asked
    with pytest.raises(HubError, match=r"status 404|404"):
        find(f"{hub.url}/other.gguf")


def test_files_may_come_from_another_host_which_gets_no_token(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_letmein")
    stored = {f"{hashlib.sha256(Q4).hexdigest()}.gguf": Q4}
    with running_hub(plain__files=Repository(stored)) as store:
        hub.store = store.url.replace("127.0.0.1", "localhost")
        store.breaks_after, store.num_breaks = 70_000, 1
        path = find(f"{NAME}:Q4_K_M")
    assert path.read_bytes() == Q4
    assert path.name == "tiny-Q4_K_M.gguf"
    assert [span for _, span in store.files_asked()] == ["", "bytes=70000-"]
    assert any("authorization" in headers for headers in hub.headers_seen)
    assert not any("authorization" in headers for headers in store.headers_seen)


@pytest.mark.parametrize(("version", "is_used"), [('"1"', True), ('"2"', False), ("", False)])
def test_what_came_of_another_version_is_not_gone_on_with(
    hub: Hub, version: str, is_used: bool
) -> None:
    """No digest would tell the mixture."""
    hub.version = '"1"'
    address = f"{hub.url}/a%20b.gguf"
    path = find(address)
    path.rename(path.with_name(path.name + cached.INCOMPLETE))
    partial = path.with_name(path.name + cached.INCOMPLETE)
    partial.write_bytes(Q4[:200_000])
    hub.version = version
    assert find(address).read_bytes() == Q4
    assert hub.files_asked()[-1][1] == ("bytes=200000-" if is_used else "")


def test_names_of_a_hub_lead_nowhere_else(hub: Hub) -> None:
    hub.repositories[NAME].files = {
        "../../evil-Q4_K_M.gguf": Q4, "/etc/x-Q8_0.gguf": Q4, "a\x1b[31m-Q5_0.gguf": Q4
    }  # fmt: skip
    with pytest.raises(ModelNotFound, match=f"{NAME} has no GGUF file"):
        find(NAME)


@pytest.mark.parametrize("name", ["ETag", "X-Linked-Etag", "X-Repo-Commit"])
@pytest.mark.parametrize("is_absolute", [False, True])
def test_no_header_of_an_answer_names_a_path(
    hub: Hub, tmp_path: Path, name: str, is_absolute: bool
) -> None:
    victim = tmp_path / "victim" / "planted"
    said = str(victim) if is_absolute else "../../../../victim/planted"
    hub.headers_said = {name: f'"{said}"' if name != "X-Repo-Commit" else said}
    path = find(f"{NAME}:Q4_K_M")
    assert not victim.parent.exists()
    assert path.read_bytes() == Q4
    assert path.parent.name == COMMIT
    assert path.resolve().name == hashlib.sha256(Q4).hexdigest()
    assert (tmp_path / "hub/models--acme--tiny-GGUF/refs/main").read_text() == COMMIT


# -- what is here ---------------------------------------------------------------------------------


def test_models_are_listed_and_removed_one_by_one(hub: Hub, tmp_path: Path) -> None:
    others = tmp_path / "own" / "models"
    for name in (f"{NAME}:Q4_K_M", f"{NAME}:BF16", f"{hub.url}/a%20b.gguf"):
        find(name)
    listed = {model.name: model.num_bytes for model in cached.cached_models(others)}
    assert listed == {
        f"{NAME}:Q4_K_M": len(Q4), f"{NAME}:BF16": 300_000, f"{hub.url}/a%20b.gguf": len(Q4)
    }  # fmt: skip
    assert cached.remove(HubName(NAME, "bf16"), others) == Removed([f"{NAME}:BF16"], 300_000, [])
    assert find(NAME).read_bytes() == Q4
    blobs = list((cached.repository_folder(NAME) / "blobs").iterdir())
    assert [blob.name for blob in blobs] == [hashlib.sha256(Q4).hexdigest()]
    assert cached.remove(HubName(NAME), others) == Removed([f"{NAME}:Q4_K_M"], len(Q4), [])
    assert not cached.repository_folder(NAME).exists()
    assert cached.remove(FileAddress(f"{hub.url}/a%20b.gguf"), others).num_bytes == len(Q4)
    assert cached.cached_models(others) == []
    with pytest.raises(ModelNotFound, match=f"{NAME} is not here"):
        cached.remove(HubName(NAME), others)


def test_what_several_revisions_have_is_here_once_and_goes_once(hub: Hub) -> None:
    old = find(f"{NAME}:Q4_K_M")
    hub.repositories[NAME].commit = "d" * 40
    new = find(f"{NAME}:Q4_K_M", is_newest=True)
    assert new.resolve() == old.resolve()
    assert len(cached.cached_models(None)) == 1
    assert cached.remove(HubName(NAME, "Q4_K_M"), None) == Removed([f"{NAME}:Q4_K_M"], len(Q4), [])
    assert not cached.repository_folder(NAME).exists()


def test_bytes_that_another_name_has_too_stay(hub: Hub) -> None:
    hub.repositories[NAME].files = {"a-Q4_0.gguf": Q4, "b-Q8_0.gguf": Q4}
    old, new = find(f"{NAME}:Q4_0"), find(f"{NAME}:Q8_0", is_newest=True)
    assert old.resolve() == new.resolve()
    assert cached.remove(HubName(NAME, "Q4_0"), None) == Removed([f"{NAME}:Q4_0"], 0, [])
    assert new.read_bytes() == Q4


def test_what_broke_off_goes_with_its_repository(hub: Hub) -> None:
    blob = cached.repository_folder(NAME) / "blobs" / ("0" * 64 + cached.INCOMPLETE)
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"12345")
    assert cached.cached_models(None) == []
    assert cached.remove(HubName(NAME), None) == Removed([], 5, [])
