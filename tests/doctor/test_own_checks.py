"""What the engine's own Python raised: the statement, and the class of what it keeps book of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from recorded.bundles import REQUEST, Run, decoder, inputs, tensors_of_decoder

from hypocenter.base.errors import TokenizerError
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis
from hypocenter.doctor.doctor import diagnose
from hypocenter.engine import kv_cache
from hypocenter.engine.kv_cache import BlockDigests
from hypocenter.record.bundle import Bundle
from hypocenter.record.events import Called, Rejected
from hypocenter.record.fault_record import FaultRecord
from hypocenter.record.raised import raised_in, statement_at
from hypocenter.record.recorder import event_of_error

NO_REPLAY = ("replay", "hang")
ERROR = FaultRecord(kind="error", message="AssertionError: (3, 16, 41)", is_asynchronous=False)


def bundle_of(error: BaseException) -> Bundle:
    """A run of two steps, the second of which raised."""
    run = Run()
    tensors_of_decoder(run)
    plan = decoder(run)
    run.run(plan, inputs(), (REQUEST,))
    made = event_of_error(error, None, seq=90, step=2)
    fields: dict[str, Any] = {name: getattr(made, name) for name in made.__struct_fields__}
    run.emit(type(made), **{name: fields[name] for name in fields if name not in ("seq", "step")})
    return run.bundle(ERROR)


def found_in(error: BaseException) -> Diagnosis:
    found = diagnose(bundle_of(error), without=NO_REPLAY)
    assert all(not rung.left_out or rung.name in NO_REPLAY for rung in found.rungs), found.rungs
    return found


def failed_check() -> AssertionError:
    with pytest.raises(AssertionError) as caught:
        BlockDigests(16, "").first(3, [1] * 41)
    return caught.value


def test_a_check_that_did_not_hold_is_named_with_its_statement() -> None:
    root = found_in(failed_check()).roots[0]
    assert root.cause is Cause.FOREIGN_BLOCK
    assert root.file == kv_cache.__file__
    assert root.expression is not None
    assert root.expression.startswith("assert num_blocks * size <= len(token_ids)")
    assert statement_at(kv_cache.__file__, root.line or 0) == root.expression
    assert "BlockDigests.first in engine.kv_cache" in root.sentence
    assert "(3, 16, 41)" in root.sentence
    assert root.culprit is not None
    assert root.culprit.place == f"{root.file}:{root.line}"


def test_it_explains_an_error_and_says_where_that_surfaced() -> None:
    found = found_in(failed_check())
    assert found.is_proven
    assert found.surfaced.startswith("the engine's own Python ended it, at BlockDigests.first (eng")
    assert found.surfaced.endswith("after 4 launches")
    assert found.roots[0].proof.green == "0 steps before ended without it, and this one did not"


def test_the_statement_is_recorded_with_its_module_and_function() -> None:
    error = failed_check()
    [place] = raised_in(error)
    event = event_of_error(error, None, seq=1, step=1)
    assert isinstance(event, Called)
    assert (place.module, place.function) == ("engine.kv_cache", "BlockDigests.first")
    assert event.raised_in == (place,)


def test_an_operation_that_failed_in_a_module_without_books_is_named_as_such() -> None:
    with pytest.raises(Exception) as caught:
        statement_at(__file__, "no number")  # type: ignore[arg-type]
    root = found_in(caught.value).roots[0]
    assert root.cause is Cause.BROKEN_CHECK
    assert "fails (TypeError" in root.sentence


def test_what_is_raised_on_purpose_and_what_a_machine_lacks_blame_no_line() -> None:
    for kind in (TokenizerError, MemoryError, OSError, RuntimeError):
        assert raised_in(kind("no").with_traceback(failed_check().__traceback__)) == (), kind


def test_a_plan_that_fails_is_no_wrong_input_of_its_caller() -> None:
    """Whoever asked for the plan keeps book of something else."""
    places = raised_in(failed_check())
    of_planner = msgspec.structs.replace(places[0], module="model.decoder")
    of_caller = msgspec.structs.replace(places[0], module="engine.runner")
    run = Run()
    tensors_of_decoder(run)
    run.run(decoder(run), inputs(), (REQUEST,))
    run.emit(Called, call="AssertionError", outcome="no", raised_in=(of_planner, of_caller))
    root = diagnose(run.bundle(ERROR), without=NO_REPLAY).roots[0]
    assert root.cause is Cause.BROKEN_CHECK


def test_a_statement_of_several_lines_is_whole() -> None:
    lines = Path(__file__).read_text().splitlines()
    at = 1 + next(at for at, text in enumerate(lines) if text.startswith("VALUES = ("))
    for line in (at, at + 1, at + 2):
        assert statement_at(__file__, line).startswith("VALUES = ( 1, )")
    assert statement_at(__file__, 10**6) == ""


VALUES = (
    1,
)  # fmt: skip


def test_a_token_that_is_none_blames_the_launch_that_chose_it() -> None:
    run = Run()
    tensors_of_decoder(run)
    run.tensor("outcomes", "I32", 2)
    chose = run.launch("greedy_rows", {"outcomes": "outcomes"})
    plan = run.plan(chose)
    run.run(plan, {}, ())
    error = TokenizerError.outside(600, 512)
    made = event_of_error(error, None, seq=90, step=1)
    assert isinstance(made, Rejected)
    run.emit(Rejected, refusal=made.refusal)
    root = diagnose(run.bundle(ERROR), without=NO_REPLAY).roots[0]
    assert root.cause is Cause.TOKEN_RANGE
    assert "chose token 600, but the vocabulary has 512 entries" in root.sentence


def test_a_statement_that_is_wrong_itself_blames_no_book() -> None:
    with pytest.raises(TypeError) as caught:
        BlockDigests(16, "").first("two", [1] * 41)  # type: ignore[arg-type]
    root = found_in(caught.value).roots[0]
    assert root.cause is Cause.BROKEN_CHECK
    assert root.file == kv_cache.__file__
