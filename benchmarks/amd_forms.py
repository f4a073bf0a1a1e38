"""Each form of each kernel as an object of AMD's, beside LLVM's text of it.

Compiles for four targets, decodes, and compares names; looks for what is not modelled, for waits
that lack and for opcodes without a case. A turn goes on where the last one of the same --folder
ended, and prints the figures of all turns. Two cores need hours for all, sixteen minutes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests/support"), str(ROOT / "src")]
# Names need no lines, and without them there is half as much to write and to read.
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"

from machine.amd_forms import complaints, opcodes  # noqa: E402
from machine.amd_objects import TARGETS, amd_forms, compiled  # noqa: E402
from turns import Row, parser_of_turns, rows_of_turns  # noqa: E402

from hypocenter.device.offline.specimen import Specimen  # noqa: E402

_WRONG = ("differing", "problems", "waits", "without_a_case")


def main() -> int:
    given = parser_of_turns(__doc__ or "").parse_args()
    until = time.monotonic() + given.seconds
    given.folder.mkdir(parents=True, exist_ok=True)
    os.environ["TRITON_CACHE_DIR"] = str(given.folder.resolve() / "triton")
    items = _items(given.only.split(",") if given.only else TARGETS)
    rows = rows_of_turns(given.folder / "forms.jsonl", items, _compare, given.jobs, until)
    figures = {}
    for arch in TARGETS:
        num_forms = sum(key.startswith(f"{arch} ") for key in items)
        figures[arch] = _figures([row for row in rows if row["key"].startswith(f"{arch} ")])
        _show(arch, num_forms, figures[arch])
    (given.folder / "forms.json").write_text(json.dumps(figures, indent=1))
    return 0


def _items(targets: Sequence[str]) -> dict[str, tuple[Specimen, str]]:
    """Of each kernel the first form, then of each the second, and so on: what has not been seen
    comes early."""
    by_kernel: dict[str, list[Specimen]] = {}
    for form in amd_forms():
        by_kernel.setdefault(form.name, []).append(form)
    in_turn = [form for form in chain(*zip_longest(*by_kernel.values())) if form is not None]
    return {
        f"{arch} {number} {form.name} ({form.label})": (form, arch)
        for number, form in enumerate(in_turn)
        for arch in targets
    }


def _compare(item: tuple[Specimen, str]) -> Row:
    form, arch = item
    try:
        given = compiled(form, arch)
        wrong = complaints(given, arch)
    # Compilers raise whatever they like; a form that does not get through is a row as well.
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    return {
        "instructions": len(given.instructions),
        "opcodes": sorted(opcodes(given)),
        **asdict(wrong),
    }


def _figures(rows: Sequence[Row]) -> dict[str, Any]:
    good = [row for row in rows if "error" not in row]
    wrong = [row for row in good if any(map(row.get, _WRONG))]
    return {
        "compared": len(good),
        "nothing wrong": len(good) - len(wrong),
        "instructions": sum(row["instructions"] for row in good),
        "opcodes": len({name for row in good for name in row["opcodes"]}),
        "processor seconds": round(sum(row["seconds"] for row in rows)),
        "wrong": [{n: row[n] for n in ("key", *_WRONG) if row[n]} for row in wrong],
        "errors": [{n: row[n] for n in ("key", "error")} for row in rows if "error" in row],
    }


def _show(arch: str, num_forms: int, figures: dict[str, Any]) -> None:
    told = (f"{figures[name]} {name}" for name in ("nothing wrong", "instructions", "opcodes"))
    print(f"{arch}: {figures['compared']} of {num_forms} forms compared, {', '.join(told)}")
    pairs = Counter(str(pair) for row in figures["wrong"] for pair in row.get("differing", ()))
    rest = Counter(
        f"{name}: {text}"
        for row in figures["wrong"]
        for name in _WRONG[1:]
        for text in row.get(name, ())
    )
    for text, number in (*pairs.most_common(20), *rest.most_common(20)):
        print(f"    {number} times {text}")
    for row in figures["errors"][:10]:
        print(f"    {row['key']}: {row['error']}")


if __name__ == "__main__":
    sys.exit(main())
