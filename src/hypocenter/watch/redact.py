"""Takes out of a bundle what a person typed or keeps secret.

Prompts, keys and values of options in the command, and where stderr repeats them; what looks like a
credential in stderr; variables that are named for one, and their values in all texts; the user's
folder; token ids in step inputs.
"""

from __future__ import annotations

import itertools
import os
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hypocenter.base.package import place_of_own_name
from hypocenter.record.bundle import Bundle
from hypocenter.record.events import PlanRecord, SourceRecord, Stepped, TensorRecord, Values

#: Tensors of the engine that hold token ids.
TOKEN_TENSORS = frozenset({"token_ids", "context_ids"})
#: Options of `hypo` that are followed by a text, or by a key.
_TEXT_OPTIONS = ("-p", "--prompt", "--stop", "--api-key")
#: Shorter words are left where stderr has them: they are part of others.
_MIN_HIDDEN = 4
#: A value of a variable that is named for a secret goes from all texts when it is no shorter.
_MIN_SECRET = 8
#: What comes before a credential, and it: forms that are known (Hugging Face, OpenAI, GitHub, AWS,
#: Slack), and values behind a name.
_CREDENTIALS = (
    re.compile(r"()\b((?:hf_|sk-|gh[pousr]_|github_pat_|AKIA|xox[abp]-)[\w-]{8,})"),
    re.compile(
        r"((?:(?:password|passwd|secret|api[_-]?key)[\"']?\s*[=:]|token[\"']?=|bearer\s)\s*[\"']?)"
        r"([^\s\"',;)]{4,})",
        re.IGNORECASE,
    ),
)
_SECRET_NAMES = re.compile("TOKEN|SECRET|PASSW|KEY|CREDENTIAL", re.IGNORECASE)
_CODES = {"I8": "b", "I16": "h", "I32": "i", "I64": "q"}


def redact(
    bundle: Bundle, *, with_prompts: bool = False, environ: Mapping[str, str] = os.environ
) -> Bundle:
    """The same, without secrets of `environ`; without prompts and token ids unless `with_prompts`.

    Token ids inside the vocabulary are replaced by 0, and what is known whole of launches that were
    given some is left out. Others stay, since they are what a fault may come from. Where the
    vocabulary's size is unknown every id that is not negative is replaced.
    """
    secrets = _secrets_of({**bundle.environment, **environ})
    if with_prompts:
        kept: Bundle = _with_texts(bundle, _replaces(secrets, ""))
        return kept
    home = os.path.expanduser("~").rstrip("/")
    # Where it is not known, or the root of all files, it names nobody.
    change = _replaces(secrets, home if home.startswith("/") else "")
    changed: Bundle = _with_texts(_without_typed(bundle, secrets), change)
    return changed


