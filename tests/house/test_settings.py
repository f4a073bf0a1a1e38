"""A setting is declared once: what is made of the declarations is whole, and so is the page."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from repository import PACKAGE_DIR

from hypocenter.cli.options import EngineOptions, SamplingOptions
from hypocenter.server.fields import ChatBody, CompletionBody
from hypocenter.settings.config import EngineConfig, EngineFields, SamplingFields, SamplingParams
from hypocenter.settings.setting import Setting, settings_of
from tools.settings_page import PAGE, page

DECLARED = {kind: settings_of(kind) for kind in (SamplingParams, EngineConfig)}
ALL = [setting for declared in DECLARED.values() for setting in declared.values()]
#: A setting that nobody has, as it would be declared.
_PLANTED = """
    brightness: float = setting(
        0.5,
        RealNumber(low=0.0, high=2.0),
        "How bright an answer is.",
        cli=("--brightness",),
        api=("brightness", "luminosity"),
        api_default=0.25,
    )
"""
_PLANTED_IN_ENGINE = """
    num_lamps: int = setting(
        3, Whole(low=1, high=9), "Lamps that shine on it.", cli=("--lamps", "--num-lamps")
    )
"""
_ASKS = """
import asyncio, json
from hypocenter.cli.app import main
from hypocenter.cli.options import EngineOptions, SamplingOptions
from hypocenter.settings.config import EngineConfig, SamplingParams
from hypocenter.base.errors import UsageError
from hypocenter.server.api_error import ApiError
from hypocenter.server.bodies.sampling_fields import chat_params, completion_params
from hypocenter.server.fields import ChatBody, CompletionBody, read_body

def refusal(make, error):
    try:
        return str(make())
    except error as refused:
        return str(refused)

def served(body, kind, params):
    read, unknown = asyncio.run(read_body(json.dumps(body).encode(), kind))
    assert not unknown, unknown
    return params(read)

ask, chat = {"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}
told = {
    "python": SamplingParams(brightness=1).brightness,
    "default": SamplingParams().brightness,
    "refused": refusal(lambda: SamplingParams(brightness=3), UsageError),
    "option": SamplingOptions(brightness=1.5).params().brightness,
    "option refused": refusal(SamplingOptions(brightness=3).params, UsageError),
    "body": served({**ask, "brightness": 2}, CompletionBody, completion_params).brightness,
    "other name": served({**chat, "luminosity": 2}, ChatBody, chat_params).brightness,
    "body's default": served(ask, CompletionBody, completion_params).brightness,
    "body refused": refusal(
        lambda: served({**ask, "brightness": 3}, CompletionBody, completion_params), ApiError
    ),
    "other word": refusal(lambda: SamplingParams(luminosity=1), UsageError),
    "lamps": EngineOptions(num_lamps=4).config().num_lamps,
    "lamps by default": EngineConfig() == EngineOptions().config() and EngineConfig().num_lamps,
    "lamps refused": refusal(EngineOptions(num_lamps=10).config, UsageError),
    "lamps by another name": refusal(lambda: EngineConfig(lamps=1), UsageError),
    "docstring": "brightness (default 0.5): How bright an answer is." in SamplingParams.__doc__,
}
print(json.dumps(told), flush=True)
main(["run", "--help"])
"""


def test_a_planted_setting_needs_an_edit_in_one_file(tmp_path: Path) -> None:
    package = tmp_path / "hypocenter"
    shutil.copytree(PACKAGE_DIR, package, ignore=shutil.ignore_patterns("__pycache__"))
    config = package / "settings" / "config.py"
    text = config.read_text()
    for planted, cls in ((_PLANTED, SamplingParams), (_PLANTED_IN_ENGINE, EngineConfig)):
        place = text.index("    def __post_init__", text.index(f"class {cls.__name__}"))
        text = f"{text[:place].rstrip()}{planted}\n{text[place:]}"
    config.write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", _ASKS],
        env={"PYTHONPATH": str(tmp_path), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.startswith("{"), done.stderr
    told, shown = done.stdout.split("\n", 1)
    limits = "is 3, but must be from 0.0 to 2.0"
    assert json.loads(told) == {
        "python": 1,
        "default": 0.5,
        "refused": f"brightness {limits}",
        "option": 1.5,
        "option refused": f"--brightness {limits}",
        "body": 2,
        "other name": 2,
        "body's default": 0.25,
        "body refused": f"brightness {limits.replace('3', '3.0')}",
        "other word": "SamplingParams has no 'luminosity'; here it is called brightness",
        "lamps": 4,
        "lamps by default": 3,
        "lamps refused": "--lamps/--num-lamps is 10, but must be from 1 to 9",
        "lamps by another name": "EngineConfig has no 'lamps'; here it is called num_lamps",
        "docstring": True,
    }
    assert "--brightness FLOAT" in shown
    assert "Lamps that shine on it. [default: 3]" in shown
    assert "How bright an answer is. [default: 0.5]" in shown


@pytest.mark.parametrize(
    ("settings", "keywords"), [(SamplingParams, SamplingFields), (EngineConfig, EngineFields)]
)
def test_type_checkers_know_each_keyword_as_the_field_it_is(
    settings: type[Any], keywords: type[Any]
) -> None:
    assert get_type_hints(keywords) == get_type_hints(settings)
    assert list(get_type_hints(settings)) == list(settings_of(settings))


@pytest.mark.parametrize("setting", ALL, ids=lambda setting: setting.name)
def test_a_default_is_within_the_limits(setting: Setting) -> None:
    assert setting.kind.settle(setting.name, setting.default) == setting.default
    assert setting.help.endswith(".")


@pytest.mark.parametrize(
    ("settings", "options"), [(SamplingParams, SamplingOptions), (EngineConfig, EngineOptions)]
)
def test_an_option_is_there_by_each_word_that_is_declared(
    settings: type[Any], options: type[Any]
) -> None:
    hints = get_type_hints(options, include_extras=True)
    for setting in settings_of(settings).values():
        assert (setting.name in hints) == bool(setting.cli)
        if setting.cli:
            assert hints[setting.name].__metadata__[0].name == setting.cli


def test_a_body_has_each_field_that_is_declared() -> None:
    known = {*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__}
    for setting in settings_of(SamplingParams).values():
        assert setting.api, setting.name
        assert known >= {*setting.api}


def test_the_page_of_all_settings_is_made_of_the_declarations() -> None:
    assert PAGE.read_text() == page(), "run python -m tools.settings_page"
