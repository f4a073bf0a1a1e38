"""`hypo inspect`: prints what `gguf/inspection.py` and `architecture.py` know of a file."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from hypocenter.base.errors import EXIT_GATE, BadModelFile, UnsupportedModel
from hypocenter.base.wording import bytes_text
from hypocenter.cli.options import EngineOptions, naming_options
from hypocenter.cli.output import say, show, show_json
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.model.facts.architecture import Architecture, read_architecture
from hypocenter.model.facts.nextn import why_no_head
from hypocenter.model.gguf import inspection
from hypocenter.model.gguf.file import GGUFFile, open_gguf
from hypocenter.model.tensors.footprint import kv_dtypes_for
from hypocenter.settings.config import DEFAULT_CONTEXT, KV_DTYPES, EngineConfig

#: Columns for keys: a single key of a file may have 65,535 characters.
_MAX_KEY_WIDTH = 48
#: Tensors that are named of those that hold zeros alone.
_MAX_ZEROS = 8


def inspect(path: str, context_length: int | None, *, check: bool, as_json: bool) -> None:
    """Print the report; leaves with EXIT_GATE when `check` finds a NaN, an infinity or a
    tensor of zeros alone.

    Raises UsageError for a context length that no engine takes.
    """
    with naming_options(EngineOptions):
        EngineConfig(context_length=context_length)
    with open_gguf(path) as file:
        report = collect(file, context_length)
        checked = None
        if check:
            with ProgressDisplay() as progress:
                checked = inspection.check(file, progress)
            report["check"] = _check_report(checked)
        lines = inspection.metadata_lines(file)
    if as_json:
        show_json(report)
    else:
        show(_text(report, lines))
    if checked is None:
        return
    if checked.num_bad_floats:
        say(f"{path}: {checked.num_bad_floats} of {checked.num_floats} floats are NaN or infinite")
    if checked.zeros:
        why = "a download that was not finished leaves such"
        say(f"{path}: {len(checked.zeros)} tensors hold zeros alone; {why}")
    if checked.num_bad_floats or checked.zeros:
        sys.exit(EXIT_GATE)


def collect(file: GGUFFile, context_length: int | None) -> dict[str, Any]:
    """The report as data; `architecture` and `memory` say why where we cannot run the file."""
    counts = inspection.type_counts(file)
    arch: Architecture | None = None
    problem = None
    try:
        arch = read_architecture(file)
        try:
            from hypocenter.model.tensors.tensor_reader import check_tensors  # loads the compiler

            check_tensors(file, arch)
        except (UnsupportedModel, BadModelFile) as error:
            problem = str(error)  # what the file says of itself is right, and shown
    except (UnsupportedModel, BadModelFile) as error:
        problem = str(error)
    weight_bytes = sum(count.num_bytes for count in counts)
    return {
        "path": str(file.path),
        "gguf_version": file.version,
        "shards": [str(path) for path in file.shard_paths],
        "metadata": {
            key: {"type": file.metadata.kind(key), "value": inspection.plain_value(file, key)}
            for key in file.metadata
        },
        "tensors": {
            "num_tensors": len(file.tensors),
            "num_params": sum(count.num_elements for count in counts),
            "num_bytes": weight_bytes,
            "by_type": [{**asdict(count), "dtype": count.dtype.name} for count in counts],
        },
        "architecture": _architecture(file, arch) if arch else None,
        "memory": _memory(arch, inspection.loaded_bytes(file), context_length) if arch else None,
        "problem": problem,
    }


def _architecture(file: GGUFFile, arch: Architecture) -> dict[str, Any]:
    names = (
        "name",
        "num_layers",
        "width",
        "num_heads",
        "vocab_size",
        "context_length",
    )
    experts = asdict(arch.experts) if arch.experts else None
    each = {
        name: [getattr(shape, name) for shape in arch.layers]
        for name in ("num_kv_heads", "head_dim", "ffn_width", "window")
    }
    shapes = {name: _one_or_all(values) for name, values in each.items()}
    heads = {"num": len(arch.draft_layers), "problem": why_no_head(file, arch)}
    own = {"experts": experts, "draft_heads": heads if arch.draft_layers else None}
    return {name: getattr(arch, name) for name in names} | shapes | own


def _one_or_all(values: list[int]) -> int | list[int]:
    """The number that holds for all layers, or that of each."""
    return values[0] if len(set(values)) == 1 else values


def _memory(
    arch: Architecture, weight_bytes: int, context_length: int | None
) -> dict[str, int | bool]:
    """Bytes of weights, of KV cache and state of one request that fills the context, and of the
    states that are kept for others."""
    length = context_length or min(arch.context_length, DEFAULT_CONTEXT)
    per_token = {
        name: arch.kv_bytes_per_token(dtype) for name, dtype in kv_dtypes_for(arch).items()
    }
    return {
        "context_length": length,
        "beyond_trained_length": length > arch.context_length,
        "weight_bytes": weight_bytes,
        "state_bytes": arch.state_bytes,
        "checkpoints_bytes": EngineConfig().state_checkpoints * arch.state_bytes,
        **{f"kv_{name}_bytes": length * num for name, num in per_token.items()},
    }


def _check_report(report: inspection.TensorsReport) -> dict[str, Any]:
    return {
        "num_tensors": report.num_tensors,
        "num_floats": report.num_floats,
        "num_bad_floats": report.num_bad_floats,
        "findings": [str(finding) for finding in report.findings],
        "zeros": list(report.zeros),
        "sha256": {str(shard.path): shard.sha256 for shard in report.shards},
    }


def _text(report: dict[str, Any], metadata: list[inspection.MetadataLine]) -> str:
    tensors = report["tensors"]
    lines = [f"{report['path']} (GGUF version {report['gguf_version']})", "", "metadata"]
    width = min(max((len(line.key) for line in metadata), default=0), _MAX_KEY_WIDTH)
    lines += [f"  {line.key:<{width}}  {line.kind}  {line.shown}" for line in metadata]
    lines += ["", "tensors", f"  {'type':<8} {'number':>7} {'parameters':>16} {'size':>12}"]
    for count in tensors["by_type"]:
        lines.append(
            f"  {count['dtype']:<8} {count['num_tensors']:>7} {count['num_elements']:>16,} "
            f"{bytes_text(count['num_bytes']):>12}"
        )
    lines.append(
        f"  {'all':<8} {tensors['num_tensors']:>7} {tensors['num_params']:>16,} "
        f"{bytes_text(tensors['num_bytes']):>12}"
    )
    lines += ["", *_memory_lines(report)]
    if "check" in report:
        lines += ["", *_check_lines(report["check"])]
    return "\n".join(lines)


def _memory_lines(report: dict[str, Any]) -> list[str]:
    memory = report["memory"]
    if memory is None:
        return [f"not runnable: {report['problem']}"]
    lines = [f"not runnable: {report['problem']}", ""] if report["problem"] else []
    if experts := report["architecture"]["experts"]:
        choice = experts["choice"]
        lines += [f"each token takes {choice['num_used']} of {choice['num_experts']} experts", ""]
    if heads := report["architecture"]["draft_heads"]:
        use = f"not run: {heads['problem']}" if heads["problem"] else "--spec mtp uses the first"
        lines += [f"layers that propose tokens (MTP): {heads['num']}; {use}", ""]
    lines.append(f"memory for a context of {memory['context_length']} tokens")
    if memory["beyond_trained_length"]:
        trained = report["architecture"]["context_length"]
        lines[-1] += f" (the model takes {trained} at most: hypo run refuses more)"
    weights = memory["weight_bytes"]
    state, kept = memory["state_bytes"], memory["checkpoints_bytes"]
    parts = {"weights": weights, **({"state": state, "checkpoints": kept} if state else {})}
    lines += [f"  {part:<22} {bytes_text(size):>12}" for part, size in parts.items()]
    for name in KV_DTYPES:
        if (cache := memory.get(f"kv_{name}_bytes")) is None:
            continue  # heads of this model are no whole blocks of it
        together = weights + state + kept + cache
        lines.append(
            f"  KV cache {name:<13} {bytes_text(cache):>12}   together {bytes_text(together)}"
        )
    return lines


def _check_lines(checked: dict[str, Any]) -> list[str]:
    found = f"{checked['num_bad_floats']} of {checked['num_floats']:,} floats are NaN or infinite"
    lines = ["check", f"  {found}", *(f"  {finding}" for finding in checked["findings"])]
    if num_more := checked["num_bad_floats"] - len(checked["findings"]):
        lines.append(f"  ... and {num_more} more")
    if zeros := checked["zeros"]:
        shown = ", ".join(zeros[:_MAX_ZEROS]) + (" ..." if len(zeros) > _MAX_ZEROS else "")
        lines.append(
            f"  {len(zeros)} of {checked['num_tensors']} tensors hold zeros alone: {shown}"
        )
    return [*lines, *(f"  sha256 {digest}  {path}" for path, digest in checked["sha256"].items())]
