"""Names of other engines are answered with what to type here, and what is said is true."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import hypocenter
from hypocenter import LLM, AsyncLLM, EngineConfig, SamplingParams
from hypocenter.base.errors import UsageError
from hypocenter.settings.setting import defaults, settings_of
from hypocenter.settings.synonyms import _OURS, _WAYS_OUT, explain_unknown

OWNERS: dict[str, Any] = {"SamplingParams": SamplingParams, "EngineConfig": EngineConfig}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_threads=1, context_length=64) as llm:
        yield llm


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: SamplingParams(repetition_penalty=1.1), "here it is called repeat_penalty"),  # type: ignore[call-arg]
        (lambda: SamplingParams(max_new_tokens=3), "here it is called max_tokens"),  # type: ignore[call-arg]
        (lambda: SamplingParams(response_format={}), "grammar, regex or choice"),  # type: ignore[call-arg]
        (lambda: SamplingParams(tempreature=1), "did you mean temperature?"),  # type: ignore[call-arg]
        (lambda: SamplingParams(zzz=1), "it has max_tokens, temperature"),  # type: ignore[call-arg]
        (lambda: EngineConfig(n_ctx=512), "here it is called context_length"),  # type: ignore[call-arg]
        (lambda: EngineConfig(tensor_parallel_size=2), "here it is called tensor_parallel"),  # type: ignore[call-arg]
        (lambda: LLM(gpu_memory_utilization=0.5), "here it is called gpu_memory_fraction"),  # type: ignore[call-arg]
        (lambda: LLM(model="x.gguf"), "here it is called path, the first argument"),  # type: ignore[call-arg]
        (lambda: LLM(n_gpu_layers=99), 'device="cuda" runs all layers'),  # type: ignore[call-arg]
    ],
)
def test_a_field_of_another_engine_is_answered(make: Callable[[], object], told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_call_answers_as_the_settings_do(llm: LLM) -> None:
    unknown: dict[str, Any] = {"repetition_penalty": 1.1}
    for call in (llm.generate, llm.stream, llm.requests):
        for params in (None, SamplingParams()):
            with pytest.raises(UsageError, match="called repeat_penalty"):
                call("x", params, **unknown)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tokenize", "here it is called tokenizer.encode"),
        ("generate_async", "AsyncLLM has generate"),
        ("genrate", "did you mean generate?"),
    ],
)
def test_a_method_of_another_engine_is_answered(llm: LLM, name: str, told: str) -> None:
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=re.escape(told)):
        getattr(llm, name)


def test_settings_keep_their_signature_and_can_be_copied() -> None:
    for settings in (SamplingParams, EngineConfig):
        assert list(inspect.signature(settings).parameters) == list(defaults(settings))
    params = SamplingParams(max_tokens=3, stop="x")
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params


def test_a_model_is_not_copied(llm: LLM) -> None:
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(UsageError, match="open its file in each process"):
            copied(llm)


def test_what_is_said_to_be_called_so_is_there(llm: LLM) -> None:
    for owner, kind in OWNERS.items():
        declared = settings_of(kind).values()
        of_settings = {other: one.name for one in declared for other in one.other_names}
        for foreign, ours in {**_OURS[owner], **of_settings}.items():
            assert foreign not in defaults(kind) or foreign == ours
            is_method = ours.startswith("LLM.") and hasattr(LLM, ours.removeprefix("LLM."))
            assert is_method or ours in defaults(kind) or ours.startswith("path, ")
    for foreign, ours in _OURS["LLM"].items():
        assert not hasattr(llm, foreign)
        found: Any = llm
        for part in ours.split("."):
            found = getattr(found, part)
    for told in _WAYS_OUT.values():
        for sentence in told.values():
            for owner, name in re.findall(r"\b(LLM|AsyncLLM)\.(\w+)", sentence):
                assert hasattr(getattr(hypocenter, owner), name), sentence
    for name in ("generate", "stream", "chat", "stream_chat"):
        assert hasattr(AsyncLLM, name)


@pytest.mark.parametrize("owner", sorted(_OURS))
def test_no_name_is_answered_twice(owner: str) -> None:
    assert not _OURS[owner].keys() & _WAYS_OUT[owner].keys()
    assert explain_unknown(owner, "zzz", ["a", "b"]) == f"{owner} has no 'zzz'; it has a, b"
