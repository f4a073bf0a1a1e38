"""A setting that is refused from Python is named as it was written, with what would do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType
from models.demo_variants import demo_with

from hypocenter import LLM, AsyncLLM, EngineConfig, SamplingParams
from hypocenter.base.errors import BadSetting, ContextOverflow, UsageError
from hypocenter.settings.setting import defaults

BAD: list[Any] = [
    -1, "a", "", None, float("nan"), float("inf"), 10**9, 10**400, 1.5, True, [5], {}, b"x",
    object(), np.float32(0.5), np.int64(-1), np.zeros(2), [""] * 2, ["a"] * 17,
]  # fmt: skip
#: A word of the command line.
OPTION = re.compile(r"(^|[ (])--?[a-z]")
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
FIELDS = [(kind, name) for kind in (SamplingParams, EngineConfig) for name in defaults(kind)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "chat.gguf"
    return demo_with(path, {"tokenizer.chat_template": (TEMPLATE, GGUFValueType.STRING)})


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, num_threads=1, context_length=64) as llm:
        yield llm


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_whatever_a_field_is_given_is_taken_or_refused_by_its_name(
    kind: type[Any], field: str
) -> None:
    num_refused = 0
    for value in BAD:
        try:
            settings = kind(**{field: value})
        except UsageError as error:
            num_refused += 1
            told = str(error)
            assert told.startswith((f"{field} is ", f"{field} has ")), told
            assert ", but " in told
            assert not OPTION.search(told)
            assert "\n" not in told
        else:
            assert type(getattr(settings, field)).__module__ == "builtins"
    assert num_refused > 7


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_tokens": -1}, "max_tokens is -1, but must be from 0 to 2147483648, or None: until"),
        ({"max_tokens": "a"}, "max_tokens is 'a', but must be a whole number, or None"),
        ({"temperature": -1}, "temperature is -1, but must be from 0.0 to 100.0"),
        ({"top_k": -1}, "top_k is -1, but must be from 0 to 1048576; 0 switches it off"),
        ({"stop": 5}, "stop is 5, but must be a text or a sequence of texts"),
        ({"stop": b"x"}, "stop is b'x', but must be a text"),
        ({"stop": ["a", ""]}, "stop is '', but an empty text would end nothing; leave it out"),
        ({"stop": ["a"] * 17}, "stop has 17 texts, but at most 16 are allowed"),
        ({"logprobs": 21}, "logprobs is 21, but must be from 0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1, but must be from 0 to 20"),
    ],
)
def test_a_call_refuses_what_it_cannot_sample_with(
    llm: LLM, fields: dict[str, Any], told: str
) -> None:
    for call in (llm.generate, llm.stream, llm.requests):
        with pytest.raises(UsageError, match="^" + re.escape(told)):
            call("x", **fields)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"context_length": 0}, "context_length is 0, but must be from 1 to 16777216, or None"),
        ({"context_length": 513}, "context_length is 513, but the model was trained for 512"),
        ({"tokenizer_pre": 5}, "tokenizer_pre is 5, but must be a text"),
        ({"tokenizer_pre": "zzz"}, "tokenizer_pre is 'zzz', but known names are"),
        ({"chat_template": []}, "chat_template is [], but must be a text"),
        ({"chat_template": "zzz"}, "chat_template is 'zzz', but "),
        ({"float_products": "bf16"}, "float_products is 'bf16', but "),
        ({"progress": 5}, "progress is 5, but must be a function of two arguments"),
    ],
)
def test_a_model_is_not_opened_with_what_it_cannot_run(
    path: Path, fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError, match="^" + re.escape(told)) as caught:
        LLM(path, num_threads=1, **fields)
    assert not OPTION.search(str(caught.value))


def test_a_prompt_too_long_speaks_of_the_field(llm: LLM) -> None:
    with pytest.raises(ContextOverflow, match=r"or raise context_length, up to 512$"):
        llm.generate("x " * 200)


def test_a_refusal_of_one_of_several_says_which(llm: LLM) -> None:
    with pytest.raises(ContextOverflow) as caught:
        llm.generate(["x", "y", "x " * 200])
    assert caught.value.__notes__ == ["this is prompt 2 of 0 to 2"]
    one = [{"role": "user", "content": "x"}]
    with pytest.raises(UsageError) as told:
        llm.chat([one, [{"role": "user", "content": 5}]])
    assert told.value.__notes__ == ["this is conversation 1 of 0 to 1"]
    with pytest.raises(ContextOverflow) as alone:
        llm.generate("x " * 200)
    assert not hasattr(alone.value, "__notes__")


@pytest.mark.parametrize("messages", ["hi", 5, None, {}, {"role": "user", "content": "x"}])
def test_what_are_no_messages_is_refused(llm: LLM, messages: Any) -> None:
    for call in (llm.chat, llm.stream_chat, llm.encode_chat):
        with pytest.raises(UsageError, match=r"^messages is .*, but must be a list of messages"):
            call(messages)


def test_numbers_of_numpy_are_numbers(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=np.int64(2),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        seed=np.uint64(7),  # type: ignore[arg-type]
    )
    assert params == SamplingParams(max_tokens=2, temperature=0.5, seed=7)
    assert len(llm.sample("x", np.int64(2), params)) == 2  # type: ignore[arg-type]


def test_what_python_may_give_beyond_an_option_is_not_said_of_the_option() -> None:
    with pytest.raises(BadSetting) as caught:
        SamplingParams(seed=-1)
    assert str(caught.value).endswith(", or None: another one each time")
    assert "None" not in caught.value.text_for("--seed")


def test_an_async_model_says_where_the_rest_is() -> None:
    for name, told in (
        ("tokenizer", "its property llm has it"),
        ("embed", "its property llm has it"),
        ("genrate", "did you mean generate?"),
    ):
        with pytest.raises(AttributeError, match=re.escape(told)):
            getattr(object.__new__(AsyncLLM), name)


@pytest.mark.parametrize(
    ("device", "given", "most"),
    [("cpu", None, 512), ("sim:h200", None, 512), ("cuda:1", None, 2048), ("hip", 64, 64)],
)
def test_a_step_of_a_gpu_takes_more_tokens(device: str, given: int | None, most: int) -> None:
    assert EngineConfig(device=device, max_batch_tokens=given).step_tokens == most
