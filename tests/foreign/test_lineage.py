"""What torch's operations and launches make of a result, and what is known of a comparison."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from hypocenter.cli import app

torch: Any = pytest.importorskip("torch")
pytest.importorskip("triton")

from hypocenter.foreign.comparing.lineage import MAX_NOTED, Lineage  # noqa: E402


class Watched:
    """A result `out` of a kernel that casts, made of `x` by `ids`; operations are noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_begun = 0
        self.lineage = Lineage(self._begin)
        self.uses = {"x": (True, False), "ids": (True, False), "out": (False, True)}
        monkeypatch.setattr(
            "hypocenter.foreign.comparing.lineage.uses_of", lambda jit: getattr(self, jit)
        )
        self.x, self.ids = torch.arange(10.0), torch.arange(4)
        self.out, self.rival = torch.zeros(4), torch.zeros(4)

    def _begin(self) -> None:
        self.num_begun += 1

    def launch(self, name: str = "gather", *, casts: bool = True, **given: Any) -> None:
        self.lineage.note_launch("uses", name, given, casts=casts)

    def run(self, text: str) -> dict[str, Any]:
        lineage = self.lineage

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                result = func(*args, **(kwargs or {}))
                lineage.note(func, args, kwargs or {}, result)
                return result

        names = {"torch": torch, "w": self, "x": self.x, "ids": self.ids, "out": self.out}
        with Watch():
            exec(text, names)
        return names


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Threads that earlier tests have left do not count."""
    count = threading.active_count
    num_before = count()
    monkeypatch.setattr(threading, "active_count", lambda: 1 + count() - num_before)
    made = Watched(monkeypatch)
    made.launch(x=made.x, ids=made.ids, out=made.out)
    return made


CASES = [
    ("ref = x[ids]", "apart"),
    ("ref = torch.stack([x[i] for i in ids])", "apart"),
    ("ref = torch.empty(4); ref.copy_(x[ids])", "apart"),
    ("ref = out", "derived"),
    ("ref = out[:]", "derived"),
    ("ref = out.clone()", "derived"),
    ("ref = out.double().float()", "derived"),
    ("ref = torch.empty(4); ref.copy_(out)", "derived"),
    ("ref = torch.zeros(4); ref[2:] = out[2:]", "derived"),
    ("ref = torch.zeros(4); ref += out * 2 - out", "derived"),
    ("ref = torch.cat([x[:2], out[2:]])", "derived"),
    ("ref = out.clone(); ref.copy_(x[ids])", "apart"),  # all of it is written anew
    ("ref = out.clone(); ref[1:].copy_(x[ids][1:])", "derived"),
    ("ref = torch.zeros_like(out)", "apart"),
    # another run of the same kernel
    ("w.launch(x=x, ids=ids, out=w.rival); ref = w.rival.clone()", "derived"),
    # another kernel, of the result and of the same inputs
    ("w.launch('add', casts=False, x=out, ids=ids, out=w.rival); ref = w.rival", "derived"),
    ("w.launch('take', casts=False, x=x, ids=ids, out=w.rival); ref = w.rival", "apart"),
    # by way of the host
    ("ref = x[ids]; out.sum().item()", "apart"),
    ("ref = torch.full((4,), out[0].item())", "unknown"),
    ("ref = torch.tensor([v.item() for v in out])", "unknown"),
    ("bool((out == out).all()); ref = torch.tensor([1.0, 2, 3, 4])", "apart"),
    ("w.lineage.note_direct(out, 'numpy'); ref = torch.from_numpy(x.numpy()[:4] + 0)", "unknown"),
    ("w.lineage.note_direct(out, 'print'); ref = torch.tensor([1.0, 2, 3, 4])", "apart"),
]


@pytest.mark.parametrize(("text", "origin"), CASES, ids=[text for text, _ in CASES])
def test_what_came_of_a_result_or_of_its_kernel_is_known(
    watched: Watched, text: str, origin: str
) -> None:
    ref = watched.run(text)["ref"]
    assert watched.lineage.origin_of(watched.out, ref, is_watching=True) == origin
    assert watched.num_begun == 1


def test_a_kernel_whose_pointers_are_not_followed_writes_all_that_it_is_given(
    watched: Watched,
) -> None:
    watched.uses = {}
    watched.launch("take", casts=False, x=watched.x, out=watched.rival)
    assert watched.lineage.origin_of(watched.out, watched.rival, is_watching=True) == "apart"
    watched.launch("take", casts=False, x=watched.out, out=watched.rival)
    assert watched.lineage.origin_of(watched.out, watched.rival, is_watching=True) == "derived"


def test_nothing_is_said_of_what_was_not_seen(watched: Watched) -> None:
    ref = watched.run("ref = x[ids]")["ref"]
    lineage = watched.lineage
    assert lineage.origin_of(watched.out, ref, is_watching=False) == "unknown"
    assert lineage.origin_of(watched.out, watched.out[:], is_watching=False) == "derived"
    gate = threading.Event()
    other = threading.Thread(target=gate.wait)
    other.start()
    assert lineage.origin_of(watched.out, ref, is_watching=True) == "unknown"
    gate.set()
    other.join()
    assert lineage.origin_of(watched.out, ref, is_watching=True) == "apart"
    lineage._num_noted = MAX_NOTED
    assert lineage.origin_of(watched.out, ref, is_watching=True) == "apart"
    watched.run("x + 1")
    assert lineage.origin_of(watched.out, ref, is_watching=True) == "unknown"


def test_nothing_is_followed_before_a_kernel_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Watched(monkeypatch)
    made.launch("take", casts=False, x=made.x, ids=made.ids, out=made.out)
    assert (made.num_begun, made.lineage.is_on) == (0, False)
    assert made.lineage.origin_of(made.out, made.x, is_watching=True) == "unknown"


WAYS = ["clone", "wide", "again", "doubled", "copied", "saved", "alike", "numpy", "pairs"]


@pytest.mark.tier("whole")
@pytest.mark.parametrize("way", WAYS)
def test_a_programs_comparison_counts_where_it_can_tell(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str
) -> None:
    """Eight say nothing of what was read by halves. One takes halves that were put there."""
    script = Path(__file__).parent / "programs" / "halves.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit):
        app.main(["doctor", "--suspect", "--json", "--", sys.executable, str(script), way])
    report = json.loads(capfd.readouterr().out)
    told = [row for row in report["hypotheses"] if row["diagnostic"] == "halved elements"]
    open_rows = [row for row in told if row["verdict"] == "INCONCLUSIVE"]
    roots = [(root["cause"], root["argument"]) for root in report["roots"]]
    # What came back by way of NumPy may be anything.
    assert len(open_rows) == (way == "numpy")
    is_silent = way in ("pairs", "numpy")
    assert roots == ([] if is_silent else [("dtype width", "ids_ptr")])
