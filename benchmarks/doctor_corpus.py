"""Programs with a planted fault, as people write them: what one command names of each.

`python benchmarks/doctor_corpus.py [OUT]` with torch and Triton; on a GPU if torch sees one, else
in Triton's interpreter, which leaves out what only a GPU has. Each program of `corpus/` is run
twice: as it stands, where cause, kernel, line, argument and fix must be named as in `TRUTH`, and
healthy (`right`), where nothing may be found. Nor may it of those in `corpus/healthy`. Those in
`corpus/written` are by somebody who had not seen the doctor; `truth.json` has what is wrong there.
A fix that the report has as data is applied: what it mends may not be found again. Told beside is
how many of them leave nothing at all to find, with what the twin prints. A root with any wrong
claim is a false one, and fails its row. Of no healthy program may a launch go unrecorded.
`--sanitizer` adds what NVIDIA's compute-sanitizer says of the programs as they stand, and
`--ablation` how many are named rightly without each of the doctor's checks. Prints a table, and
leaves it as JSON in OUT.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from corpus_judge import CLAIMS, FIXES, Fix, judged

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "benchmarks" / "corpus"
WRITTEN = PROGRAMS / "written"
MAX_SECONDS, DEADLINE_SECONDS = 300, 15
#: Of those in `corpus/healthy` what only a GPU has.
HEALTHY_ON_GPU = (
    "captured_steps", "compiled_model", "two_streams", "columns_in_streams", "pinned_loader",
    "backward_on_side_stream", "wait_before_reuse", "graph_with_branches", "compiled_on_streams",
)  # fmt: skip
SANITIZERS, SANITIZER_SECONDS = ("memcheck", "racecheck", "initcheck"), 40


class Truth(NamedTuple):
    """What is to be named: one of `causes`, `kernel`, a line with `text`, one of `arguments`.

    `options` are those of `hypo doctor` that a user would take for what the program does on a GPU.
    """

    causes: tuple[str, ...]
    kernel: str = ""
    text: str = ""
    arguments: tuple[str, ...] = ()
    options: tuple[str, ...] = ("--again",)
    needs_gpu: bool = False
    #: A folder of `corpus/` that stands first on PYTHONPATH.
    beside: str = ""
    #: What the fix must say; by default as `FIXES` has it.
    fix: Fix | None = None


SUSPECT = ("--suspect",)
HANGS = ("--deadline", str(DEADLINE_SECONDS))
PLAIN: tuple[str, ...] = ()

_OVERFLOW = ("offset overflow",)
_MASK = ("missing tail mask", "off by one", "scalar out of range", "buffer too small")
_INDEX = ("index out of range", "sentinel consumed")
_RACE = ("race between programs",)
_COMPILER = ("wrong code of the compiler",)
_WAIT = ("missing wait between streams",)
_REUSED = ("memory reused in flight",)

TRUTH = {
    "cache_rows": Truth(_OVERFLOW, "copy_row", "row * stride", ("cache_ptr", "stride")),
    "page_offset": Truth(_OVERFLOW, "gather_pages", "page * page_elements", ("pages_ptr",)),
    "vocabulary_logits": Truth(_OVERFLOW, "pick_logit", "row * vocab_size", ("logits_ptr",)),
    "moving_pointer": Truth(_OVERFLOW, "walk", "step * step_rows * stride", ("x_ptr",)),
    "head_offset": Truth(_OVERFLOW, "first_of_heads", "* length * head_dim", ("x_ptr",)),
    "softmax_tail": Truth(_MASK, "softmax", "num_columns + column, y)", ("out_ptr",)),
    "norm_tail": Truth(_MASK, "layer_norm", "tl.load(x_ptr", ("x_ptr",)),
    "matmul_depth": Truth(_MASK, "matmul", "tl.load(", ("a_ptr", "b_ptr", "K")),
    "bias_mask": Truth(_MASK, "add_bias", "column <= width", ("x_ptr", "bias_ptr", "width")),
    "causal_convolution": Truth(
        (*_MASK, "access outside its tensor"), "convolve", "mask=at < length", ("x_ptr",)
    ),
    "transpose_mask": Truth(
        _MASK, "transpose", "", ("x_ptr", "out_ptr", "num_rows", "num_columns")
    ),
    "grid_too_large": Truth(_MASK, "double", "tl.load(x_ptr", ("x_ptr",)),
    "stencil_edge": Truth(_MASK, "smooth", "x_ptr + i + 1", ("x_ptr", "n")),
    "last_group": Truth(_MASK, "scale_groups", "tl.load(x_ptr + at)", ("x_ptr", "out_ptr")),
    "embedding_row": Truth(_INDEX, "embed", "tl.load(table_ptr", ("ids_ptr",)),
    "ignored_label": Truth(_INDEX, "cross_entropy", "* vocab_size + label", ("labels_ptr",)),
    "padded_slot": Truth(_INDEX, "write_keys", "tl.store(cache_ptr", ("slots_ptr",)),
    "table_behind_end": Truth(
        (*_INDEX, "off by one", "buffer too small", "scalar out of range"), "sum_pages",
        "tl.load(", ("table_ptr", "MORE", "lengths_ptr"),
    ),
    "position_behind_table": Truth(_INDEX, "turn", "tl.load(cos_ptr", ("positions_ptr",)),
    "last_bin": Truth(_INDEX, "count", "tl.atomic_add", ("x_ptr",)),
    "padded_expert": Truth(_INDEX, "count_experts", "tl.atomic_add", ("experts_ptr",)),
    "no_adapter": Truth(_INDEX, "add_adapter", "tl.load(adapters_ptr", ("which_ptr",)),
    "sequence_ends": Truth(
        (*_INDEX, "scalar out of range"), "sum_sequences", "tl.load(x_ptr", ("starts_ptr",)
    ),
    "short_positions": Truth(
        ("dtype width",), "turn_rows", "tl.pointer_type(tl.int32)", ("positions_ptr",)
    ),
    "narrow_indices": Truth(
        ("dtype width",), "gather_wide", "tl.pointer_type(tl.int64)", ("ids_ptr",)
    ),
    "half_scales": Truth(
        ("dtype width",), "scale_rows", "tl.pointer_type(tl.float32)", ("scales_ptr",)
    ),
    "mask_of_bytes": Truth(
        ("dtype width",), "fill_where", "tl.pointer_type(tl.int32)", ("mask_ptr",)
    ),
    "sliced_rows": Truth(
        ("wrong stride", "scalar out of range", "missing tail mask"), "sum_columns",
        "tl.load(x_ptr + row * stride", ("stride", "x_ptr", "num_rows"),
    ),
    "transposed_weight": Truth(
        ("wrong stride", "scalar out of range"), "matvec", "tl.load(w_ptr",
        ("w_ptr", "row_stride", "column_stride"),
    ),
    "stride_in_bytes": Truth(
        ("wrong stride", "scalar out of range"), "copy_rows", "row * stride", ("x_ptr", "stride")
    ),
    "expanded_out": Truth(_RACE, "add_row_number", "tl.store(at", ("x_ptr",), SUSPECT),
    "half_as_wide": Truth(
        ("buffer too small", "scalar out of range", "missing tail mask"), "gate_halves",
        "tl.store(out_ptr", ("out_ptr", "width"),
    ),
    "workspace_for_fewer": Truth(
        ("buffer too small", "missing tail mask", "access outside its tensor"), "partial_sums",
        "tl.store(partial_ptr", ("partial_ptr",),
    ),
    "histogram_race": Truth(_RACE, "count_plain", "tl.store(bins_ptr", ("bins_ptr",), SUSPECT),
    "split_depth": Truth(_RACE, "split_matvec", "tl.store(y_ptr", ("y_ptr",), SUSPECT),
    "shifted_in_place": Truth(_RACE, "shift", "tl.", ("x_ptr", "out_ptr"), SUSPECT),
    "overlapping_tiles": Truth(_RACE, "number_windows", "tl.store", ("out_ptr",), SUSPECT),
    "last_block_sums": Truth(_RACE, "sum_blocks", "partial_ptr", ("partial_ptr",), SUSPECT),
    "same_slot_twice": Truth(
        _RACE, "scatter_rows", "tl.store(out_ptr", ("out_ptr", "slots_ptr"), SUSPECT
    ),
    "running_sum": Truth(_RACE, "block_sums", "out_ptr + start", ("out_ptr",), SUSPECT),
    "fresh_accumulator": Truth(
        ("uninitialised read",), "accumulate", "tl.load(out_ptr", ("out_ptr",), SUSPECT
    ),
    "tail_not_written": Truth(
        ("grid too small",), "double_blocks", "double_blocks[(", ("out_ptr",), SUSPECT
    ),
    "grid_short_in_y": Truth(
        ("grid too small",), "copy_tiles", "copy_tiles[(", ("out_ptr",), SUSPECT
    ),
    "mask_ends_early": Truth(
        ("output not written",), "triple", "mask=at < n - LESS", ("out_ptr",), SUSPECT
    ),
    "mask_not_passed": Truth(
        ("missing tail mask",), "add_rows", "tl.store(target, y)", ("out_ptr",)
    ),
    "group_past_columns": Truth(
        ("missing tail mask",), "scale_group", "mask=live", ("out_ptr",)
    ),
    "block_as_pitch": Truth(("wrong stride",), "halve", "row * BLOCK", ("BLOCK", "x_ptr")),
    "leading_dimension": Truth(("wrong stride",), "row_sums", "row * lda", ("lda", "a_ptr")),
    "first_difference": Truth(
        ("missing tail mask",), "differences", "x_ptr + pid - 1", ("x_ptr",)
    ),
    "halved_rows": Truth(_INDEX, "take_rows", "tl.load(x_ptr + slot", ("slots_ptr",)),
    "keys_of_longest": Truth(
        ("missing tail mask",), "sum_own", "row[:, None] < longest", ("x_ptr",)
    ),
    "lost_count": Truth(_RACE, "add_up", "total", ("total_ptr",), SUSPECT),
    "statistics_of_few": Truth(
        ("uninitialised read", "output not written"), "", "", ("most_ptr",), SUSPECT
    ),
    "padding_read": Truth(
        ("uninitialised read",), "largest", "pitch + column)", ("x_ptr",), SUSPECT
    ),
    "lock_not_released": Truth(("endless loop",), "add_locked", "while", (), HANGS),
    "step_of_nothing": Truth(("endless loop",), "walk_to", "at", (), HANGS),
    "waits_for_flag": Truth(("endless loop",), "consume", "while", (), HANGS),
    "cpu_tensor": Truth(("host pointer",), "lookup", "", ("table_ptr",), PLAIN, needs_gpu=True),
    "empty_residual": Truth(
        ("null pointer", "buffer too small"), "add_residual", "", ("residual_ptr",)
    ),
    "rows_in_z": Truth(("grid over the limit",), "negate", "", (), PLAIN, needs_gpu=True),
    "unlike_shapes": Truth(("kernel does not compile",), "add_blocks", "x + y", (), PLAIN),
    "asserted_index": Truth(("assertion of a kernel", "index out of range"), "checked_gather"),
    "false_hint": Truth(("misalignment",), "sum_hinted", "tl.multiple_of", (), SUSPECT),
    "graph_input_freed": Truth(
        ("captured pointer freed",), "scale", "", ("x_ptr",), PLAIN, needs_gpu=True
    ),
    "graph_workspace_grown": Truth(
        ("captured pointer freed",), "partial_sums", "", ("work_ptr",), SUSPECT, needs_gpu=True
    ),
    "listed_addresses": Truth(
        ("wild pointer", "use after free"), "add_listed", "tl.load(pointer", ("list_ptr",),
        needs_gpu=True,
    ),
    # Triton's interpreter gives such a tensor memory of its own.
    "resized_storage": Truth(
        ("null pointer", "use after free"), "dot", "", ("w_ptr",), needs_gpu=True
    ),
    "tile_too_large": Truth(
        ("shared memory over the limit",), "product", "", (), PLAIN, needs_gpu=True
    ),
    "torch_embedding": Truth(
        ("assertion of a kernel", "index out of range"), "", "", ("index",), PLAIN, needs_gpu=True
    ),
    "compiled_lookup": Truth(
        ("index out of range",), "triton_|cpp_", "x[ids] * 2 + 1", needs_gpu=True
    ),
    "compiled_embedding": Truth(_INDEX, "triton_|cpp_", "self.table(tokens)", (), SUSPECT),
    "compiled_labels": Truth(_INDEX, "triton_|cpp_", "logs.gather(1, labels", (), SUSPECT),
    "compiled_pages": Truth(_INDEX, "triton_|cpp_", "cache[rows] + 1.0", (), SUSPECT),
    "compiled_scatter": Truth(_INDEX, "triton_|cpp_", "cache.index_put(", (), SUSPECT),
    "compiled_gradient": Truth(
        _INDEX, "triton_|cpp_", "return table[ids] * 3.0", (), SUSPECT, needs_gpu=True
    ),
    "compiled_own_kernel": Truth(
        _MASK, "add_bias", "x = tl.load(x_ptr + at)", ("x_ptr",), SUSPECT, needs_gpu=True
    ),
    "print_in_capture": Truth(
        ("call not allowed during capture",), "", ".item()", (), PLAIN, needs_gpu=True
    ),
    "padded_vocabulary": Truth(
        ("wrong stride",), "clear_low", "logits_ptr + row * pitch", ("logits_ptr", "pitch"), SUSPECT
    ),
    "gradient_mean": Truth(
        ("undefined lane",), "centre_gradient", "tl.load(grad_ptr", ("grad_ptr",), SUSPECT
    ),
    "even_heuristic": Truth(_MASK, "add_vectors", "x_ptr + at) + tl.load(y_ptr", ()),
    "tuned_without_mask": Truth(
        _MASK, "square", "tl.load(x_ptr + at)", ("x_ptr", "out_ptr"), needs_gpu=True
    ),
    "fewer_keys": Truth(
        (*_MASK, *_INDEX), "attend", "tl.load(k_ptr", ("k_ptr", "v_ptr", "num_keys")
    ),
    "smaller_batch": Truth(_MASK, "normalise", "tl.", ("x_ptr", "out_ptr")),
    "quantised_tail": Truth(_MASK, "unpack", "tl.load(codes_ptr", ("codes_ptr", "n")),
    "sampled_beyond": Truth(_INDEX, "largest_logit", "tl.load(names_ptr", ("logits_ptr",)),
    "staged_scale": Truth(
        _COMPILER, "scale_rows", "tl.store(out_ptr", ("out_ptr",), SUSPECT, needs_gpu=True,
        beside="broken_compiler",
    ),
    "side_stream_early": Truth(
        _WAIT, "scale_filled", "scale_filled[", ("x_ptr",), SUSPECT, needs_gpu=True
    ),
    "side_result_early": Truth(_WAIT, "", "shifted = product", (), SUSPECT, needs_gpu=True),
    "alias_on_side": Truth(_WAIT, "", "alias.mul_(", (), SUSPECT, needs_gpu=True),
    "event_too_early": Truth(_WAIT, "", "c = b.relu()", (), SUSPECT, needs_gpu=True),
    "prefetch_no_wait": Truth(_WAIT, "", "there @ weight", (), SUSPECT, needs_gpu=True),
    "graph_input_early": Truth(_WAIT, "", "graph.replay()", (), SUSPECT, needs_gpu=True),
    "weights_replaced_early": Truth(_WAIT, "", "optimizer.step()", (), SUSPECT, needs_gpu=True),
    "bucket_added_early": Truth(_WAIT, "", "parameter.sub_(", (), SUSPECT, needs_gpu=True),
    "freed_for_side": Truth(_REUSED, "", "x = torch.randn(", (), SUSPECT, needs_gpu=True),
    "prefetch_not_kept": Truth(
        _REUSED, "", "self.ready = batch.cuda(", (), SUSPECT, needs_gpu=True
    ),
    "kernel_of_freed_scratch": Truth(
        _REUSED, "add_scratch", "scratch = torch.ones(", ("scratch_ptr",), SUSPECT, needs_gpu=True
    ),
    "host_reads_early": Truth(
        ("buffer read in flight",), "", "losses[step].item()", (), SUSPECT, needs_gpu=True
    ),
    "host_copy_early": Truth(
        ("buffer read in flight",), "", "largest = y.max()", (), SUSPECT, needs_gpu=True
    ),
    "staging_rewritten": Truth(
        ("buffer rewritten in flight",), "", "staged.copy_(batch)", (), SUSPECT, needs_gpu=True
    ),
    "altered_code": Truth(
        _COMPILER, "squares", "tl.store(out_ptr", ("out_ptr",), SUSPECT, needs_gpu=True
    ),
}  # fmt: skip


#: Of `written/truth.json`: what each class may be called. Wrong arithmetic is for others to see.
CLASSES = {
    "grid too small": ("grid too small",),
    "missing mask": _MASK,
    "wrong mask": (*_MASK, "grid too small", "output not written"),
    "off by one": (*_MASK, *_INDEX),
    "wrong stride": ("wrong stride", "scalar out of range"),
    "index out of range": (*_INDEX, *_MASK),
    "race between programs": _RACE,
    "lost update in a program": ("race between lanes", *_RACE),
    "undefined lanes": ("undefined lane", "uninitialised read"),
    "uninitialised read": ("uninitialised read", "output not written"),
    "output not written": ("output not written", "grid too small"),
    "offset overflow": _OVERFLOW,
    "dtype width": ("dtype width",),
    "nonfinite value": ("non-finite value", "non-finite padding"),
    "autotune in place": ("autotuned in place", *_RACE),
    "use after free": ("use after free", "wild pointer", "null pointer"),
    "wrong arithmetic": (),
    "other": (),
}


def written() -> dict[str, dict[str, Any]]:
    """The truth of each program in `corpus/written` by its name; its fix makes the healthy twin."""
    return {row["name"]: row for row in json.loads((WRITTEN / "truth.json").read_text())}


def healthy_programs() -> dict[str, Path]:
    files = (*(PROGRAMS / "healthy").glob("*.py"), *WRITTEN.glob("healthy_*.py"))
    return {file.stem: file for file in sorted(files)}


def main() -> int:
    """The exit status: with `--strict` 1 where a program or a twin is judged wrongly."""
    options = _options()
    out, work = Path(options.out), Path(tempfile.mkdtemp(prefix="doctor-corpus-"))
    out.mkdir(parents=True, exist_ok=True)
    is_gpu, begun = _sees_a_gpu(), time.monotonic()
    chosen = options.only.split(",") if options.only else [*TRUTH, *written(), *healthy_programs()]
    faulty = [name for name in chosen if name in TRUTH and (is_gpu or not TRUTH[name].needs_gpu)]
    faulty += [name for name in chosen if name in written()]
    healthy = [name for name in chosen if name in healthy_programs()]
    healthy = [name for name in healthy if is_gpu or name not in HEALTHY_ON_GPU]
    runs = [
        *((name, False) for name in faulty),
        *((name, True) for name in (*faulty, *healthy)),
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda run: examine(*run, is_gpu=is_gpu, work=work), runs))
        found: dict[str, Any] = {
            "device": "gpu" if is_gpu else "interpreter",
            "faulty": rows[: len(faulty)],
            "healthy": rows[len(faulty) :],
        }
        _write(found, out)
        print(f"{time.monotonic() - begun:.0f} seconds; bundles are in {work}", flush=True)
        if options.ablation:
            found["ablation"] = ablation(faulty, rows, work, options.jobs)
            _write(found, out)
        if options.sanitizer:
            found["sanitizer"] = dict(zip(faulty, pool.map(_sanitized, faulty), strict=True))
            _write(found, out)
    return int(options.strict and not all(row["is_right"] for row in rows))


def _write(found: dict[str, Any], out: Path) -> None:
    (out / "doctor_corpus.json").write_text(json.dumps(found, indent=1))
    print("\n".join(table(found)), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("out", nargs="?", default=os.environ.get("OUT", "doctor-corpus"))
    parser.add_argument("--only", default="", help="programs, separated by commas")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--sanitizer", action="store_true", help="compute-sanitizer beside it")
    parser.add_argument("--strict", action="store_true", help="exit status 1 if any is not right")
    parser.add_argument("--ablation", action="store_true", help="leave out one check after another")
    return parser.parse_args()


def _sees_a_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _environment(is_gpu: bool, work: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    interpreted = {} if is_gpu else {"TRITON_INTERPRET": "1"}
    return {**os.environ, "PYTHONPATH": path, "TMPDIR": str(work), **interpreted}


def _program(name: str, *, twin: bool) -> list[str]:
    """A program's file, and what it is given."""
    if name in TRUTH:
        return [str(PROGRAMS / f"{name}.py"), *(["right"] if twin else [])]
    if name in healthy_programs():
        return [str(healthy_programs()[name])]
    return [str(_twin_of(name) if twin else WRITTEN / f"{name}.py")]


