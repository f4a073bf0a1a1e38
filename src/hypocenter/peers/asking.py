"""Runs another engine on a model and reads what its tensors held. Judges nothing.

The engine runs in a process of its own, by an interpreter that has it: this one, or another.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from hypocenter.base import package
from hypocenter.base.dtypes import Float32s
from hypocenter.base.errors import HypoError, UsageError
from hypocenter.base.own_folder import own_folder

#: Seconds that a peer may take to load and run a prompt.
_SECONDS = 600
#: What its program leaves with where a module is missing, whose name is its last line.
_NOT_INSTALLED = 77
#: Finds modules without importing them.
_FIND = f"""
import importlib.util, sys
for name in sys.argv[1:]:
    if importlib.util.find_spec(name) is None:
        print(name, file=sys.stderr)
        sys.exit({_NOT_INSTALLED})
"""


@dataclass(frozen=True)
class Peer:
    """Another engine: the program that runs it, the modules that it needs, and what to install
    where one is missing.

    `attention_limit`: the share by which its attention may be off: llama.cpp multiplies q, and the
    weights behind the softmax, as halves. `has_cache`: keys and values are rounded as ours are.
    """

    name: str
    program: str
    modules: tuple[str, ...]
    to_install: str
    reads_folders: bool
    attention_limit: float
    has_cache: bool

    @property
    def path(self) -> Path:
        return package.FOLDER / "peers" / "programs" / self.program


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "transformers",
            "transformers_program.py",
            ("transformers", "torch"),
            "transformers torch gguf",
            True,
            2e-3,
            False,
        ),
        Peer(
            "llama.cpp",
            "llama_cpp_program.py",
            ("llama_cpp",),
            "llama-cpp-python",
            False,
            2e-2,
            True,
        ),
    )
}


class _Said(msgspec.Struct, frozen=True):
    version: str
    token_ids: tuple[int, ...] | None


@dataclass(frozen=True)
class PeerAnswer:
    """The answer of a peer: f32 [num_tokens, columns] by name and layer, and what its own tokenizer
    makes of the text, where it was asked."""

    version: str
    token_ids: tuple[int, ...] | None
    tensors: dict[tuple[str, int | None], Float32s]


def require(peer: Peer, python: str, model: Path) -> None:
    """Before anything is run: raises UsageError where the interpreter or the engine is not there,
    or it cannot read such a model."""
    if model.is_dir() and not peer.reads_folders:
        raise UsageError(f"{model} is a folder, and {peer.name} reads GGUF files; name one")
    modules = peer.modules if model.is_dir() or not peer.reads_folders else (*peer.modules, "gguf")
    command = [python, "-c", _FIND, *modules]
    try:
        ended = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
    except OSError as error:
        raise UsageError(f"--peer-python {python}: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise HypoError(f"--peer-python {python} said nothing for {_SECONDS} s") from None
    lines = ended.stderr.decode(errors="replace").strip().splitlines()
    if ended.returncode == _NOT_INSTALLED:
        raise _not_installed(peer, python, lines)
    if ended.returncode:
        raise UsageError(f"--peer-python {python} runs no Python: {_why(lines)}")


def _not_installed(peer: Peer, python: str, lines: list[str]) -> UsageError:
    return UsageError(
        f"{peer.name} cannot be asked: {python} has no module {lines[-1][:100]}; "
        f"pip install {peer.to_install}, or name the Python that has it by --peer-python"
    )


def ask(peer: Peer, python: str, model: Path, text: str, token_ids: Sequence[int]) -> PeerAnswer:
    """Run the tokens in one batch.

    Raises UsageError as `require` does where that was not asked, HypoError where it fails.
    """
    with own_folder("hypo-peer-") as folder:
        order, out = folder / "order.json", folder / "told.npz"
        order.write_text(json.dumps({"text": text, "token_ids": list(token_ids)}))
        command = [python, str(peer.path), str(model), str(order), str(out)]
        # A hub is not asked: what is run is what lies here.
        environment = dict(os.environ, HF_HUB_OFFLINE="1")
        try:
            ended = subprocess.run(
                command, capture_output=True, env=environment, timeout=_SECONDS, check=False
            )
        except OSError as error:
            raise UsageError(f"--peer-python {python}: {error.strerror}") from error
        except subprocess.TimeoutExpired:
            raise HypoError(f"{peer.name} took more than {_SECONDS} s; give fewer tokens") from None
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        if ended.returncode == _NOT_INSTALLED:
            raise _not_installed(peer, python, lines)
        if ended.returncode or not out.is_file():
            raise HypoError(f"{peer.name} ended with {ended.returncode} on {model}: {_why(lines)}")
        return _read(peer, out)


def _why(lines: list[str]) -> str:
    """The line of a traceback that names the error, which others may follow; else the last one."""
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    return (named or lines or ["it said nothing"])[-1][:300]


def _read(peer: Peer, path: Path) -> PeerAnswer:
    """Raises HypoError for a file that the program did not write so."""
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            held = {name: file[name] for name in file.files}
        said = msgspec.json.decode(held.pop("facts").tobytes(), type=_Said)
        tensors = {}
        for place, values in held.items():
            name, _, layer = place.partition("/")
            tensors[name, int(layer) if layer else None] = np.asarray(values, np.float32)
    except (
        OSError,
        EOFError,
        KeyError,
        ValueError,
        zipfile.BadZipFile,
        msgspec.MsgspecError,
    ) as error:
        raise HypoError(f"what {peer.name} wrote cannot be read: {error}") from error
    return PeerAnswer(said.version, said.token_ids, tensors)
