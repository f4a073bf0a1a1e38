"""The images are made of pinned parts, run as nobody in particular, and hold what they need.

No builder is needed here: rules of our own look at the text, and one is broken for each.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest
from repository import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
#: By hash; or torch, by its version; or the project itself and nothing with it.
_CHECKED = re.compile(
    r"install (--require-hashes --no-deps( -r hashes/\w+\.txt)+|-c \S+ torch"
    r"|--no-deps --no-build-isolation \.) ?$"
)
#: A version down to its patch, or a digest.
_PINNED = re.compile(r"[\w./-]+(:\d+\.\d+\.\d+[\w.-]*|@sha256:[0-9a-f]{64})")


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """(keyword, the rest), comments left out and lines joined."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            keyword, _, rest = line.partition(" ")
            yield keyword, " ".join(rest.split())


def problems(text: str) -> list[str]:
    """What is wrong with a Dockerfile, in a few words each."""
    found: list[str] = []
    users: dict[str, str] = {}  # of each stage
    starts: set[str] = set()  # stages that are run
    stage = ""
    for keyword, rest in _instructions(text):
        if keyword == "FROM":
            base, _, stage = rest.partition(" AS ")
            if base not in users and not _PINNED.fullmatch(base):
                found.append(f"{base} is not pinned")
            users[stage] = users.get(base, "root")
        elif keyword == "USER":
            users[stage] = rest
        elif keyword == "ENTRYPOINT":
            starts.add(stage)
        elif keyword in ("EXPOSE", "ADD"):
            found.append(f"{keyword} {rest}")
        elif keyword == "RUN":
            if re.search(r"\b(curl|wget)\b|\|\s*(ba)?sh\b", rest):
                found.append(f"runs what it downloads: {rest}")
            installs = [part for part in rest.split("&&") if "pip install" in part]
            found += [f"not pinned: {part}" for part in installs if not _CHECKED.search(part)]
        if "0.0.0.0" in rest:
            found.append("listens to everybody")
    return found + [f"{stage} runs as root" for stage in starts if users[stage] in ("root", "0")]


def test_nothing_is_wrong_with_ours() -> None:
    assert problems(DOCKERFILE) == []


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("python:3.11.14-slim-bookworm", "python:latest", "python:latest is not pinned"),
        ("python:3.11.14-slim-bookworm", "python:3.11", "python:3.11 is not pinned"),
        ("USER hypo", "", "cpu runs as root"),
        ("USER hypo", "USER root", "nvidia runs as root"),
        ("RUN hypo warm", "RUN curl https://x | sh; hypo warm", "runs what it downloads"),
        ("RUN hypo warm", "ADD https://x /x\nRUN hypo warm", "ADD https://x /x"),
        ("--require-hashes --no-deps -r hashes/base.txt", "-r hashes/base.txt", "not pinned"),
        ("install -c /tmp/constraints.txt torch", "install torch", "not pinned"),
        ("--no-deps --no-build-isolation .", "--no-build-isolation .", "not pinned"),
        ('CMD ["--help"]', 'CMD ["--host", "0.0.0.0"]', "listens to everybody"),
    ],
)
def test_each_wrong_is_found(before: str, after: str, problem: str) -> None:
    assert before in DOCKERFILE
    assert any(problem in said for said in problems(DOCKERFILE.replace(before, after)))


def test_what_is_copied_is_there_and_sent_to_the_builder() -> None:
    sent = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    copied = {
        word
        for keyword, rest in _instructions(DOCKERFILE)
        if keyword == "COPY"
        for word in shlex.split(rest)[:-1]
    }
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)


def test_both_images_are_warmed_as_the_user_that_runs_them() -> None:
    for image in DOCKERFILE.split("FROM ")[2:]:
        assert image.index("USER hypo") < image.index("RUN hypo warm") < image.index("ENTRYPOINT")
