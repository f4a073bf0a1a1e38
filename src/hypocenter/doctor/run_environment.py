"""What a run had around it: versions, system, GPU, model and command, as its bundle has them.

Facts of the run that is examined, never of the machine on which the report is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

import msgspec

from hypocenter.base.cards import Card
from hypocenter.base.package import NAME, place_of_own_name
from hypocenter.record.bundle import Bundle
from hypocenter.record.run_records import ModelRecord

#: A bundle may be of anyone's making: longer texts and more words than this say nothing more.
_MAX_CHARS, _MAX_WORDS, _MAX_VARIABLES = 200, 40, 40


class RunEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """What a maintainer asks first of a report; None for what the bundle does not say.

    `torch` and `triton` are "" where the run had none, `driver` where no GPU driver was loaded.
    `device` is what the launches ran on, `gpu` its product and architecture, `cards` the GPUs of
    the machine. The command is as the bundle has it, without prompts; of an absolute path only the
    last part is told.
    """

    hypocenter: str | None
    python: str | None
    torch: str | None
    triton: str | None
    platform: str | None
    device: str | None
    gpu: str | None
    driver: str | None
    cards: tuple[str, ...]
    model: ModelRecord | None
    command: str | None
    started: str | None
    variables: dict[str, str]


def run_environment_of(bundle: Bundle) -> RunEnvironment:
    """What the bundle says, with each text on one line and of bounded length."""
    packages = bundle.packages
    limits = bundle.limits or {}
    gpu = ", ".join(str(limits[name]) for name in ("product", "arch") if limits.get(name))
    model = bundle.model
    driver = bundle.driver
    return RunEnvironment(
        hypocenter=_text(packages.get(NAME, "")),
        python=_text(bundle.python),
        torch=_package(packages, "torch"),
        triton=_package(packages, "triton"),
        platform=_text(bundle.platform),
        device=_text(bundle.device),
        gpu=_text(gpu),
        driver=None if driver is None else _text(driver) or "",
        cards=tuple(_text(card_text(card)) or "" for card in bundle.cards),
        model=model
        and ModelRecord(
            name=_text(PurePosixPath(model.name).name) or "",
            architecture=_text(model.architecture) or "",
            quantisation=_text(model.quantisation) or "",
        ),
        command=_text(_command(bundle.command), num_lines=4),
        started=_text(bundle.started),
        variables={
            _text(name) or "": _text(_without_folder(value)) or ""
            for name, value in sorted(bundle.environment.items())[:_MAX_VARIABLES]
        },
    )


def card_text(card: Card) -> str:
    """A GPU in a line: who it is, and what tells whether it is well."""
    facts = (
        ("at", card.bus),
        ("serial number", card.serial),
        ("errors of memory", card.ecc_errors),
        ("rows remapped", card.remapped_rows),
        ("MHz", card.sm_mhz),
        ("degrees", card.celsius),
        ("Xid", ", ".join(map(str, card.xids))),
    )
    told = ", ".join(f"{name} {value}" for name, value in facts if value not in ("", None))
    return f"{card.index}: {card.name} {card.uuid} ({told})"


def _package(packages: dict[str, str], name: str) -> str | None:
    """Its version; "" where the run's process listed others and it was not among them.

    This package alone is what the collector knows by itself.
    """
    return _text(packages.get(name, "")) or ("" if set(packages) - {NAME} else None)


def _command(words: Sequence[str]) -> str:
    own = place_of_own_name(words)
    shown = ["hypo", *words[own + 1 :]] if own is not None else list(words)
    more = ["..."] if len(shown) > _MAX_WORDS else []
    return " ".join([*map(_without_folder, shown[:_MAX_WORDS]), *more])


def _without_folder(word: str) -> str:
    """`/home/me/models/x.gguf` is x.gguf: where somebody keeps a file is no part of a report."""
    option, equals, value = word.partition("=")
    if equals and value.startswith(("/", "~")):
        return f"{option}={PurePosixPath(value).name}"
    return PurePosixPath(word).name if word.startswith(("/", "~")) else word


def _text(text: str, num_lines: int = 1) -> str | None:
    """The text in one line of so many lines' length at most; None for none."""
    limit = num_lines * _MAX_CHARS
    text = " ".join(text[: 2 * limit].split())
    return (text if len(text) <= limit else f"{text[:limit]} ...") or None
