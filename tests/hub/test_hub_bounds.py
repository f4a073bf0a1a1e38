"""What a hub sends has an end, and what links of a cache lead to is neither written nor removed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from outside.hub_lies import DATA, FILE, NAME, SHA256, LyingHub, honest_hub, lying_hub
from outside.loopback_hub import COMMIT

from hypocenter.base.errors import HubError, ModelNotFound
from hypocenter.hub import cached, download, listing
from hypocenter.hub.answers import Pace, Question, ask
from hypocenter.hub.find import find_model
from hypocenter.hub.names import HubName

REPOSITORY = "models--acme--tiny-GGUF"


@pytest.fixture
def world(tmp_path: Path) -> Path:
    return tmp_path / "world"


@pytest.fixture
def hub(world: Path) -> Iterator[LyingHub]:
    with lying_hub(world) as hub:
        hub.lie = honest_hub(0)
        yield hub


@pytest.fixture
def cache(world: Path) -> Path:
    return world / "a" / "b" / "hub"


def find(text: str = f"{NAME}:Q4_K_M") -> Path:
    return find_model(text, architectures=frozenset({"llama"}), is_newest=True)


# -- an end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_plain_server", [False, True])
@pytest.mark.parametrize("shape", ["endless", "endless chunks"])
def test_a_file_ends_one_byte_past_its_size(
    hub: LyingHub, world: Path, shape: str, is_plain_server: bool
) -> None:
    hub.lie.file.shape = shape
    with pytest.raises(
        HubError, match=rf"said {len(DATA)} bytes, and sends more; what came was rem"
    ):
        find(f"{hub.url}/{FILE}" if is_plain_server else f"{NAME}:Q4_K_M")
    left = [path for path in (world / "a" / "b").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in left) < 200, "an address and a version at most"


def test_a_list_has_a_bound(hub: LyingHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "LIST_SECONDS", 60.0)
    hub.lie.listing.shape = "endless chunks"
    with pytest.raises(HubError, match=r"answers with more than 1.00 MiB, which is no list"):
        find()
    assert hub.lie.num_sent < 32 << 20


@pytest.mark.parametrize("place", ["listing", "file"])
def test_nothing_that_is_compressed_is_taken(hub: LyingHub, place: str) -> None:
    getattr(hub.lie, place).head["Content-Encoding"] = "gzip"
    with pytest.raises(HubError, match=r"sends it compressed \('gzip'\), which was not asked for"):
        find()


@pytest.mark.parametrize("shape", ["drip", "dripped head", "hints"])
@pytest.mark.parametrize("place", ["listing", "file"])
def test_who_is_too_slow_is_left(
    hub: LyingHub, place: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte after the other, of the body or of a head, keeps any timeout of a client happy."""
    if place == "file":
        monkeypatch.setattr(download, "_PACE", Pace(0.6, 100))
    else:
        monkeypatch.setattr(listing, "LIST_SECONDS", 0.6)
    getattr(hub.lie, place).shape = shape
    with pytest.raises(
        HubError, match=r"is too slow: (no whole answer|less than 100 B) in 0.6 s; "
    ):
        find()


def test_what_came_slowly_is_gone_on_with(
    hub: LyingHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_PACE", Pace(0.6, 100))
    hub.lie.file.shape = "drip"
    with pytest.raises(HubError, match="is too slow"):
        find()
    partial = cache / REPOSITORY / "blobs" / f"{SHA256}{cached.INCOMPLETE}"
    assert DATA.startswith(partial.read_bytes())
    num_there = partial.stat().st_size
    assert num_there > 0
    hub.lie = honest_hub(0)
    assert find().read_bytes() == DATA
    assert hub.lie.starts == [num_there]


def test_tries_have_an_end(hub: LyingHub) -> None:
    """Each brings some bytes more, but not of worth."""
    hub.lie.file.shape = "early"
    with pytest.raises(HubError, match=r"ends after 2560 of 5120 bytes; try again, what came"):
        find()
    assert len(hub.lie.starts) == 2


@pytest.mark.parametrize("span", ["bytes 5-5119/5120", "bytes 0-5119/9999", "x", None])
def test_other_bytes_than_those_asked_for_are_not_taken(hub: LyingHub, span: str | None) -> None:
    hub.lie.file.status = 206
    hub.lie.file.head["Content-Range"] = span
    with pytest.raises(HubError, match=r"sends the bytes .*; 0-/5120 were asked for"):
        find()


def test_the_disk_is_watched(hub: LyingHub, monkeypatch: pytest.MonkeyPatch) -> None:
    frees = iter([9999, 10])
    usage = shutil._ntuple_diskusage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(9, 9, next(frees)))
    monkeypatch.setattr(download, "_ROOM_BYTES", 1)
    hub.lie.file.shape = "tiny chunks"
    with pytest.raises(HubError, match=r"are still to come, and the disk has 10 B free; `hypo mod"):
        find()