@functools.cache
def _twin_of(name: str) -> Path:
    """A written program with its true fix, in a file of its own."""
    row, text = written()[name], (WRITTEN / f"{name}.py").read_text()
    file = Path(tempfile.mkdtemp(prefix="doctor-corpus-twin-")) / f"{name}_right.py"
    file.write_text(text.replace(row["fix_old"], row["fix_new"]))
    return file


def examine(name: str, twin: bool, *, is_gpu: bool, work: Path) -> dict[str, Any]:
    """Run one program under the doctor; a row of the table. `twin`: it is healthy."""
    truth, folder = TRUTH.get(name), work / (f"{name}-right" if twin else name)
    folder.mkdir()
    options = truth.options if truth else SUSPECT
    if not is_gpu and options not in (HANGS, PLAIN):
        options = SUSPECT
    program = [sys.executable, *_program(name, twin=twin)]
    begun = time.monotonic()
    environment = _environment(is_gpu, folder)
    if truth is not None and truth.beside:
        first = str(PROGRAMS / truth.beside)
        environment["PYTHONPATH"] = os.pathsep.join((first, environment["PYTHONPATH"]))
        environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    exit_code, report, _ = run_doctor(program, folder, options, environment)
    row: dict[str, Any] = {
        "program": name,
        "options": options,
        "seconds": round(time.monotonic() - begun, 1),
        "exit_code": exit_code,
        "roots": roots_of(report),
        "lost": lost_of(report),
    }
    if twin or name in healthy_programs():
        # It ends by itself, and no cause is told; without --suspect there is no report at all.
        is_quiet = not row["roots"] and not row["lost"]
        return row | {"is_right": is_quiet and row["exit_code"] == 0}
    row |= _judged(row["roots"], name, Path(program[1]))
    return row | _applied(row, name, folder, options, environment)


