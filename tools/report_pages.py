"""Writes docs/reports/: pages that `hypo doctor --html` makes of real runs. No GPU is needed: the
one run that was made on a GPU is a bundle of an H200.

    python -m tools.report_pages

Only what is of this machine alone (folders, system, time) is replaced; a run makes the rest.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from faults.harmless import find
from faults.victim_run import run_child
from hypocenter.doctor.doctor import diagnose
from hypocenter.doctor.page.page import report_html
from hypocenter.doctor.report_parts import Origin
from hypocenter.record import bundle as bundles

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "reports"
PROGRAM = "tests/foreign/programs/gather.py"
COMPILED = "tests/foreign/programs/compiled_model.py"
#: The bundle that `faults/programs/side_result_early.py` left under `--suspect`.
STREAMS = ROOT / "tests" / "fixtures" / "streams" / "side_result_early"
NUMBERS = "tests/foreign/programs/masked_row.py"
WIDTH, CAPTURED = "positions_of_two_bytes", "captured_pointer_freed"
#: A file of Inductor's, whose folder and name are of this machine.
_WRITTEN = re.compile(r"/[\w/.-]*torchinductor[^/\s]*/\w+/\w+")
#: Parts of a page that are another run's: what it drew of addresses, what fresh memory held, what
#: it printed, and which checks took time.
_OF_ONE_RUN = re.compile(
    r"<svg.*?</svg>|<small>held .*?</small>|<pre>.*?</pre>|<dt>checks</dt><dd>.*?</dd>", re.S
)


def pages() -> Iterator[tuple[str, str]]:
    """Name and text of each page, made anew."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        doctor = ("doctor", "--json", "--out")
        _planted(WIDTH, folder / "width")
        yield "dtype-width", _page(folder / "width" / "bundle")
        program = (sys.executable, PROGRAM)
        _hypo(3, *doctor, str(folder / "index"), "--", *program, TRITON_INTERPRET="1")
        yield "index-out-of-range", _page(folder / "index")
        program = (sys.executable, COMPILED)
        _hypo(3, *doctor, str(folder / "compiled"), "--", *program)
        yield "compiled-index", _page(folder / "compiled")
        program = (sys.executable, NUMBERS)
        nan = (*doctor, str(folder / "nan"), "--nan")
        _hypo(3, *nan, "--", *program, TRITON_INTERPRET="1")
        yield "first-nan", _page(folder / "nan")
        yield "missing-wait", _page(STREAMS)
        _planted(CAPTURED, folder / "bad")
        _planted(CAPTURED, folder / "good", twin=True)
        yield "captured-pointer", _page(folder / "bad" / "bundle", folder / "good" / "bundle")


def skeleton(page: str) -> str:
    """What two pages of the same defect have in common: all but numbers, drawings and stderr."""
    text = _OF_ONE_RUN.sub("", page)
    text = re.sub(r"\b0x[0-9a-f]+|\d+(\.\d+)*", "0", text)
    return re.sub(r"sha256-[^']*", "sha256", text)


def _planted(name: str, folder: Path, *, twin: bool = False) -> None:
    """Run a victim, whose bundle is then below the folder."""
    victim = find([name])[0]
    run_child(victim, folder, twin=twin)


def _hypo(status: int, *words: str, **variables: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hypocenter", *words],
        cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    if done.returncode != status:
        raise RuntimeError(f"hypo {' '.join(words)} ended with {done.returncode}: {done.stderr}")


def _page(folder: Path, good: Path | None = None) -> str:
    bundle = bundles.load(folder)
    beside = bundles.load(good) if good is not None else None
    diagnosis = diagnose(bundle, beside, allow_source=True)
    environment = msgspec.structs.replace(
        diagnosis.environment, platform="Linux", started=None, variables={}
    )
    diagnosis = msgspec.structs.replace(diagnosis, environment=environment)
    is_foreign = bundle.is_foreign
    origin = Origin("hypo-bundle", has_steps=not is_foreign, needs_sources=is_foreign)
    page = report_html(bundle, diagnosis, origin, allow_source=True)
    page = _WRITTEN.sub("torchinductor/written", page)
    return (
        page.replace(f"{ROOT}/", "").replace(f"{sys.prefix}/", "").replace(f"{Path.home()}/", "~/")
    )


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for page_name, page_text in pages():
        (FOLDER / f"{page_name}.html").write_text(page_text)
        print(FOLDER / f"{page_name}.html")
