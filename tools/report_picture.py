"""Draws docs/report.svg: what the doctor really says of examples/long_rows.py. No GPU is needed.

    python tools/report_picture.py

Only the drawing is made here; every word comes from a run of `hypo doctor`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import msgspec

from hypocenter.doctor.diagnosis import Diagnosis
from hypocenter.doctor.report import report_text
from hypocenter.doctor.report_parts import Origin

ROOT = Path(__file__).parent.parent
EXAMPLE = "examples/long_rows.py"
PICTURE = ROOT / "docs" / "report.svg"
COMMAND = f"TRITON_INTERPRET=1 hypo doctor -- python {EXAMPLE}"

# In pixels: a column and a line of text, and the margin around all of it.
COLUMN, LINE, MARGIN = 8.4, 20, 20
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
PLAIN, DIM, LABEL, GOOD, BAD, PLACE = (
    "#e6edf3", "#9da7b3", "#79c0ff", "#7ee787", "#ff9a91", "#f2cc60",
)  # fmt: skip
#: Words that have a colour where they stand alone.
COLOURS = {"fails": BAD, "passes": GOOD, "change": PLACE}


def report() -> list[str]:
    """The lines of a terminal in which the doctor runs the example, up to its hypotheses."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "hypo-bundle"
        done = subprocess.run(
            [
                sys.executable, "-m", "hypocenter", "doctor", "--json", "--out", str(bundle),
                "--", sys.executable, EXAMPLE,
            ],
            cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
            timeout=100, check=False,
        )  # fmt: skip
        if done.returncode != 3:
            raise RuntimeError(f"the doctor ended with {done.returncode}: {done.stderr}")
        shown = done.stdout.replace(f"{ROOT}/", "")
        said = done.stderr.replace(f"{folder}/", "").splitlines()
    diagnosis = msgspec.json.decode(shown, type=Diagnosis)
    origin = Origin("hypo-bundle", has_steps=False, needs_sources=True)
    text = report_text(diagnosis, origin)
    ended = next(line for line in said if line.startswith("hypo: the command "))
    return [f"$ {COMMAND}", ended, *text[: text.index("\nHYPOTHESES")].splitlines()]


def draw(lines: Sequence[str]) -> str:
    """The lines as an SVG that needs no font of its own: each run of words has its width."""
    width = max(map(len, lines)) * COLUMN + 2 * MARGIN
    height = len(lines) * LINE + 2 * MARGIN
    elements = "\n".join(element for row, line in enumerate(lines) for element in _line(row, line))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'width="{width:.0f}" height="{height}" role="img" font-family="{FONT}" font-size="14">\n'
        f"<title>What hypo doctor reports of {EXAMPLE}</title>\n"
        f'<rect width="100%" height="100%" rx="8" fill="#161b22"/>\n{elements}\n</svg>\n'
    )


def _line(row: int, line: str) -> Iterator[str]:
    for match in re.finditer(r"\S+(?: \S+)*", line):
        words = match.group()
        at = MARGIN + match.start() * COLUMN
        weight = ' font-weight="bold"' if words.isupper() else ""
        yield (
            f'<text x="{at:.1f}" y="{MARGIN + row * LINE + 15}" textLength="'
            f'{len(words) * COLUMN:.1f}" fill="{_colour(line, words)}"{weight}>'
            f"{escape(words)}</text>"
        )


def _colour(line: str, words: str) -> str:
    if line.startswith(("$", "hypo:")):
        return DIM
    if words.isupper():
        return LABEL
    if line.startswith(("CAUSED BY", "FAULTS AT")):
        return PLACE
    return COLOURS.get(words, PLAIN)


if __name__ == "__main__":
    PICTURE.write_text(draw(report()))
    print(PICTURE)