def _applied(
    row: dict[str, Any],
    name: str,
    folder: Path,
    options: Iterable[str],
    environment: dict[str, str],
) -> dict[str, Any]:
    """What becomes of the program when the fix of its first root is applied, where that is data."""
    file = Path(_program(name, twin=False)[0])
    text = with_edits(file, (row["roots"] or [{}])[0].get("edits") or ())
    if text is None:
        return {}
    mended = folder / "mended"
    mended.mkdir()
    (mended / file.name).write_text(text)
    command = [sys.executable, str(mended / file.name)]
    code, report, _ = run_doctor(command, mended, options, environment)
    left, was = roots_of(report) or [], row["roots"][0]
    is_mended = not any(_is_same_place(root, was) for root in left)
    is_whole = code == 0 and not left
    if name not in TRUTH:  # its twin has the same input
        printed = [
            _printed([sys.executable, path], environment)
            for path in (command[1], *_program(name, twin=True))
        ]
        is_whole = is_whole and printed[0] == printed[1]
    says = row["says"] if is_mended else "false"
    is_right = row["is_right"] and is_mended
    return {"mended": is_mended, "whole": is_whole, "is_right": is_right, "says": says}


def _is_same_place(root: Mapping[str, Any], was: Mapping[str, Any]) -> bool:
    return all(root[key] == was[key] for key in ("kernel", "argument", "line"))


