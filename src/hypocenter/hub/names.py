"""How a model is named that lies elsewhere, and what each form means.

    OWNER/NAME           the quantisation that suits this machine
    OWNER/NAME:TAG       that one, Q4_K_M say; upper and lower case are one
    OWNER/NAME/FILE      that file, which ends in .gguf
    hf.co/...            the same, and addresses of Hugging Face's pages and files
    https://.../X.gguf   a file of any server

Of two of these that mean the same file, both are found under the same name in the cache.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from hypocenter.base.errors import UsageError

MAX_NAME_CHARS = 2048
_WORD = r"[A-Za-z0-9][\w.-]*"
REPOSITORY = re.compile(rf"{_WORD}/{_WORD}", re.ASCII)
_HUB_NAME = re.compile(rf"({REPOSITORY.pattern})(?::([\w.-]+)|/(.+\.gguf))?", re.ASCII)
#: What git names a state of a repository by.
COMMIT = re.compile(r"[0-9a-f]{40}")
#: As other programs name models: llama3.2, llama3:8b.
_SHORT_NAME = re.compile(rf"{_WORD}(:[\w.-]+)?", re.ASCII)
_HUB_HOSTS = ("huggingface.co", "hf.co", "www.huggingface.co")
MAIN = "main"


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository, and which of its models: that of `tag`, or `file`; of neither, any."""

    repository: str
    tag: str = ""
    file: str = ""
    revision: str = MAIN

    def __str__(self) -> str:
        behind = f":{self.tag}" if self.tag else f"/{self.file}" if self.file else ""
        return f"{self.repository}{behind}"


@dataclass(frozen=True, slots=True)
class FileAddress:
    """A file of a server that is no hub."""

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def file(self) -> str:
        """What the file is called there; never a path, whatever is quoted in it."""
        return unquote(urlsplit(self.url).path).rsplit("/", 1)[-1]


RemoteName = HubName | FileAddress


def remote_name(text: str, *, is_hub: bool = False) -> RemoteName | None:
    """What `text` names elsewhere; None for what can only be a path.

    Whoever calls has looked for a file of that name. OWNER/NAME/FILE.gguf and NAME.gguf are paths
    unless it `is_hub` that is meant. Raises UsageError for an address or, of a hub, a name that
    cannot be, and for a name such as llama3.2.
    """
    if len(text) > MAX_NAME_CHARS:
        raise UsageError(f"a model's name of {len(text)} characters; at most {MAX_NAME_CHARS}")
    if text.startswith(("http://", "https://")):
        return _of_address(text)
    for host in _HUB_HOSTS:
        if text.startswith(f"{host}/"):
            return _of_page(text.removeprefix(f"{host}/"), text)
    found = _HUB_NAME.fullmatch(text)
    if found is not None and (is_hub or not text.endswith(".gguf")):
        return HubName(found[1], found[2] or "", _checked_file(found[3] or "", text))
    if is_hub or (_SHORT_NAME.fullmatch(text) and not text.endswith(".gguf")):
        raise UsageError(
            f"{text!r} names no model of a hub, and no file; write OWNER/NAME or OWNER/NAME:TAG, "
            "such as unsloth/Qwen3-8B-GGUF:Q4_K_M"
        )
    return None


def _of_address(text: str) -> RemoteName:
    parts = urlsplit(text)
    if parts.hostname in _HUB_HOSTS:
        return _of_page(unquote(parts.path).strip("/"), text)
    address = FileAddress(text)
    if not parts.hostname or not address.file.endswith(".gguf") or not address.file.isprintable():
        raise UsageError(f"{text} is no address of a GGUF file; it must end in .gguf")
    return address


def _of_page(path: str, text: str) -> HubName:
    """Reads a page of a repository or of one of its files: .../blob/REVISION/FILE,
    .../resolve/..."""
    repository, word, rest = _split_page(path)
    if word in ("blob", "resolve") and "/" in rest:
        revision, _, file = rest.partition("/")
        if not _leads_nowhere_else(revision):
            raise UsageError(f"{text} names no revision of a repository")
        return HubName(repository, "", _checked_file(file, text), revision)
    named = _HUB_NAME.fullmatch(repository if word in ("tree", "") else path)
    if named is None:
        raise UsageError(f"{text} is no model's page; write OWNER/NAME or OWNER/NAME:TAG")
    return HubName(named[1], named[2] or "", _checked_file(named[3] or "", text))


def _split_page(path: str) -> tuple[str, str, str]:
    words = [*path.split("/", 3), "", "", ""]
    return "/".join(words[:2]).rstrip("/"), words[2], words[3]


def _checked_file(file: str, text: str) -> str:
    """A path within a repository: nobody is led out of it."""
    if file and not is_file_within(file):
        raise UsageError(f"{text} names no GGUF file of a repository")
    return file


def is_file_within(path: str) -> bool:
    """Whether `path` is that of a GGUF file in a repository, and leads nowhere else."""
    return path.endswith(".gguf") and _leads_nowhere_else(path)


def _leads_nowhere_else(path: str) -> bool:
    """Whether `path` stays below where it begins; `\\` separates folders for some who read it."""
    return path.isprintable() and "\\" not in path and not {"", ".", ".."} & set(path.split("/"))
