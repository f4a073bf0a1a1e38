"""What a failed assertion compared: the two tensors, the first element that differs, the line."""

from __future__ import annotations

import contextlib
import linecache
import operator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from hypocenter.foreign.comparing.watch import MAX_PASSED, Comparisons  # noqa: E402

BEGIN = """
import numpy as np
import torch
out = torch.arange(12, dtype=torch.float32).reshape(3, 4)
want = torch.arange(12, dtype=torch.float32).reshape(3, 4)
out[1, 2] = 60
out[2, 0] = 8.5
box = {"out": out}
def right(x): return x.clone()
"""


class Watched:
    """Runs programs beside the watch; `told` is what it told of each."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for owner in (torch, torch.Tensor):
            for name in ("equal", "allclose"):
                monkeypatch.setattr(owner, name, getattr(owner, name))
        monkeypatch.setattr(torch.testing, "assert_close", torch.testing.assert_close)
        self.folder, self.names = folder, dict[str, Any]()
        self.told: list[dict[str, Any]] = []
        self.passed: list[dict[str, Any]] = []
        #: Whether launches were given everything, nothing, or `out` alone.
        self.given, self.origin = "everything", "apart"
        recorder: Any = SimpleNamespace(
            reads=SimpleNamespace(
                quiet=contextlib.nullcontext, origin_of=lambda one, other: self.origin
            ),
            allocation_of=lambda tensor: 7 * self.has_given(tensor),
            record_equal=lambda **fields: self.passed.append(fields),
            record_compared=lambda **fields: self.told.append(fields),
            keeps_contents=False,
        )
        self.recorder = recorder
        self.comparisons = Comparisons(lambda: recorder, operator.call)
        self.comparisons.watch(torch)

    def has_given(self, tensor: Any) -> bool:
        is_out = tensor.data_ptr() == self.names["out"].data_ptr()
        return self.given == "everything" or (self.given == "out" and is_out)

    def run(self, text: str) -> dict[str, Any] | None:
        """The program ends with an exception, which is told as the last one."""
        file = self.folder / "program.py"
        file.write_text(BEGIN + text)
        linecache.checkcache(str(file))
        self.told.clear()
        try:
            self.names = {}
            exec(compile(BEGIN + text, str(file), "exec"), self.names)
        except Exception as error:
            self.comparisons.note_end(error, error.__traceback__)
            return self.told[0] if self.told else None
        raise AssertionError("the program has ended well")


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("assert torch.equal(out, want)", ("out", "want")),
        ("assert out.equal(want), 'wrong'", ("out", "want")),
        ("assert torch.allclose(out, right(want), atol=1e-3)", ("out", "right(want)")),
        ("torch.testing.assert_close(out, want)", ("out", "want")),
        ("np.testing.assert_allclose(out.numpy(), want.numpy())", ("out", "want")),
        ("assert (out == want).all()", ("out", "want")),
        ("assert torch.all(out == want)", ("out", "want")),
        ("assert (out.double() - want).abs().max().item() < 0.25", ("out", "want")),
        ("error = torch.max(torch.abs(out - want))\nprint(error)\nassert error < 0.25",
         ("out", "want")),
        ("limit = 0.25\nassert float((out - want).abs().max()) <= limit", ("out", "want")),
        ("same = torch.equal(out, want)\nprint(same)\nassert same", ("out", "want")),
        ("assert True and torch.equal(want, box['out'])", ("want", "box['out']")),
        ("def check(a, b):\n    assert torch.allclose(a, b)\ncheck(out, want)", ("a", "b")),
    ],
)  # fmt: skip
def test_the_first_element_that_differs_is_told(
    watched: Watched, text: str, names: tuple[str, str]
) -> None:
    told = watched.run(text)
    assert told is not None
    assert (told["index"], told["is_first"]) == ((1, 2), True)
    assert (told["num_different"], told["num_elements"], told["shape"]) == (2, 12, (3, 4))
    assert tuple(side.name for side in told["sides"]) == names
    values = {side.name: side.value for side in told["sides"]}
    assert sorted(values.values()) == [6.0, 60.0]
    assert values[names[0]] == (6.0 if names[0] == "want" else 60.0)
    assert told["sides"][0].allocation == 7
    line = told["site"].rpartition(":")[2]
    assert linecache.getline(str(watched.folder / "program.py"), int(line)).strip() in text


def test_the_address_is_that_of_the_element(watched: Watched) -> None:
    told = watched.run("held = out\nprint(held.data_ptr())\nassert torch.equal(held.t(), want.t())")
    assert told is not None
    one, other = told["sides"]
    assert told["index"] == (0, 2)  # of the turned one
    assert (one.value, other.value) == (8.5, 8.0)
    assert one.address != other.address
    assert (one.address - other.address) % 4 == 0


def test_of_whole_numbers_more_elements_are_kept(watched: Watched) -> None:
    told = watched.run("a, b = out.long(), want.long()\nassert torch.equal(a, b)")
    assert told is not None
    one, other = told["sides"]
    assert (one.value, other.value) == (60, 6)
    assert told["num_different"] == 1  # 8.5 is 8
    told = watched.run("a = out.long()\nassert torch.equal(a + 1, a)")
    assert told is not None
    one, other = told["sides"]
    assert len(one.others) == len(other.others) == 11
    assert [value for _, value in one.others[:3]] == [2, 3, 4]
    assert other.others[0] == (other.address + 8, 1)


def test_where_a_tolerance_is_not_known_the_largest_difference_is_told(watched: Watched) -> None:
    told = watched.run("error = (out - want).abs().mean()\nassert error < 0.25")
    assert told is not None
    assert (told["index"], told["is_first"], told["num_different"]) == ((1, 2), False, 2)


def test_numbers_are_kept_where_contents_are_and_what_was_allowed_always(watched: Watched) -> None:
    text = "assert torch.allclose(out.t(), want.t(), rtol=0.0, atol=0.25)"
    told = watched.run(text)
    assert told is not None
    assert (told["rtol"], told["atol"], told["sides"][0].data) == (0.0, 0.25, b"")
    watched.recorder.keeps_contents = True
    told = watched.run(text)
    assert told is not None
    held = [torch.frombuffer(bytearray(side.data), dtype=torch.float32) for side in told["sides"]]
    assert held[1].tolist() == torch.arange(12.0).reshape(3, 4).t().flatten().tolist()
    assert (held[0] != held[1]).nonzero().flatten().tolist() == [2, 7]  # of (4, 3), row by row
    told = watched.run("\n\nerror = (out - want).abs().mean()\nassert error < 0.25")
    assert told is not None
    assert (told["rtol"], told["atol"]) == (None, None)
    large = "\n\n\n\nheld = torch.zeros(1 << 15)\nassert torch.equal(held, held + 1)"
    told = watched.run(large)
    assert told is not None
    assert told["sides"][0].data == b""


def test_differences_that_are_allowed_are_none(watched: Watched) -> None:
    told = watched.run("assert (out - want).abs().max() < 1.0")
    assert told is not None
    assert (told["num_different"], told["index"]) == (1, (1, 2))


@pytest.mark.parametrize(
    "text",
    [
        "same = torch.tensor(out.sum() == want.sum())\nassert same",
        # Bound again behind the comparison: what the name stands for now was not compared.
        "error = (out - want).abs().max()\nwant = right(want)\nassert error < 0.25",
        "assert out.sum() > 1e6",
        "assert right(out).sum() == want.sum()",
        "assert len(out) == 5",
        "raise RuntimeError('torch.equal(out, want)')",
        "torch.equal(out, want).nothing",
        "torch.equal(out, want)\nassert False",
        "torch.equal(out, want)\nassert torch.equal(want, right(want[0]))",
        "assert (out[:2] - want[1:]).abs().max() < 1e9 and 1 > 2",
    ],
)
def test_what_was_not_compared_is_not_told(watched: Watched, text: str) -> None:
    assert watched.run(text) is None


def test_memory_that_no_launch_was_given_is_of_no_interest(watched: Watched) -> None:
    watched.given = "nothing"
    assert watched.run("assert torch.equal(out, want)") is None


@pytest.mark.parametrize(
    "text",
    [
        "got = out.cpu().clone()\nassert torch.equal(got, want)",
        "got = out.double().clone()\nprint(got)\nassert (got - want).abs().max() < 0.25",
        "got = out.clone().numpy()\nnp.testing.assert_allclose(got, want.numpy())",
    ],
)
def test_a_copy_is_followed_to_what_it_was_made_of(watched: Watched, text: str) -> None:
    watched.given = "out"
    told = watched.run(text)
    assert told is not None
    one, other = told["sides"]
    assert (one.name, one.value, one.allocation, other.allocation) == ("got", 60.0, 7, 0)
    assert one.address == watched.names["out"][1, 2].data_ptr()


@pytest.mark.parametrize(
    "text",
    [
        "got = out.clone()\nout[1, 2] = 61\nassert torch.equal(got, want)",
        "got = out.clone()\nout = right(out)\nassert torch.equal(got, want)",
        "got = right(out)\nassert torch.equal(got, want)",
        "got = out * 2\nassert torch.equal(got, want)",
    ],
    ids=["changed", "bound again", "a function", "other numbers"],
)
def test_what_is_no_copy_any_more_is_not_followed(watched: Watched, text: str) -> None:
    watched.given = "out"
    assert watched.run(text) is None


_KEYS = "vocab = 7\nkeys, wanted = out.long(), want.long()\n"
_COMPARED = "\nassert torch.equal(keys, wanted)"


@pytest.mark.parametrize(
    ("text", "divisors"),
    [
        ("rows, ids = keys // vocab, keys % vocab", (7,)),
        ("again = keys.unique()\nlast = again[1:]\nrows, ids = last // 7, last % 7", (7,)),
        ("rows, ids = divmod(keys.numpy(), vocab)", (7,)),
        ("rows = torch.div(keys, vocab, rounding_mode='floor')\nids = keys.remainder(vocab)", (7,)),
        ("rows, ids = wanted // vocab, wanted % vocab", ()),  # the other side is taken apart
        ("rows, ids = keys // vocab, keys % 5", ()),
        ("rows = keys // vocab", ()),
        ("slots = keys % vocab", ()),
        ("rows, ids = keys / vocab, keys % vocab", ()),
        ("at = torch.arange(12)\nrows, ids = at // vocab, at % vocab", ()),
        ("rows, ids = keys // unknown(), keys % unknown()", ()),
    ],
)
def test_by_what_the_program_takes_a_side_apart_is_told(
    watched: Watched, text: str, divisors: tuple[int, ...]
) -> None:
    text = text.replace("unknown()", "len('seven')")
    told = watched.run(_KEYS + text + _COMPARED)
    assert told is not None
    keys, wanted = told["sides"]
    assert keys.divisors == divisors
    assert wanted.divisors == ((7,) if text.startswith("rows, ids = wanted") else ())


def test_what_is_made_together_with_a_side_is_taken_apart_for_it(watched: Watched) -> None:
    text = """
