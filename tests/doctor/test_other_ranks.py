"""What another rank launched: a wrong result there shows in the first rank only later."""

from __future__ import annotations

from pathlib import Path

import msgspec
from recorded.bundles import Run, inputs, tensors_of_decoder

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.doctor import diagnose
from hypocenter.record import bundle as bundles
from hypocenter.record.bundle import Bundle
from hypocenter.record.events import ArgumentDeclaration, Declaration, Place, Statistics
from hypocenter.record.fault_record import FaultRecord

DIFFERS = FaultRecord(kind="differs", message="")
ENDED = FaultRecord(kind="none", message="")
NO_REPLAY = ("replay", "hang")


def rank(digests: str, eps: float, fault: FaultRecord) -> Bundle:
    """Two launches, and by a letter each what they wrote; the second one sums over all ranks."""
    run = Run()
    tensors_of_decoder(run)
    plan = run.plan(
        run.launch("rms_norm", {"x": "x", "out": "q", "eps": eps}),
        run.launch("peer_sum", {"x": "q", "out": "out"}),
    )
    run.run(plan, inputs())
    written = ArgumentDeclaration(name="out", dtypes=("F32",), shape="num_rows", access="write")
    for kernel in ("rms_norm", "peer_sum"):
        run.contracts[kernel] = Declaration(kernel=kernel, arguments=(written,))
    seen = tuple(
        Statistics(
            place=Place(1, plan, at), tensor=run.tensors[name].id, digest=f"k:{digests[at]}",
            low=0.0, high=1.0, mean=0.5, rms=0.5, num_nan=0, num_inf=0,
        )
        for at, name in enumerate(("q", "out"))
    )  # fmt: skip
    return run.bundle(fault, statistics=seen)


def ranks(first: Bundle, second: Bundle) -> Bundle:
    return msgspec.structs.replace(first, others=(second,))


GOOD = ranks(rank("ab", 1e-5, ENDED), rank("cd", 1e-5, ENDED))


def test_the_rank_whose_launch_was_wrong_is_named_and_not_the_sum_behind_it() -> None:
    bad = ranks(rank("aX", 1e-5, DIFFERS), rank("YZ", 2.0, ENDED))
    [root] = diagnose(bad, GOOD, without=NO_REPLAY).roots
    assert (root.cause, root.kernel, root.argument) == (Cause.WRONG_ANSWER, "rms_norm", "eps")
    assert root.sentence.startswith("rank 1 (sim:mi300x): rms_norm: eps is")
    without = diagnose(bad, GOOD, without=(*NO_REPLAY, "other ranks"))
    assert not without.roots
    assert any("peer_sum" in text for row in without.hypotheses for text in row.evidence)


def test_what_a_rank_shows_later_follows_from_the_first_rank() -> None:
    bad = ranks(rank("XY", 2.0, DIFFERS), rank("cZ", 1e-5, ENDED))
    [root] = diagnose(bad, GOOD, without=NO_REPLAY).roots
    assert root.sentence.startswith("rms_norm: eps is")


def test_equal_ranks_are_no_finding() -> None:
    same = ranks(rank("ab", 1e-5, ENDED), rank("cd", 1e-5, ENDED))
    assert diagnose(same, GOOD, without=NO_REPLAY).is_clean


def test_a_bundle_keeps_each_rank_in_a_folder_of_its_own(tmp_path: Path) -> None:
    saved = bundles.save(GOOD, tmp_path / "b")
    read = bundles.load(tmp_path / "b")
    assert [other.statistics for other in read.others] == [GOOD.others[0].statistics]
    assert read.others[0].plans == saved.others[0].plans
    (tmp_path / "b" / "rank1" / "bundle.json").write_text("{")
    damaged = bundles.load(tmp_path / "b")
    assert damaged.others == ()
    assert any("rank 1" in gap.what for gap in damaged.missing)
    (tmp_path / "b" / "rank1").rename(tmp_path / "elsewhere")
    (tmp_path / "b" / "rank1").symlink_to(tmp_path / "elsewhere")
    assert bundles.load(tmp_path / "b").others == ()