def with_edits(file: Path, edits: Iterable[Mapping[str, Any]]) -> str | None:
    """A program's text with a fix in it; None where that is no change of this text."""
    lines = file.read_text().splitlines(keepends=True)
    is_changed = False
    for edit in edits:
        is_here = Path(edit["file"]).name == file.name and 0 < edit["line"] <= len(lines)
        if edit.get("name") or not is_here or lines[edit["line"] - 1].strip() != edit["old"]:
            return None
        lines[edit["line"] - 1] = lines[edit["line"] - 1].replace(edit["old"], edit["new"])
        is_changed = True
    return "".join(lines) if is_changed else None


def _printed(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=MAX_SECONDS, check=False
    )
    return ran.returncode, ran.stdout


def run_doctor(
    program: list[str], folder: Path, options: Iterable[str], environment: dict[str, str]
) -> tuple[int | None, str, str]:
    """Exit code (None: it took too long), report and stderr of a program below `hypo doctor`.

    They are left in the folder, beside the bundle.
    """
    command = [sys.executable, "-m", "hypocenter", "doctor", "--json", *options]
    command += ["--out", str(folder / "bundle"), "--", *program]
    exit_code, report, stderr = None, "", "it took too long"
    with suppress(subprocess.TimeoutExpired):
        ran = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True,
            timeout=MAX_SECONDS, check=False,
        )  # fmt: skip
        exit_code, report, stderr = ran.returncode, ran.stdout, ran.stderr
    (folder / "stderr.txt").write_text(stderr)
    (folder / "report.json").write_text(report)
    return exit_code, report, stderr


