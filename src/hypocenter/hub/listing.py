"""What a hub says of a repository: its commit and files, read with a bound on each of them.

Questions and fields are those of Hugging Face's own API (https://huggingface.co/docs/hub/api).
"""

from __future__ import annotations

from typing import Annotated, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from hypocenter.base.errors import HubError
from hypocenter.base.package import NAME
from hypocenter.hub.answers import HubAnswer, Pace, Question, ask
from hypocenter.hub.names import COMMIT, MAIN, MAX_NAME_CHARS, REPOSITORY, HubName
from hypocenter.hub.variants import RemoteFile

MAX_FILES = 20_000
#: About ten times what a list of that many files takes.
_MAX_LIST_BYTES = 64 << 20
_MAX_SUGGESTED = 5
_MAX_SUGGESTED_BYTES = 4 << 20
#: How long a list may take.
LIST_SECONDS = 20.0
#: What the hub says of a token that it does not know.
_BAD_TOKEN = "Invalid credentials in Authorization header"

_Name = Annotated[str, msgspec.Meta(max_length=1024)]
#: Looked at where it is used: a list may have files that nobody wants.
_Digest = Annotated[str, msgspec.Meta(max_length=64)]
_T = TypeVar("_T")


class _Stored(msgspec.Struct):
    """A file that git itself does not hold."""

    sha256: _Digest


class _File(msgspec.Struct, rename={"blob_id": "blobId"}):
    rfilename: _Name
    size: Annotated[int, msgspec.Meta(ge=0, le=1 << 50)] | None = None
    blob_id: _Digest | None = None
    lfs: _Stored | None = None


class _Insight(msgspec.Struct):
    architecture: Annotated[str, msgspec.Meta(max_length=64)] | None = None


class _Repository(msgspec.Struct):
    sha: Annotated[str, msgspec.Meta(pattern=rf"^{COMMIT.pattern}\Z")]
    siblings: Annotated[list[_File], msgspec.Meta(max_length=MAX_FILES)] | None = None
    gguf: _Insight | None = None


class _Like(msgspec.Struct):
    id: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]


def list_files(name: HubName) -> tuple[str, list[RemoteFile], str]:
    """The commit of a repository, its files, and the architecture that the hub has read there.

    Raises HubError.
    """
    revision = "" if name.revision == MAIN else f"/revision/{quote(name.revision, safe='')}"
    question = _question(name, f"/api/models/{name.repository}{revision}", {"blobs": "true"})
    with ask(question, Pace(LIST_SECONDS)) as answer:
        require_success(answer, name)
        listed = _decode(answer.read_all(_MAX_LIST_BYTES), question, _Repository)
    if COMMIT.fullmatch(name.revision) and listed.sha != name.revision:
        raise HubError(f"{name}: {question.host} answers for another commit, {listed.sha}")
    files = [
        RemoteFile(
            file.rfilename,
            file.size or 0,
            file.lfs.sha256 if file.lfs is not None else file.blob_id or "",
        )
        for file in listed.siblings or []
    ]
    return listed.sha, files, (listed.gguf and listed.gguf.architecture) or ""


def hub_question(what: str, url: str) -> Question:
    """A question to the hub itself, with its user's token."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    return Question(what, constants.ENDPOINT, url, dict(build_hf_headers(library_name=NAME)))


def require_success(answer: HubAnswer, name: HubName) -> None:
    """Raises HubError for a status of failure; the hub's own code decides what it says."""
    if answer.status in (200, 206):
        return
    what, host = answer.question.what, answer.question.host
    code = answer.header("x-error-code")
    if answer.status == 401 and answer.header("x-error-message") == _BAD_TOKEN:
        raise HubError(f"{what}: {host} does not know your token", "look at HF_TOKEN")
    if code == "GatedRepo":
        raise HubError(
            f"{what} is open to those only who accepted its terms",
            f"accept them at {host}/{name.repository}, and give your token by HF_TOKEN or "
            "`hf auth login`",
        )
    if code == "RepoNotFound" or answer.status == 401:
        near = _suggestions(name)
        raise HubError(
            f"{host} has no model {name.repository}, or it is private, and no file here is called "
            "that",
            (f"like it are {near}; " if near else "") + "for a private one give HF_TOKEN",
        )
    if code in ("RevisionNotFound", "EntryNotFound"):
        raise HubError(f"{host} has no {what} at that revision")
    raise HubError(f"{what}: {host} answered with status {answer.status}", "try again later")


def _suggestions(name: HubName) -> str:
    """Repositories that are called like `name`, if the hub says."""
    words = name.repository.partition("/")[2].removesuffix("-GGUF")
    parameters = {"search": words, "filter": "gguf", "sort": "downloads"}
    parameters["limit"] = str(_MAX_SUGGESTED)
    question = _question(name, "/api/models", parameters)
    try:
        with ask(question, Pace(LIST_SECONDS)) as answer:
            if answer.status != 200:
                return ""
            found = _decode(answer.read_all(_MAX_SUGGESTED_BYTES), question, list[_Like])
    except HubError:
        return ""  # there is an error to tell of already
    near = [model.id for model in found if REPOSITORY.fullmatch(model.id)]
    return ", ".join(near[:_MAX_SUGGESTED])


def _question(name: HubName, path: str, parameters: dict[str, str]) -> Question:
    from huggingface_hub import constants

    return hub_question(str(name), f"{constants.ENDPOINT}{path}?{urlencode(parameters)}")


def _decode(data: bytes, question: Question, type_: type[_T]) -> _T:
    try:
        return msgspec.json.decode(data, type=type_)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        reason = str(error).replace("`$.", "`").replace(" - at ", " at ")
        raise HubError(
            f"{question.what}: {question.host} answered with no list of files: {reason}",
            "HF_ENDPOINT names the hub",
        ) from error
