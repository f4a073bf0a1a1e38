"""The options of `hypo serve` from the environment and from a file; knows none of them by name.

The command line comes before HYPO_SERVE_<OPTION>, and both before the file that --config names.
"""

from __future__ import annotations

import json
import os
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cyclopts import App, Token
from cyclopts.argument import Argument, ArgumentCollection

from hypocenter.base.errors import UsageError
from hypocenter.cli.words.reading import nearest
from hypocenter.settings.environment import OF_SERVE, SECRETS

_MAX_FILE_BYTES = 1 << 20
#: Options of which one is meant: what comes first leaves the others of its row out.
_ALTERNATIVES = (
    {"MODEL", "--model", "--hf-repo"},
    {"--chat-template", "--chat-template-file"},
    {"--kv-dtype", "--cache-type-k", "--cache-type-v"},
)
#: The one that may be written as a table.
_OF_VARIABLES = "--chat-template-kwargs"
#: What is a table for each model, and no option.
_OF_MODELS = "models"


def fill(_app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Give each option that the command line leaves open its value from elsewhere.

    Cyclopts calls it between the command line and the conversion of values. Raises UsageError.
    """
    _fill(arguments, list(_of_environment(os.environ, arguments)))
    files = [token.value for token in _options_by_name(arguments)["--config"].tokens]
    if files:
        _fill(arguments, list(_of_file(files[-1], arguments)))


def _fill(arguments: ArgumentCollection, found: list[tuple[Argument, list[Token]]]) -> None:
    """Take what was found in one place, where no earlier place has a word on it."""
    given = {name for argument in arguments if argument.tokens for name in argument.names}
    for argument, tokens in found:
        rivals = {*argument.names}.union(*(row for row in _ALTERNATIVES if row & {*argument.names}))
        if not given & rivals:
            for token in tokens:
                argument.append(token)


def _options_by_name(arguments: ArgumentCollection) -> dict[str, Argument]:
    """Each option by each of its long names."""
    return {name: found for found in arguments for name in found.names if name.startswith("--")}


def _option(name: str, where: str, named: Mapping[str, Argument]) -> Argument:
    """The option of that name. Raises UsageError where there is none."""
    spelled = "--" + name.lower().replace("_", "-")
    argument = named.get(spelled)
    if argument is not None and spelled not in argument.negatives:
        return argument
    positive = [known for known in named if known not in named[known].negatives]
    near = nearest(spelled if argument is None else argument.name, positive)
    hint = f"; did you mean {_as_written(near, where)}?" if near else ""
    raise UsageError(f"{where} is no option of hypo serve{hint} (hypo serve --help)")


def _as_written(option: str, where: str) -> str:
    """An option, written as where it was looked for."""
    bare = option.lstrip("-")
    return OF_SERVE + bare.upper().replace("-", "_") if where.startswith(OF_SERVE) else bare


def _of_environment(
    environ: Mapping[str, str], arguments: ArgumentCollection
) -> Iterator[tuple[Argument, list[Token]]]:
    named = _options_by_name(arguments)
    for variable in sorted(name for name in environ if name.startswith(OF_SERVE)):
        name = variable.removeprefix(OF_SERVE)
        if f"HYPO_{name}" in SECRETS:
            raise UsageError(f"{variable} is not read; HYPO_{name} has it, and no worker gets that")
        argument = _option(name, variable, named)
        text = environ[variable]
        values = text.split(",") if _is_list(argument) else [text]
        yield argument, _tokens(argument, variable, values, "the environment")


def _of_file(path: str, arguments: ArgumentCollection) -> Iterator[tuple[Argument, list[Token]]]:
    named = _options_by_name(arguments)
    for name, value in _read(path).items():
        if name == _OF_MODELS:
            continue
        where = f"{name} in {path}"
        argument = _option(name, where, named)
        if "--config" in argument.names:
            raise UsageError(f"{where} names another file; write its lines here instead")
        yield argument, _tokens(argument, name, _texts(argument, value, where), path)


def tables_of_models(path: str) -> dict[str, dict[str, Any]]:
    """The tables `[models.NAME]` of a file of settings, by name. Raises UsageError for a file that
    is none, or where those are no tables."""
    found = _read(path).get(_OF_MODELS, {})
    if not isinstance(found, dict) or not all(isinstance(table, dict) for table in found.values()):
        raise UsageError(f"models in {path} must be tables: [models.NAME]")
    return found


def _read(path: str) -> dict[str, Any]:
    """The keys of a file of settings. Raises UsageError for one that is none, or that is open."""
    try:
        with open(path, "rb") as file:
            data, mode = file.read(_MAX_FILE_BYTES + 1), os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from error
    if len(data) > _MAX_FILE_BYTES:
        raise UsageError(f"--config {path} is longer than {_MAX_FILE_BYTES} bytes")
    try:
        settings = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--config {path} is no TOML: {error}") from None
    secret = [name for name in settings if f"HYPO_{name.upper().replace('-', '_')}" in SECRETS]
    if secret and mode & stat.S_IROTH:
        raise UsageError(
            f"{path} holds {secret[0]}, and everybody on this machine can read it: chmod o-r {path}"
        )
    return settings


def _texts(argument: Argument, value: object, where: str) -> list[str]:
    """A value of TOML as the command line would have it. Raises UsageError for one of its kind."""
    takes_value = argument.token_count()[0] > 0
    if isinstance(value, dict) and _OF_VARIABLES in argument.names:
        return [json.dumps(value)]
    values = value if isinstance(value, list) and _is_list(argument) else [value]
    allowed: Callable[[object], bool] = (
        (lambda item: isinstance(item, str | int | float) and not isinstance(item, bool))
        if takes_value
        else (lambda item: isinstance(item, bool))
    )
    if not all(allowed(item) for item in values):
        kind = "a list of texts" if _is_list(argument) else "a number or a text"
        raise UsageError(f"{where} must be {kind if takes_value else 'true or false'}")
    return [str(item) for item in values]


def _is_list(argument: Argument) -> bool:
    """Whether an option may be given again."""
    return bool(argument.token_count()[1])


def _tokens(argument: Argument, name: str, values: list[str], source: str) -> list[Token]:
    """What cyclopts converts; it names both in what it says of a value."""
    if not argument.token_count()[0]:
        values = [_truth(value, name) for value in values]
    return [
        Token(keyword=name, value=value, source=source, index=index)
        for index, value in enumerate(values)
    ]


def _truth(text: str, name: str) -> str:
    word = {"1": "true", "yes": "true", "0": "false", "no": "false"}.get(text.lower(), text.lower())
    if word not in ("true", "false"):
        raise UsageError(f"{name} is {text!r}, but must be 1 or 0")
    return word
