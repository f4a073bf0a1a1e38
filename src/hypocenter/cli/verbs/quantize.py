"""`hypo quantize`: a model file in another type, and what was changed."""

from __future__ import annotations

from pathlib import Path

from hypocenter.base.errors import UsageError
from hypocenter.base.wording import bytes_text
from hypocenter.cli.child_run import ending_on_signals
from hypocenter.cli.output import one_line, show, show_json
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.cli.tool_options import QuantizeOptions
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.quantising.importance import read_importance
from hypocenter.model.quantising.mixes import ALIASES, MIXES, Mix
from hypocenter.model.quantising.quantising import Quantised, WantedFile, quantise


def quantize(
    path: str,
    out: str,
    kind: str,
    options: QuantizeOptions,
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write the file and print what it holds. Raises what `quantise` raises, and UsageError for a
    type that is not made and an OUT that is a folder."""
    mix = _mix_of(kind)
    if out.endswith("/") or Path(out).is_dir():
        raise UsageError(f"OUT is {out}, a folder; name the new file itself")
    importance = None if options.imatrix is None else read_importance(options.imatrix)
    request = WantedFile(mix, importance, options.pure, options.allow_requantize)
    with (
        ending_on_signals(),
        ProgressDisplay(quiet=quiet) as progress,
        open_gguf(path) as file,
    ):
        made = quantise(file, Path(out), request, progress)
    if as_json:
        show_json(_record(out, mix, made))
        return
    show("\n".join(map(one_line, _lines(out, mix, made))))


def _mix_of(kind: str) -> Mix:
    name = kind.upper()
    mix = MIXES.get(ALIASES.get(name, name))
    if mix is None:
        raise UsageError(f"TYPE is {kind!r}, but must be one of {', '.join(MIXES)}")
    return mix


def _lines(out: str, mix: Mix, made: Quantised) -> list[str]:
    share = made.num_bytes / made.num_bytes_before
    sizes = f"{bytes_text(made.num_bytes_before)} to {bytes_text(made.num_bytes)}"
    counts = sorted(made.num_tensors.items(), key=lambda entry: -entry[1])
    lines = [
        f"{out}: {mix.name}, {sizes} ({share:.0%})",
        "tensors: " + ", ".join(f"{count} {dtype.name}" for dtype, count in counts),
        "set: " + ", ".join(f"{key} = {value}" for key, value in made.new_values.items()),
    ]
    if made.dropped:
        lines.append(f"left out: {', '.join(made.dropped)}, for it is one file now")
    if made.fallbacks:
        found = ", ".join(f"{name} {dtype.name}" for name, dtype in made.fallbacks.items())
        lines.append(f"rows are no whole blocks of the type, so they got another: {found}")
    if made.unweighed:
        lines.append(f"the importance matrix has none of: {', '.join(made.unweighed)}")
    return lines


def _record(out: str, mix: Mix, made: Quantised) -> dict[str, object]:
    return {
        "file": out,
        "type": mix.name,
        "num_bytes_before": made.num_bytes_before,
        "num_bytes": made.num_bytes,
        "num_tensors": {dtype.name: count for dtype, count in made.num_tensors.items()},
        "metadata_set": made.new_values,
        "metadata_left_out": list(made.dropped),
        "fallbacks": {name: dtype.name for name, dtype in made.fallbacks.items()},
        "not_in_imatrix": list(made.unweighed),
    }
