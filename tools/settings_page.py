"""Writes `docs/settings.md`: a table of all settings, made of their declarations.

Run `python -m tools.settings_page` after a change of `config.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from hypocenter.settings.config import EngineConfig, SamplingParams
from hypocenter.settings.setting import Setting, settings_of

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
_HEAD = """# All settings

`python -m tools.settings_page` writes this page, from the declarations in
`src/hypocenter/settings/config.py`. A value of a wrong type or beyond its limits is refused in one
line, wherever it comes from.
"""
_SAMPLING = """
## Of a request
Keywords of `LLM.generate` and fields of `SamplingParams` ([Python](python.md)), options of
`hypo run`, and fields of a request's body ([serving](serving.md)).

| setting | default | values | option | body | meaning |
|---|---|---|---|---|---|
"""
_ENGINE = """
## Of an engine
Keywords of `LLM` and fields of `EngineConfig`, and options of `hypo run`, `hypo serve` and
`hypo bench`.

| setting | default | values | option | meaning |
|---|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    sampling = settings_of(SamplingParams).values()
    engine = settings_of(EngineConfig).values()
    rows = "".join(f"| {' | '.join(_cells(setting, has_body=True))} |\n" for setting in sampling)
    more = "".join(f"| {' | '.join(_cells(setting, has_body=False))} |\n" for setting in engine)
    return f"{_HEAD}{_SAMPLING}{rows}{_ENGINE}{more}"


def _cells(setting: Setting, *, has_body: bool) -> Iterator[str]:
    none = setting.kind.none
    as_none = none if none is None or none == "none" else f"None: {none}"
    yield f"`{setting.name}`"
    yield f"`{setting.default}`" if setting.default != () else ""
    yield "; ".join(filter(None, (setting.kind.limits, as_none)))
    yield _code(setting.cli or setting.cli_of_serve)
    if has_body:
        yield _code(setting.api)
    yield setting.help


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


if __name__ == "__main__":
    PAGE.write_text(page())
