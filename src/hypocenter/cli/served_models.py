"""Which models `hypo serve` is to have: from the command line, a folder, or the file of settings.

What is said of one model in a table `[models.NAME]` comes before what is said of all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hypocenter.base.errors import UsageError
from hypocenter.cli.model_app import ModelOptions
from hypocenter.cli.serve_options import ServeOptions
from hypocenter.cli.words.reading import nearest
from hypocenter.cli.words.settings import tables_of_models
from hypocenter.settings.adapters import read_choice

#: Files in a folder of models that are looked at.
_MAX_FILES = 10_000
_OF_PARTS = re.compile(r"-([0-9]{5})-of-[0-9]{5}$")
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)


class ModelTable(msgspec.Struct, kw_only=True, rename=lambda name: name.replace("_", "-")):
    """A table `[models.NAME]`; what is left out is as the options have it for all models."""

    path: str
    aliases: tuple[str, ...] = ()
    device: str | None = None
    replicas: int | None = None
    parallel: int | None = None
    ctx_size: int | None = None
    kv_tokens: int | None = None
    max_queued: int | None = None
    pinned: bool = False
    sleep_idle_seconds: float | None = None
    #: Adapters beside it, as --lora has them.
    lora: tuple[str, ...] = ()


@dataclass(frozen=True)
class NamedModel:
    """A model's file, the names that clients call it by (none: that of the file), and its table."""

    path: str
    names: tuple[str, ...] = ()
    table: ModelTable = field(default_factory=lambda: ModelTable(path=""))


@dataclass(frozen=True)
class ServedChoice:
    """`on_demand`: each is loaded when it is asked for; else it is one, loaded at the start."""

    models: tuple[NamedModel, ...]
    on_demand: bool


def chosen_models(
    given: tuple[str, ...], models: ModelOptions, options: ServeOptions, *, device: str, quiet: bool
) -> ServedChoice:
    """The models that are named, fetched if need be. Raises UsageError."""
    tables = {} if options.config is None else tables_of_models(options.config)
    ways = {
        "MODEL": bool(given),
        "-m": models.model is not None,
        "-hf": models.hf_repo is not None,
        "--models-dir": options.models_dir is not None,
        f"[models] in {options.config}": bool(tables),
    }
    if len(named := [way for way, is_given in ways.items() if is_given]) > 1:
        raise UsageError(f"models are named by {' and '.join(named)}; name them in one way")
    if options.models_dir is not None:
        found = _of_folder(Path(options.models_dir))
    elif tables:
        assert options.config is not None
        found = [
            _of_table(name, table, options.config, device=device, quiet=quiet)
            for name, table in tables.items()
        ]
    else:
        paths = [models.path(name, device=device, quiet=quiet) for name in given or (None,)]
        found = [NamedModel(path) for path in dict.fromkeys(paths)]
    is_one = len(found) == 1 and not tables and options.models_dir is None
    return _choose_names(found, options, is_one=is_one)


def _choose_names(found: list[NamedModel], options: ServeOptions, *, is_one: bool) -> ServedChoice:
    if options.served_model_name:
        if not is_one:
            raise UsageError(
                "--alias names one model, but several are served; give each its aliases in the "
                "file of --config"
            )
        found = [NamedModel(found[0].path, options.served_model_name)]
    for model in found:
        if not Path(model.path).is_file():
            raise UsageError(f"{model.path}: no such file")
    known = [name for model in found for name in model.names or (Path(model.path).stem,)]
    for name in options.pin:
        if name not in known:
            near = nearest(name, known)
            hint = f"; did you mean {near}?" if near else ""
            raise UsageError(f"--pin {name!r} is no model that is served{hint}")
    return ServedChoice(tuple(found), on_demand=not is_one or options.sleep_idle_seconds >= 0)


def _of_folder(folder: Path) -> list[NamedModel]:
    """The GGUF files of a folder and of the folders in it; of a model in parts the first one.

    What belongs to another model (adapter, mmproj, imatrix) is passed over. Raises UsageError where
    there is no model.
    """
    from hypocenter.model.gguf.identity import says_it_is_no_model

    try:
        near = sorted(folder.iterdir())[:_MAX_FILES]
        below = [path for inner in near if inner.is_dir() for path in sorted(inner.glob("*.gguf"))]
    except OSError as error:
        raise UsageError(f"--models-dir {folder}: {error.strerror}") from error
    files = [path for path in (*near, *below) if path.suffix == ".gguf" and path.is_file()]
    found = []
    for path in files[:_MAX_FILES]:
        part = _OF_PARTS.search(path.stem)
        is_first = part is None or part[1] == "00001"
        if is_first and not _NO_MODEL.search(path.stem) and not says_it_is_no_model(path):
            found.append(NamedModel(str(path), (_OF_PARTS.sub("", path.stem),)))
    if not found:
        raise UsageError(f"--models-dir {folder} has no GGUF file of a model")
    return found


def _of_table(
    name: str, table: Mapping[str, Any], config: str, *, device: str, quiet: bool
) -> NamedModel:
    """Raises UsageError for a key that is none, or a value of another kind."""
    from hypocenter.cli.verbs.models import model_file

    where = f"[models.{name}] in {config}"
    known = [key.replace("_", "-") for key in ModelTable.__struct_fields__]
    spelled = {key.replace("_", "-").lower(): value for key, value in table.items()}
    for key in spelled:
        if key not in known:
            near = nearest(key, known)
            hint = f"; did you mean {near}?" if near else f"; it may have {', '.join(known)}"
            raise UsageError(f"{key} is no key of {where}{hint}")
    try:
        read = msgspec.convert(spelled, ModelTable)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {error}") from None
    beside = Path(config).parent / read.path
    path = str(beside) if beside.is_file() else ""
    path = path or model_file(read.path, is_hub=False, device=read.device or device, quiet=quiet)
    read = msgspec.structs.replace(read, lora=tuple(_beside(Path(config), x) for x in read.lora))
    return NamedModel(path, (name, *read.aliases), read)


def _beside(config: Path, adapter: str) -> str:
    """An adapter whose file is looked for beside the file of settings first."""
    choice = read_choice(adapter)
    beside = config.parent / choice.path
    return choice.written_with(str(beside)) if beside.is_file() else adapter