def json_of(text: str) -> dict[str, Any] | None:
    """The report in what a command wrote; None where there is none."""
    with suppress(ValueError):
        last = text.rstrip().rfind("\n{")
        found = json.loads(text[last + 1 :] if last >= 0 else text[text.find("{") :])
        return found if isinstance(found, dict) else None
    return None


def roots_of(text: str) -> list[dict[str, Any]] | None:
    """The causes of a report; None where there is no report."""
    keys = [*CLAIMS, "tensor", "file", "culprit", "sentence", "edits", "alternatives"]
    report = json_of(text)
    if report is None or "roots" not in report:
        return None
    return [{key: root.get(key) for key in keys} for root in report["roots"]]


def lost_of(text: str) -> list[str]:
    """Launches that could not be recorded, as a report says: how many of which kernel, and why."""
    gaps = (json_of(text) or {}).get("unseen", ())
    lost = [gap for gap in gaps if gap["kind"] == "launch not recorded"]
    return [f"{gap['what']}: {gap['reason']}" for gap in lost]


def _judged(roots: list[dict[str, Any]] | None, name: str, program: Path) -> dict[str, Any]:
    """What of the first cause is right; `is_right` if all of it is, and all that is told beside."""
    if name in TRUTH:
        truth = TRUTH[name]
        texts = enumerate(program.read_text().splitlines(), 1)
        return judged(
            roots, causes=truth.causes, kernel=truth.kernel, arguments=truth.arguments,
            lines={at for at, text in texts if truth.text and truth.text in text},
            fix=truth.fix or FIXES.get(name), program=program,
        )  # fmt: skip
    row = written()[name]
    causes = [cause for kind in (row["class"], *row["also_classes"]) for cause in CLASSES[kind]]
    found = judged(
        roots, causes=causes, kernel=row["kernel"], arguments=row["argument"],
        lines={row["line"], *row["also_lines"]}, program=program,
        fix=Fix(row["fix_says"], row.get("fix_never", "")) if row.get("fix_says") else None,
    )  # fmt: skip
    is_right = found["is_right"] or (not causes and not roots)
    return found | {"is_right": is_right}