def made(vocab):
    keys = out.long()
    return keys, keys.unique()
wanted = want.long()
for vocab in (7, 9):
    keys, again = made(vocab)
    rows, ids = again // vocab, again % vocab
    if vocab > 7:
        assert torch.equal(keys, wanted)
"""
    told = watched.run(text)
    assert told is not None
    assert told["sides"][0].divisors == (9,)


@pytest.mark.parametrize(
    ("text", "num_passed"),
    [
        ("torch.equal(out, right(out))", 1),
        ("assert right(out).equal(out)", 1),
        ("torch.allclose(input=out, other=right(out), rtol=1e-3)", 1),
        ("torch.testing.assert_close(out, right(out))", 1),
        ("torch.equal(out, out)", 2),  # each side is told of, and where the other came from
        ("torch.equal(want, right(want))", 0),
        ("torch.equal(out, want)", 0),
        ("[torch.equal(out, right(out)) for _ in range(100)]", MAX_PASSED),
    ],
)
def test_what_a_program_found_right_is_told(watched: Watched, text: str, num_passed: int) -> None:
    watched.given = "out"
    watched.run(f"{text}\nraise KeyError")
    assert len(watched.passed) == num_passed
    for passed in watched.passed:
        assert (passed["allocation"], passed["num_elements"]) == (7, 12)
        assert passed["site"].endswith("program.py:" + str(BEGIN.count("\n") + 1))
        assert (passed["dtype"], passed["origin"]) == ("F32", "apart")


@pytest.mark.parametrize(
    ("text", "allowed", "share"),
    [
        ("torch.equal(out, right(out))", 0.0, 1.0),
        ("torch.allclose(out, right(out))", 60e-5 + 1e-8, 1.0),
        ("torch.testing.assert_close(out, right(out))", 60 * 1.3e-6 + 1e-5, 1.0),
        (
            "torch.allclose(out, right(out), rtol=0, atol=2.4)",
            2.4,
            2 / 8,
        ),  # columns: few are so far
        ("torch.allclose(out, right(out), rtol=0, atol=100.0)", 100.0, 0.0),
        ("out[:] = torch.arange(3.0)[:, None]; torch.equal(out, right(out))", 0.0, 1.0),
        ("out.fill_(7); torch.equal(out, right(out))", 0.0, 0.0),
    ],
)
def test_how_much_a_comparison_allowed_is_told_beside_how_its_numbers_differ(
    watched: Watched, text: str, allowed: float, share: float
) -> None:
    watched.given = "out"
    watched.run(f"{text}\nraise KeyError")
    [passed] = watched.passed
    assert passed["allowed"] == pytest.approx(allowed)
    assert passed["share_unlike"] == pytest.approx(share)
    assert passed["largest"] == watched.names["out"].max().item()
