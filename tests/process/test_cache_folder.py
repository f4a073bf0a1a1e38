"""Private folders of the cache, and digests with the key that lies there."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

_FOLDER = (
    "from hypocenter.settings.cache_folder import private_folder as f; print(*f('kernels'), end='')"
)
_DIGEST = "from hypocenter.record.keyed_digest import KeyedDigest as K; print(K(b'abc').text())"


def _python(program: str, cache: Path, umask: int = 0o022) -> str:
    """What a fresh process prints whose cache is there."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "HYPO_CACHE_DIR": str(cache)},
        capture_output=True, text=True, timeout=100, check=True, umask=umask,
    )  # fmt: skip
    return done.stdout.strip()


def test_a_folder_in_which_others_could_put_their_own_is_refused(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    for mode in (0o777, 0o775, 0o757):
        cache.chmod(mode)
        assert _python(_FOLDER, cache) == f"None others may write to {cache}; chmod go-w it"
        assert cache.stat().st_mode & 0o777 == mode, "the user's own folder is left as it is"
        assert not (cache / "kernels").exists(), "nothing was left in it"
    for mode in (0o1777, 0o755):
        cache.chmod(mode)
        assert _python(_FOLDER, cache) == str(cache / "kernels")


def test_a_folder_above_is_looked_at_too(tmp_path: Path) -> None:
    """Who may write there renames ours away and puts his own in its place, pickles and all."""
    above = tmp_path / "scratch"
    cache = above / "mine" / "cache"
    cache.mkdir(parents=True)
    above.chmod(0o777)
    assert _python(_FOLDER, cache) == f"None others may write to {above}; chmod go-w it"
    link = tmp_path / "link"
    link.symlink_to(cache)
    assert _python(_FOLDER, link) == f"None others may write to {above}; chmod go-w it"
    above.chmod(0o1777)
    assert _python(_FOLDER, link) == str(cache / "kernels")


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives a folder to another user")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    above = tmp_path / "theirs"
    (above / "cache").mkdir(parents=True)
    os.chown(above, 65534, 65534)
    assert _python(_FOLDER, above / "cache") == f"None {above} belongs to another user"


def test_folders_made_on_the_way_are_private_whatever_the_umask(tmp_path: Path) -> None:
    cache = tmp_path / "made" / "here"
    assert _python(_FOLDER, cache, umask=0) == str(cache / "kernels")
    for folder in (tmp_path / "made", cache, cache / "kernels"):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_digests_are_of_one_key_and_no_plain_hash(tmp_path: Path) -> None:
    first = _python(_DIGEST, tmp_path)
    key = tmp_path / "keys" / "digest"
    assert key.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in key.parent.iterdir()] == ["digest"]
    assert _python(_DIGEST, tmp_path) == first, "runs of one user can be compared"
    name, _, digest = first.partition(":")
    assert digest not in (hashlib.sha256(b"abc").hexdigest(), hashlib.blake2b(b"abc").hexdigest())
    assert name not in key.read_bytes().hex()
    key.unlink()
    other = _python(_DIGEST, tmp_path)
    assert other.partition(":")[0] != name


def test_without_a_folder_the_key_is_one_of_the_process(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert _python(_DIGEST, blocked) != _python(_DIGEST, blocked)