def ablation(
    faulty: list[str], rows: list[dict[str, Any]], work: Path, jobs: int
) -> dict[str, list[str]]:
    """By each of the doctor's checks the programs that are named rightly with it alone missing.

    Of those that are named rightly with all of them; from the bundle that each left. "" is no check
    at all: what the bundle alone gives once more.
    """
    named = {row["program"] for row in rows if row["is_right"] and "cause_right" in row}
    left = [name for name in faulty if name in named and (work / name / "bundle").is_dir()]
    asked = [(str(work / name / "bundle"), name) for name in left]
    with ProcessPoolExecutor(jobs) as pool:
        found = dict(zip(left, pool.map(_named_without, asked), strict=True))
    rungs = sorted({rung for by in found.values() for rung in by})
    return {rung: [name for name in left if found[name][rung]] for rung in rungs}


def _named_without(asked: tuple[str, str]) -> dict[str, bool]:
    """By the check that is left out, whether a bundle's cause is named rightly."""
    from hypocenter.doctor.doctor import LADDER, diagnose
    from hypocenter.record.bundle import load

    folder, name = asked
    bundle = load(folder)
    found = {}
    for rung in ("", *LADDER):
        diagnosis = diagnose(bundle, allow_source=True, without=(rung,))
        roots = msgspec.to_builtins(diagnosis.roots)
        found[rung] = bool(_judged(roots, name, Path(_program(name, twin=False)[0]))["is_right"])
    return found