def _secrets_of(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Values of variables that are named for a secret, the longest first; no paths of files."""
    named = {value for name, value in environ.items() if _SECRET_NAMES.search(name)}
    found = {value for value in named if len(value) >= _MIN_SECRET and not _is_file(value)}
    found |= {repr(value)[1:-1] for value in found}
    return tuple(sorted(found, key=len, reverse=True))


def _without_typed(bundle: Bundle, secrets: Sequence[str]) -> Bundle:
    """Without prompts, options' values and token ids."""
    holders = {tensor.id: tensor for tensor in bundle.tensors if tensor.name in TOKEN_TENSORS}
    size = vocabulary(bundle.plans, bundle.tensors)

    def without(values: tuple[Values, ...]) -> tuple[Values, ...]:
        return tuple(_zero(v, size) if v.tensor in holders else v for v in values)

    return msgspec.structs.replace(
        bundle,
        command=redacted_command(bundle.command),
        stderr=redacted_text(bundle.stderr, bundle.command, secrets),
        fault=msgspec.structs.replace(
            bundle.fault,
            message=redacted_text(bundle.fault.message, bundle.command, secrets),
            stack=redacted_text(bundle.fault.stack, bundle.command, secrets),
        ),
        environment={
            name: _length(value) if _SECRET_NAMES.search(name) else value
            for name, value in bundle.environment.items()
        },
        events=tuple(
            msgspec.structs.replace(event, inputs=without(event.inputs))
            if isinstance(event, Stepped)
            else event
            for event in bundle.events
        ),
        snapshots=tuple(
            msgspec.structs.replace(snapshot, values=without(snapshot.values))
            for snapshot in bundle.snapshots
        ),
        outcomes=tuple(
            outcome
            for outcome in bundle.outcomes
            if not any(values.tensor in holders for values in (*outcome.given, *outcome.gave))
        ),
        redacted=True,
    )


def redacted_command(command: Sequence[str]) -> tuple[str, ...]:
    """The command with each prompt replaced by its length.

    Of a program that is not ours nobody knows which words are harmless: files that are there, names
    of options and of modules stay.
    """
    words = list(command)
    own = place_of_own_name(words)
    if own is None:
        return tuple(_foreign_words(words))
    if words[own + 1 : own + 2] == ["bench"]:
        return tuple(words)  # its -p is a number
    return tuple(_own_words(words))


def _own_words(words: list[str]) -> list[str]:
    shown = list(words)
    for number, word in enumerate(words):
        option, equals, text = word.partition("=")
        if option in _TEXT_OPTIONS and equals:
            shown[number] = f"{option}={_length(text)}"
        elif word in _TEXT_OPTIONS and number + 1 < len(words):
            shown[number + 1] = _length(words[number + 1])
        elif word.startswith("-p") and len(word) > 2 and not word.startswith("--"):
            shown[number] = f"-p{_length(word[2:])}"
    return shown


def _foreign_words(words: list[str]) -> list[str]:
    shown = words[:1]
    for before, word in itertools.pairwise(words):
        option, equals, text = word.partition("=")
        if re.fullmatch(r"--?[A-Za-z][\w-]*", option):
            shown.append(f"{option}={_length(text)}" if equals else word)
        elif before == "-m" or _is_file(word):
            shown.append(word)
        else:
            shown.append(_length(word))
    return shown


def _is_file(word: str) -> bool:
    try:
        return Path(word.partition("::")[0]).exists()
    except (OSError, ValueError):
        return False


def _length(text: str) -> str:
    return f"<{len(text)} characters>"


def redacted_text(text: str, command: Sequence[str], secrets: Sequence[str] = ()) -> str:
    """What a command said, without what was taken out of its words, `secrets` and credentials."""
    hidden = set(secrets) | {
        said
        for word, shown in zip(command, redacted_command(command), strict=True)
        if word != shown
        for said in (word, word.partition("=")[2])
        if len(said) >= _MIN_HIDDEN
    }
    for said in sorted(hidden, key=len, reverse=True):
        text = text.replace(said, _length(said))
    for form in _CREDENTIALS:
        text = form.sub(lambda match: match[1] + _length(match[2]), text)
    return text


def _replaces(secrets: Sequence[str], folder: str) -> Callable[[str], str]:
    """What gives a text without `secrets`, and with `~` for the user's folder, if given."""
    in_folder = re.compile(rf"(?<![\w.-]){re.escape(folder)}(?![\w.-])") if folder else None
    searched = (*secrets, folder) if folder else tuple(secrets)
    any_of = re.compile("|".join(map(re.escape, searched))) if searched else None

    def change(text: str) -> str:
        if any_of is None or any_of.search(text) is None:
            return text
        for secret in secrets:
            text = text.replace(secret, _length(secret))
        return in_folder.sub("~", text) if in_folder is not None else text

    return change


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A record with all its texts changed, but not those of kernels, which their hashes are of."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Values):
        return value
    if isinstance(value, msgspec.Struct):
        kept = ("text",) if isinstance(value, SourceRecord) else ()
        changed = {}
        for name in value.__struct_fields__:
            old = getattr(value, name)
            new = old if name in kept else _with_texts(old, change)
            if new is not old:
                changed[name] = new
        return msgspec.structs.replace(value, **changed) if changed else value
    if isinstance(value, tuple):
        rows = tuple(_with_texts(old, change) for old in value)
        return rows if any(a is not b for a, b in zip(rows, value, strict=True)) else value
    if isinstance(value, dict):
        return {key: _with_texts(old, change) for key, old in value.items()}
    return value


def vocabulary(plans: Sequence[PlanRecord], tensors: Sequence[TensorRecord]) -> int | None:
    """Rows of the table that token ids index, from the launch that looks them up."""
    by_id = {tensor.id: tensor for tensor in tensors}
    for launch in (launch for plan in plans for launch in plan.launches):
        facts = {fact.name: by_id.get(fact.tensor or -1) for fact in launch.facts}
        ids, table = facts.get("token_ids"), facts.get("table")
        if ids is not None and table is not None and table.shape:
            return table.shape[0]
    return None


def _zero(values: Values, size: int | None) -> Values:
    code = _CODES.get(values.dtype.upper())
    if code is None:
        return msgspec.structs.replace(values, data=bytes(len(values.data)))
    try:
        ids = array(code, values.data)
    except ValueError:  # no whole number of elements
        return msgspec.structs.replace(values, data=bytes(len(values.data)))
    kept = array(code, (0 if id >= 0 and (size is None or id < size) else id for id in ids))
    return msgspec.structs.replace(values, data=kept.tobytes())
