"""`hypo check` on small programs with a planted fault, and on their healthy twins."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from outside.checked import hypo_check
from outside.terminal import hypo_in_process

pytest.importorskip("torch")
pytest.importorskip("triton")

from hypocenter.base.errors import UsageError
from hypocenter.check.report import FAR, CheckReport, report_text
from hypocenter.cli.verbs.check import split_target
from hypocenter.replay.findings import Finding, FindingKind, Headroom, Site
from hypocenter.replay.text import extent_text, finding_text, place_text

VICTIMS = Path(__file__).parent / "check_victims"
ALL = VICTIMS / "every_victim.py"

#: File to the findings it must give: (kind, operation, argument, text on the line).
EXPECTED: dict[str, list[tuple[str, str, str | None, str]]] = {
    "block_pointers": [("out of bounds", "load", "a_ptr", "a_tile = tl.load(a,")],
    "far_rows": [
        ("int32 overflow", "store", "x_ptr", "tl.store(x_ptr + row * stride"),
        ("never written", "launch", "x_ptr", "mark[(5,)]"),
    ],
    "heuristic": [
        ("out of bounds", "load", "x_ptr", "-tl.load(x_ptr + offs))"),
        ("out of bounds", "store", "y_ptr", "-tl.load(x_ptr + offs))"),
    ],
    # It stores there too: one race.
    "histogram_race": [("race", "load", "bins_ptr", "tl.store(bins, tl.load(bins")],
    "host_memory": [("out of bounds", "load", "tensor at ", "tl.load(x_ptr + at, mask=at < n")],
    "large_descriptor": [("out of bounds", "load", "desc", "desc.load([")],
    "left_out": [("undefined lane", "load", "x_ptr", "else tl.load(start + at, mask=mask)")],
    "lost_update": [("race", "store", "y_ptr", "tl.store(y_ptr + at + FAR")],
    "missing_mask": [("out of bounds", "load", "x_ptr", "x = tl.load(x_ptr + offs, mask")],
    "narrow_positions": [("out of bounds", "load", "position_ptr", "position = tl.load(")],
    "one_configuration": [
        ("out of bounds", "load", "x_ptr", "tl.load(x_ptr + offs, mask=mask) + 1"),
        ("out of bounds", "store", "x_ptr", "tl.load(x_ptr + offs, mask=mask) + 1"),
    ],
    "padded_rows": [("uninitialised read", "load", "x_ptr", "x = tl.load(")],
    "pointer_table": [("null pointer", "load", None, "tl.load(x_ptr + offs, mask=offs < n)")],
    "row_pitch": [
        ("between rows", "load", "logits_ptr", "x = tl.load(logits_ptr + row * pitch"),
        ("between rows", "store", "logits_ptr", "tl.store(logits_ptr + row * pitch"),
    ],
    "short_weight": [("out of bounds", "load", "w_ptr", "w = load(w_ptr + cols")],
    "tuned_in_place": [
        ("tuned in place", "tuning", "sum_ptr", "@triton.autotune(configs=CONFIGS"),
        ("tuned in place", "tuning", "x_ptr", "@triton.autotune(configs=CONFIGS"),
    ],
    "uninitialised_sum": [("uninitialised read", "load", "sum_ptr", "old = tl.load(")],
    "unwritten_tail": [("never written", "launch", "y_ptr", "copy[(300 // 64")],
    "waits_for_all": [("waits for ever", "atomic", "count_ptr", "while tl.atomic_add(count_ptr")],
    "wrong_stride": [
        ("never written", "launch", "y_ptr", "double[4, 1, 1]("),
        ("race", "store", "y_ptr", "tl.store(y_ptr + row * y_stride"),
    ],
}  # fmt: skip


def check(*arguments: str) -> tuple[CheckReport, subprocess.CompletedProcess[str]]:
    done = hypo_check(*arguments)
    assert done.stdout, done.stderr
    return msgspec.json.decode(done.stdout, type=CheckReport), done


@pytest.fixture(scope="module")
def faulty() -> tuple[CheckReport, subprocess.CompletedProcess[str]]:
    return check(str(ALL))


def place(finding: Finding) -> tuple[str, int]:
    site = finding.sites[0] if finding.sites else finding.launched_at
    assert site is not None
    return site.file, site.line


def test_the_healthy_twins_have_no_finding() -> None:
    report, done = check(str(ALL), "healthy")
    assert report.findings == ()
    assert report.error is None
    assert done.returncode == 0, done.stderr
    assert len(report.launches) > len(EXPECTED)
    assert all(launch.coverage.is_complete for launch in report.launches)
    assert report.headroom != ()


def test_every_victim_is_named_here() -> None:
    names = {path.stem for path in VICTIMS.glob("*.py")} - {"every_victim", "sees_its_gpu"}
    assert names == EXPECTED.keys()


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_planted_fault_is_found_at_its_line(
    faulty: tuple[CheckReport, subprocess.CompletedProcess[str]], name: str
) -> None:
    report, done = faulty
    assert (done.returncode, report.error) == (4, None)
    found = []
    for finding in report.findings:
        file, line = place(finding)
        if Path(file).stem == name:
            text = Path(file).read_text().splitlines()[line - 1]
            name_in = re.sub("0x[0-9a-f]+$", "", finding.argument or "") or None
            found.append((finding.kind, finding.operation, name_in, text))
    found.sort(key=lambda item: (item[0], item[1], item[2] or ""))
    assert [item[:3] for item in found] == [item[:3] for item in EXPECTED[name]], found
    for item, (*_, expected) in zip(found, EXPECTED[name], strict=True):
        assert expected in item[3]


def of(report: CheckReport, name: str) -> Finding:
    return next(f for f in report.findings if Path(place(f)[0]).stem == name)


def test_a_finding_names_program_lane_element_and_values(
    faulty: tuple[CheckReport, subprocess.CompletedProcess[str]],
) -> None:
    finding = of(faulty[0], "missing_mask")
    assert (finding.program, finding.lane, finding.num_lanes) == ((3, 0, 0), (232,), 24)
    assert finding.values["offs"] == 1000
    assert of(faulty[0], "uninitialised_sum").element == (0,)
    assert "program (0, 0, 0) wrote" in of(faulty[0], "histogram_race").detail


def test_a_fault_of_one_configuration_names_it(
    faulty: tuple[CheckReport, subprocess.CompletedProcess[str]],
) -> None:
    finding = of(faulty[0], "one_configuration")
    assert finding.configuration is not None
    assert "BLOCK=64, MASKED=0" in finding.configuration
    run = [launch for launch in faulty[0].launches if launch.kernel == "add_one"]
    assert {launch.configuration for launch in run if not launch.skipped} == {
        f"BLOCK={block}, MASKED={masked}, num_warps={warps}, num_stages=3"
        for block, masked, warps in [(32, 1, 1), (64, 0, 2), (128, 1, 4)]
    }
    assert [launch.configuration for launch in run if launch.skipped] == [
        "BLOCK=8, MASKED=1, num_warps=1, num_stages=3"
    ]


def test_an_overflow_has_its_threshold(
    faulty: tuple[CheckReport, subprocess.CompletedProcess[str]],
) -> None:
    finding = of(faulty[0], "far_rows")
    assert finding.origin is not None
    assert finding.origin.expression == "row * stride"
    assert (finding.axis, finding.threshold) == (0, 4)  # 40_000 * 65_536 > 2**31 > 30_000 * 65_536
    spare = next(s for s in faulty[0].headroom if s.kernel == "double")
    # x_ptr + row * stride + cols adds to a pointer twice: the product alone is int32.
    assert (spare.axis, spare.threshold) == (0, -(-(2**31) // 100))


def test_text_says_the_same(
    faulty: tuple[CheckReport, subprocess.CompletedProcess[str]],
) -> None:
    text = report_text(faulty[0])
    for name in EXPECTED:
        assert f"{name}.py:" in text
    assert "add_one (BLOCK=8, MASKED=1, num_warps=1, num_stages=3): does not compile" in text
    assert f"{len(faulty[0].findings)} findings in" in text
    lines = finding_text(of(faulty[0], "missing_mask")).splitlines()
    assert lines[0].endswith("missing_mask.py:15: out of bounds: load of x_ptr in add")
    assert "program (3, 0, 0) lane (232): element 1000 (byte 4000)" in lines[2]


@pytest.mark.parametrize(
    ("arch", "target", "is_amd"),
    [("h200", ["cuda", 90, 32], False), ("gfx942", ["hip", "gfx942", 64], True)],
)
@pytest.mark.tier("sim", fast=lambda case: case.arch == "h200")
def test_the_file_sees_the_gpu_that_was_asked_for(
    tmp_path: Path, arch: str, target: list[Any], is_amd: bool
) -> None:
    out = tmp_path / "facts.json"
    report, done = check(
        f"{VICTIMS / 'sees_its_gpu.py'}:fill", "--arch", arch, "--", str(out), "--flag"
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(out.read_text())
    assert facts["target"] == target
    assert facts["processors"] == [132, 132] if not is_amd else [304, 304]
    assert (facts["hip"], facts["cuda"]) == (is_amd, not is_amd)
    assert facts["devices"] == ["cuda:0", "cuda:0", True, 0]
    assert (facts["sum"], facts["gradient"]) == (15000.0, 8.0)
    assert facts["captures"] == [False, True, True, True, False]
    assert facts["main"] == "__main__"
    assert facts["arguments"] == [str(out), "--flag"]
    assert len(report.launches) == 3


def write(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(text)
    return str(path)


@pytest.mark.tier("sim")
def test_a_fault_in_an_installed_package_is_reported_there(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "some_kernels" / "ops.py"
    package.parent.mkdir(parents=True)
    victim = (VICTIMS / "missing_mask.py").read_text()
    package.write_text(victim.replace("def run(faulty)", "def wrapper(faulty)"))
    path = write(
        tmp_path,
        "import sys\nfrom pathlib import Path\n"
        "sys.path.append(str(Path(__file__).parent / 'site-packages'))\n"
        "from some_kernels import ops\nops.wrapper(True)\n",
    )
    report, done = check(path)
    assert done.returncode == 4
    (finding,) = report.findings
    assert finding.sites[0].file == str(package)
    assert "x = tl.load(x_ptr" in victim.splitlines()[finding.sites[0].line - 1]
    assert finding.launched_at is not None
    assert (finding.launched_at.file, finding.launched_at.line) == (path, 5)


@pytest.mark.tier("whole")
def test_a_budget_samples_and_says_so(tmp_path: Path) -> None:
    many = (VICTIMS / "missing_mask.py").read_text().replace("n = 1000", "n = 16_000 - 8")
    path = write(tmp_path, many.replace("BLOCK=256", "BLOCK=8"))
    done = hypo_in_process("check", path, "--budget", "0.4")
    assert "(sampled; --budget SECONDS runs more)" in done.stdout


@pytest.mark.tier("sim")
def test_a_sample_of_what_is_healthy_has_no_finding(tmp_path: Path) -> None:
    healthy = (VICTIMS / "missing_mask.py").read_text().replace("n = 1000", "n = 16_000 - 8")
    path = write(tmp_path, healthy.replace("BLOCK=256", "BLOCK=8"))
    done = hypo_in_process("check", path, "healthy", "--budget", "0.4")
    assert done.returncode in (0, 1)  # the file's own comparison fails on a sample
    assert "0 findings" in done.stdout


@pytest.mark.parametrize(
    ("text", "code", "parts"),
    [
        ("raise ValueError('no luck')", 1, ["program.py:1: ValueError: no luck"]),
        ("import sys; sys.exit(3)", 1, ["sys.exit(3)"]),
        ("import os; os.kill(os.getpid(), 9)", 1, ["ended by signal 9"]),
        ("x = 1", 1, ["launched no Triton kernel"]),
    ],
    ids=["raises", "exits", "killed", "launches nothing"],
)
@pytest.mark.tier("whole")
def test_a_file_that_fails_is_an_error(
    tmp_path: Path, text: str, code: int, parts: list[str]
) -> None:
    done = hypo_in_process("check", write(tmp_path, text))
    assert done.returncode == code, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("hypo: ")
    for part in parts:
        assert part in last, done.stderr


@pytest.mark.tier("whole")
def test_a_traceback_begins_with_the_file_and_nothing_is_called_clean(tmp_path: Path) -> None:
    text = "try:\n    int('x')\nexcept ValueError as error:\n    raise KeyError('y') from error\n"
    done = hypo_in_process("check", write(tmp_path, text))
    assert done.returncode == 1
    assert "ValueError: invalid literal" in done.stderr
    assert done.stderr.count("Traceback") == 2
    for frame in ("runpy", "check_runtime", "check_gpu"):
        assert frame not in done.stderr
    assert done.stdout == "nothing was checked: the file ended before its first launch\n"


@pytest.mark.tier("whole")
def test_a_kernel_that_was_not_launched_is_refused() -> None:
    done = hypo_in_process("check", f"{VICTIMS / 'missing_mask.py'}:ad")
    assert done.returncode == 2
    assert "did you mean add?" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["nowhere.py"], "nowhere.py: no such file"),
        ([str(ALL), "--arch", "gfx94"], "did you mean gfx942"),
        ([str(ALL), "--budget", "0"], "--budget is 0"),
        ([f"{ALL}:a b"], "not the name of a kernel"),
    ],
)
def test_wrong_usage_is_refused(arguments: list[str], part: str) -> None:
    done = hypo_in_process("check", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert part in done.stderr


def test_a_target_is_a_file_and_perhaps_a_kernel(tmp_path: Path) -> None:
    assert split_target("a/b.py") == (Path("a/b.py"), None)
    assert split_target("a/b.py:kernel") == (Path("a/b.py"), "kernel")
    odd = tmp_path / "odd:name"
    odd.touch()
    assert split_target(str(odd)) == (odd, None)
    with pytest.raises(UsageError):
        split_target("b.py:two words")


def _spare(threshold: int | None) -> Headroom:
    site = Site(file="a.py", line=3, function="k", expression="row * stride")
    gave_up = None if threshold else "a loop waits"
    return Headroom("k", 0, threshold, 10, site if threshold else None, gave_up=gave_up)


@pytest.mark.parametrize(
    ("threshold", "is_told"), [(11, True), (FAR * 10 - 1, True), (FAR * 10, False), (None, False)]
)
def test_headroom_is_told_where_it_is_small(threshold: int | None, is_told: bool) -> None:
    report = CheckReport("a.py", ("sm_90",), (), (_spare(threshold),), (), None)
    assert ("int32 headroom" in report_text(report)) is is_told
    assert "int32 headroom" in report_text(report, show_all=True)


def test_what_was_not_written_is_told_with_the_launch() -> None:
    finding = Finding(
        kind=FindingKind.NEVER_WRITTEN, kernel="k", operation="launch", argument="y",
        detail="2 of 4 elements of shape (4,), from [2] to [3]", element=(2,), num_lanes=2,
        launched_at=Site(file="a.py", line=9, function="f", expression="k[(1,)](y)"),
    )  # fmt: skip
    assert finding_text(finding) == (
        "a.py:9: never written: y, by this launch of k\n"
        "    2 of 4 elements of shape (4,), from [2] to [3]"
    )
    assert place_text(finding) == f"y: {finding.detail}"
    assert place_text(finding, is_named=True) == finding.detail
    assert extent_text(finding) == ""
    read = msgspec.structs.replace(
        finding, kind=FindingKind.OUT_OF_BOUNDS, element=(2,), detail="is wrong", num_programs=1
    )
    assert place_text(read, is_named=True) == "y[2] is wrong"
    assert extent_text(read) == "2 accesses in 1 program; "