def test_no_answer_leaves_a_cookie(hub: LyingHub) -> None:
    hub.lie.listing.head["Set-Cookie"] = "a=\xe9\xe9; Path=/"
    find()
    assert find().read_bytes() == DATA


def test_no_answer_leads_away_from_https(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        assert request.url.scheme == "https"
        return httpx2.Response(302, headers={"Location": "http://example.org/x.gguf"})

    client = httpx2.Client(transport=httpx2.MockTransport(answer))
    monkeypatch.setattr("huggingface_hub.get_session", lambda: client)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    question = Question("x.gguf", "its server", "https://example.org/x.gguf", {})
    with (
        pytest.raises(HubError, match="its server leads away from HTTPS"),
        ask(question, Pace(9.0)),
    ):
        pass


# -- fields ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"siblings":[{"rfilename":5}]}', "`siblings[0].rfilename`"),
        (b'{"siblings":[{"rfilename":"a","size":"x"}]}', "`siblings[0].size`"),
        (b'{"siblings":[{"rfilename":"a","size":[1]}]}', "`siblings[0].size`"),
        (b'{"siblings":[{"rfilename":"a","size":1e999}]}', "out of range"),
        (b'{"siblings":[{"rfilename":"a","size":-1}]}', "`siblings[0].size`"),
        (b'{"siblings":[{"rfilename":"a","lfs":{"sha256":3}}]}', "`siblings[0].lfs.sha256`"),
        (b'{"gguf":5}', "`gguf`"),
        (b'{"gguf":{"architecture":[]}}', "`gguf.architecture`"),
        (b'{"sha":"../../../../victim/planted"}', "`sha`"),
        (b'{"cardData":' + b"[" * 100_000, "recursion"),
        (b'{"siblings":[' + b'{"rfilename":"a"},' * 20_000 + b'{"rfilename":"a"}]}', "<= 20000"),
        (b'{"a":"\xff"}', "no list of files"),
        (b'{"lastModified":5,"siblings":[]}', "`sha`"),
    ],
)
def test_each_field_of_a_list_is_told_by_name(hub: LyingHub, body: bytes, said: str) -> None:
    hub.lie.listing.body = body
    with pytest.raises(HubError) as raised:
        find()
    assert f"{NAME}:Q4_K_M: {hub.url} answered with no list of files: " in str(raised.value)
    assert said in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("name", ["a\\b", "../b", "a//b", "/b", "b\n", "b\0", "..\\b"])
def test_names_that_lead_elsewhere_are_passed_over(hub: LyingHub, name: str) -> None:
    listed = {"rfilename": f"{name}-Q4_0.gguf", "size": 1, "blobId": "b" * 40}
    hub.lie.listing.body = json.dumps({"sha": COMMIT, "siblings": [listed]}).encode()
    with pytest.raises(ModelNotFound, match="has no GGUF file"):
        find()