def _sanitized(name: str) -> dict[str, bool | None]:
    """Which tools of compute-sanitizer report the program as it stands; None: it took too long."""
    return {tool: _reports(name, tool) for tool in SANITIZERS}


def _reports(name: str, tool: str) -> bool | None:
    command = ["compute-sanitizer", "--tool", tool, sys.executable, *_program(name, twin=False)]
    with suppress(subprocess.TimeoutExpired, OSError):
        ran = subprocess.run(
            command, env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            capture_output=True, text=True, timeout=SANITIZER_SECONDS, check=False,
        )  # fmt: skip
        summary = re.findall(r"SUMMARY: (\d+) ", ran.stdout + ran.stderr)
        return bool(summary and int(summary[-1]))
    return None


def table(found: dict[str, Any]) -> Iterator[str]:
    """One line a program, and the totals."""
    marks = {True: "yes", False: "NO", None: "-"}
    twins = {row["program"]: row for row in found["healthy"]}
    beside = found.get("sanitizer", {})
    yield f"{'program':<24}{'says':<7}{'twin':<6}{'s':>6}  {'/'.join(SANITIZERS):<30}found"
    for row in found["faulty"]:
        root = (row["roots"] or [{}])[0]
        what = " ".join(str(root.get(k) or "") for k in ("cause", "kernel", "argument", "line"))
        wrong = [claim for claim in CLAIMS if not row[f"{claim}_right"]]
        wrong += ["mended"] * (row.get("mended") is False)
        said = "/".join(marks[told] for told in beside.get(row["program"], {}).values()) or "-"
        twin = twins[row["program"]]
        yield (
            f"{row['program']:<24}{row['says']:<7}{marks[twin['is_right']]:<6}"
            f"{row['seconds']:>6}  {said:<30}{what}{f'  {wrong}' if wrong else ''}"
        )
    for row in found["healthy"]:
        if not row["is_right"]:
            told = [(root["cause"], root["kernel"], root["line"]) for root in row["roots"] or []]
            unseen = "".join(f", {text}" for text in row["lost"])
            yield f"healthy {row['program']}: exit code {row['exit_code']}, {told}{unseen}"
    faulty, healthy = found["faulty"], found["healthy"]
    seconds = [row["seconds"] for row in faulty]
    kinds = ("right", "vague", "silent", "false")
    by = {says: sum(row["says"] == says for row in faulty) for says in kinds}
    mended = [row["mended"] for row in faulty if "mended" in row]
    yield (
        f"{sum(row['is_right'] for row in faulty)} of {len(faulty)} as they should be; "
        f"{by['right']} right, {by['vague']} vague, {by['silent']} silent, {by['false']} false; "
        f"{sum(mended)} of {len(mended)} fixes that were applied take the fault away, "
        f"{sum(row.get('whole', False) for row in faulty)} of them every fault; "
        f"{sum(not row['is_right'] for row in healthy)} of {len(healthy)} healthy programs not; "
        f"median {statistics.median(seconds) if seconds else 0:.1f} s"
    )
    for rung, named in found.get("ablation", {}).items():
        lost = len(found["ablation"][""]) - len(named)
        if lost or not rung:
            yield f"without {rung or 'nothing'}: {len(named)} named, {lost} fewer"
    for at, tool in enumerate(SANITIZERS) if beside else ():
        number = sum(bool(list(by.values())[at]) for by in beside.values())
        yield f"{tool}: {number} of {len(faulty)} reported"


if __name__ == "__main__":
    sys.exit(main())