def test_parts_that_are_not_there_are_not_counted_out(
    hub: LyingHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these files says that it is one of very many."""
    monkeypatch.setattr(listing, "_MAX_LIST_BYTES", 64 << 20)
    files = [{"rfilename": f"{n}-00001-of-99999.gguf", "size": 1} for n in range(20_000)]
    hub.lie.listing.body = json.dumps({"sha": COMMIT, "siblings": files}).encode()
    begun = time.process_time()
    with pytest.raises(ModelNotFound, match="has no GGUF file"):
        find()
    assert time.process_time() - begun < 20, "counting to the end of each takes a minute"


# -- links ----------------------------------------------------------------------------------------


@pytest.fixture
def victim(world: Path, hub: LyingHub) -> Path:
    return world / "victim"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "place",
    [
        "", "blobs", "snapshots", "refs", f"snapshots/{COMMIT}",
        f"blobs/{SHA256}{cached.INCOMPLETE}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("target", ["", "kept", "planted"])
def test_nothing_is_written_through_a_link(
    cache: Path, victim: Path, place: str, target: str
) -> None:
    before = contents(victim)
    link = cache / REPOSITORY / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(victim / target)
    with pytest.raises(HubError, match=r"is a link or no f.*; nothing is written or removed thro"):
        find()
    assert contents(victim) == before
    assert link.is_symlink()


def test_a_file_with_two_names_is_not_written(cache: Path, victim: Path) -> None:
    partial = cache / REPOSITORY / "blobs" / f"{SHA256}{cached.INCOMPLETE}"
    partial.parent.mkdir(parents=True)
    partial.hardlink_to(victim / "kept")
    with pytest.raises(HubError, match="is a link or no file of its own"):
        find()
    assert (victim / "kept").read_bytes() == DATA[:1000]


@pytest.mark.parametrize("place", ["refs/main", f"snapshots/{COMMIT}/{FILE}", f"blobs/{SHA256}"])
def test_links_in_the_place_of_files_are_replaced(cache: Path, victim: Path, place: str) -> None:
    link = cache / REPOSITORY / place
    link.parent.mkdir(parents=True)
    link.symlink_to(victim / "kept")
    path = find()
    assert contents(victim) == {"kept": DATA[:1000], "kept.gguf": DATA}
    assert path.read_bytes() == DATA
    assert (cache / REPOSITORY / "refs/main").read_text() == COMMIT
    assert path.resolve() == cache / REPOSITORY / "blobs" / SHA256


@pytest.mark.parametrize("text", ["../../../victim", "", f"../snapshots/{COMMIT}", "x" * 40])
def test_a_branch_that_is_no_commit_is_not_followed(cache: Path, victim: Path, text: str) -> None:
    find()
    (cache / REPOSITORY / "refs/main").write_text(text)
    assert cached.snapshot_of(HubName(NAME)) is None


def test_a_pipe_is_not_waited_for(cache: Path, victim: Path) -> None:
    find()
    ref = cache / REPOSITORY / "refs/main"
    ref.unlink()
    os.mkfifo(ref)
    assert cached.snapshot_of(HubName(NAME)) is None
    assert find().read_bytes() == DATA
    assert ref.read_text() == COMMIT


def test_a_cache_for_reading_only_is_no_trouble(
    cache: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = find()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "read-only file system")

    for name in ("rename", "symlink", "unlink"):
        monkeypatch.setattr(os, name, refuse)
    assert find() == path


def test_a_cache_without_links_has_the_files_themselves(
    cache: Path, hub: LyingHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_SYMLINKS", True)
    path = find()
    assert (path.is_symlink(), path.read_bytes()) == (False, DATA)
    assert list((cache / REPOSITORY / "blobs").iterdir()) == []
    hub.lie.file.status = 500
    assert find() == path, "it is here, and not asked for again"
    assert cached.remove(HubName(NAME), None).num_bytes == len(DATA)


@pytest.mark.parametrize("is_absolute", [False, True])
def test_what_a_link_of_a_snapshot_leads_to_stays(
    cache: Path, victim: Path, is_absolute: bool
) -> None:
    snapshot = cache / REPOSITORY / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    target = victim / "kept.gguf"
    (snapshot / FILE).symlink_to(target if is_absolute else os.path.relpath(target, snapshot))
    removed = cached.remove(HubName(NAME), None)
    assert (removed.names, removed.num_bytes) == ([f"{NAME}:Q4_K_M"], 0)
    assert len(removed.left) == 1
    assert "kept.gguf stays: it is not in " in removed.left[0]
    assert contents(victim) == {"kept": DATA[:1000], "kept.gguf": DATA}
    assert not (cache / REPOSITORY).exists()


@pytest.mark.parametrize("place", ["", "snapshots", f"snapshots/{COMMIT}"])
def test_nothing_is_removed_behind_a_folder_that_is_a_link(
    cache: Path, victim: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_SYMLINKS", True)
    path = find()
    moved = victim / "moved"
    (cache / REPOSITORY / place).rename(moved)
    (cache / REPOSITORY / place).symlink_to(moved)
    with pytest.raises(
        HubError, match=rf"nothing of {NAME} was removed: .* is a link or no folder"
    ):
        cached.remove(HubName(NAME), None)
    assert path.read_bytes() == DATA


def test_a_blob_in_a_shared_store_stays(cache: Path, victim: Path) -> None:
    blob = find().resolve()
    store = cache / "blobs" / "43" / SHA256
    store.parent.mkdir(parents=True)
    blob.rename(store)
    blob.symlink_to(f"../../blobs/43/{SHA256}")
    removed = cached.remove(HubName(NAME), None)
    assert (removed.names, removed.num_bytes) == ([f"{NAME}:Q4_K_M"], 0)
    assert removed.left == [f"the bytes of {SHA256} stay: the blob was a link to a shared store"]
    assert store.read_bytes() == DATA


def test_what_cannot_be_removed_is_told(cache: Path, victim: Path) -> None:
    partial = cache / REPOSITORY / "blobs" / f"{SHA256}{cached.INCOMPLETE}"
    partial.mkdir(parents=True)
    (partial.parent.parent / "snapshots" / COMMIT).mkdir(parents=True)
    removed = cached.remove(HubName(NAME), None)
    assert removed.left == [f"{partial} stays: Is a directory"]
