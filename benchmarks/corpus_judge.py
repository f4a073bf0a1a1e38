"""How a report of the doctor is held against the truth of a program: five claims, and no false one.

CAUSE, KERNEL, ARGUMENT, LINE and FIX are claims of their own. A root that has any of them wrong is
a false claim, whatever else the report says: who believes it edits what was right. Faults of the
engine (`engine_faults.py`) are held against theirs by the same rules. Runs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

CLAIMS = ("cause", "kernel", "argument", "line", "fix")
#: What is said where an access left its tensor and nothing tells why: true, and little.
VAGUE = "access outside its tensor"
#: No fix of a tensor whose size is what its shape says.
_LARGER = r"\b(make|give|let)\b[^.;]*\b(larger|more room)\b|room for"


class Fix(NamedTuple):
    """What a fix must say, and what it must not, as patterns; `never` is also for the sentence."""

    says: str
    never: str = _LARGER


_MASKED = r"mask"
_INSIDE = r"inside|below|<|\bat most\b|range|mask|>= 0"
_WIDE = r"64|int64"

#: By program. Patterns are of what puts the program right, not of what the doctor says of it.
FIXES = {
    "altered_code": Fix(r"cache|compile|Triton"),
    "asserted_index": Fix(rf"ids|index|assert|{_INSIDE}"),
    "bias_mask": Fix(r"<"),
    "cache_rows": Fix(_WIDE),
    "causal_convolution": Fix(r">= 0"),
    "compiled_embedding": Fix(r"tokens inside 0 to 127"),
    "compiled_gradient": Fix(_INSIDE),
    "compiled_labels": Fix(r"labels inside 0 to 49|index of `picked"),
    "compiled_lookup": Fix(r"ids inside 0 to 999"),
    "compiled_own_kernel": Fix(r"mask|< n"),
    "compiled_pages": Fix(r"inside 0 to 39"),
    "compiled_scatter": Fix(r"slots inside 0 to 99"),
    "cpu_tensor": Fix(r"device|cuda|GPU"),
    "embedding_row": Fix(_INSIDE),
    "empty_residual": Fix(r"pass|tensor|residual", never=r"\bmask\b"),
    "even_heuristic": Fix(r"mask|heuristic|EVEN"),
    "expanded_out": Fix(r"one program|copy|atomic|contiguous|clone|stride|launches"),
    "false_hint": Fix(r"hint|multiple|align|stride|pitch"),
    "fewer_keys": Fix(r"num_keys|50|rows|mask"),
    "fresh_accumulator": Fix(r"clear|zero|write", never=r"\bmask\b"),
    "graph_input_freed": Fix(r"keep|alive|capture", never=r"\bmask\b"),
    "graph_workspace_grown": Fix(r"keep|alive|capture", never=r"\bmask\b"),
    "grid_too_large": Fix(r"grid|program|mask"),
    "half_as_wide": Fix(r"larger|wide|width|room|128|64", never=r"stride"),
    "half_scales": Fix(r"width|cast|float32|type|bytes"),
    "head_offset": Fix(_WIDE),
    "histogram_race": Fix(r"atomic|one program"),
    "ignored_label": Fix(rf"{_INSIDE}|-100|leave"),
    "last_bin": Fix(rf"{_INSIDE}|bin", never=r"at < n\b"),
    "last_block_sums": Fix(r"two launches|launch|program|atomic"),
    "last_group": Fix(r"mask|< width|88"),
    "listed_addresses": Fix(r"keep|alive|free|address|pointer|entry"),
    "lock_not_released": Fix(r"lock|release|end|loop|while"),
    "mask_of_bytes": Fix(r"width|cast|int32|type|bytes"),
    "matmul_depth": Fix(r"< K`|< K\)", never=rf"< [MN]\b|{_LARGER}"),
    "moving_pointer": Fix(_WIDE),
    "narrow_indices": Fix(r"width|cast|int64|type|bytes"),
    "no_adapter": Fix(rf"{_INSIDE}|-1"),
    "norm_tail": Fix(r"mask|< width", never=rf"stride|{_LARGER}"),
    "overlapping_tiles": Fix(r"one program|STEP|WIDTH|atomic|window"),
    "padded_expert": Fix(rf"{_INSIDE}|larger|room|9\b", never=r"at < n\b"),
    "padded_slot": Fix(rf"{_INSIDE}|-1"),
    "padding_read": Fix(r"mask|clear|write"),
    "page_offset": Fix(_WIDE),
    "position_behind_table": Fix(rf"{_INSIDE}|rows|position"),
    "print_in_capture": Fix(r"capture|after|before|outside"),
    "quantised_tail": Fix(r"mask|<|earlier"),
    "resized_storage": Fix(r"pass|keep|alive|storage|tensor"),
    "rows_in_z": Fix(r"65,?535|first|axis|dimension|grid"),
    "running_sum": Fix(r"one program|launches|copy|program"),
    "same_slot_twice": Fix(r"one program|slot|atomic"),
    "sampled_beyond": Fix(rf"{_INSIDE}|logit|larger|names"),
    "sequence_ends": Fix(rf"{_INSIDE}|300|end"),
    "shifted_in_place": Fix(r"copy|launches|one program|elsewhere"),
    "short_positions": Fix(r"width|cast|int32|type|bytes"),
    "sliced_rows": Fix(r"stride|32|num_rows|mask", never=_LARGER),
    "smaller_batch": Fix(r"grid|program|rows|mask", never=rf"column|{_LARGER}"),
    "softmax_tail": Fix(r"mask|< num_columns"),
    "split_depth": Fix(r"atomic|one program"),
    "staged_scale": Fix(r"compile|stage|Triton"),
    "statistics_of_few": Fix(r"grid|program|write|clear", never=r"\bmask\b"),
    "stencil_edge": Fix(r"< n|mask|earlier"),
    "step_of_nothing": Fix(r"step|end|loop|while|at\b"),
    "stride_in_bytes": Fix(r"stride = 100|100|stride", never=_LARGER),
    "table_behind_end": Fix(rf"{_INSIDE}|MORE|earlier|page|loop|entry|length"),
    "tail_not_written": Fix(r"Launch|grid|program", never=r"\bmask\b"),
    "tile_too_large": Fix(r"smaller|tile|block|stage|shared"),
    "torch_embedding": Fix(_INSIDE),
    "transpose_mask": Fix(r"row|column|mask|exchange|earlier", never=_LARGER),
    "transposed_weight": Fix(r"stride", never=rf"\bmask\b|{_LARGER}"),
    "tuned_without_mask": Fix(r"mask|grid|< n"),
    "unlike_shapes": Fix(r"shape|compile|block|A\b|B\b"),
    "vocabulary_logits": Fix(_WIDE),
    "waits_for_flag": Fix(r"flag|end|loop|while|wait"),
    "workspace_for_fewer": Fix(r"larger|room|79|grid|program|mask", never=r"\bat < n\b|stride"),
    "padded_vocabulary": Fix(r"stride|pitch|packed"),
    "gradient_mean": Fix(r"other"),
    "mask_not_passed": Fix(r"mask"),
    "group_past_columns": Fix(r"inside|columns|\bn\b|offs_n|< 33"),
    "block_as_pitch": Fix(r"BLOCK|width|pitch|stride|60"),
    "leading_dimension": Fix(r"lda|stride|60", never=r"\bmask\b"),
    "first_difference": Fix(r">= 0|> 0"),
    "halved_rows": Fix(_INSIDE),
    "grid_short_in_y": Fix(r"Launch|grid|program", never=r"\bmask\b"),
    "mask_ends_early": Fix(r"mask|< n|later", never=r"grid"),
    "keys_of_longest": Fix(r"mask|seqlen|length|own|<"),
    "lost_count": Fix(r"atomic|one program"),
    "side_stream_early": Fix(r"wait"),
    "side_result_early": Fix(r"wait"),
    "alias_on_side": Fix(r"wait"),
    "event_too_early": Fix(r"wait"),
    "prefetch_no_wait": Fix(r"wait"),
    "graph_input_early": Fix(r"wait"),
    "weights_replaced_early": Fix(r"wait"),
    "bucket_added_early": Fix(r"wait"),
    "freed_for_side": Fix(r"record_stream|wait"),
    "prefetch_not_kept": Fix(r"record_stream|wait"),
    "kernel_of_freed_scratch": Fix(r"record_stream|wait"),
    "host_reads_early": Fix(r"synchronize"),
    "host_copy_early": Fix(r"synchronize"),
    "staging_rewritten": Fix(r"synchronize|wait"),
}  # fmt: skip


def judged(
    roots: list[dict[str, Any]] | None,
    *,
    causes: Iterable[str],
    kernel: str,
    arguments: Iterable[str],
    lines: set[int],
    fix: Fix | None,
    program: Path,
    changed: set[int] | None = None,
) -> dict[str, Any]:
    """What of the first root is right, and whether all roots are.

    Without `lines`, `arguments` or `fix` there is no such claim to be wrong. A root whose line lies
    in another file is told by its kernel. A `kernel` that ends with `_` is how the names begin that
    a compiler makes. Where it is known which lines of `program` were `changed`, whoever is blamed
    must be one of them. `says` is right, vague, silent or false.
    """
    known = {"causes": tuple(causes), "arguments": tuple(arguments)}
    told = [
        _claims(root, known, kernel, lines, fix, is_own=_is_of(root, program))
        for root in roots or [{}]
    ]
    if changed is not None:
        for root, claims in zip(roots or [{}], told, strict=True):
            claims["line"] &= _blames(root, changed, program)
    found: dict[str, Any] = {f"{claim}_right": told[0][claim] for claim in CLAIMS}
    is_right = all(all(claims.values()) for claims in told)
    is_vague = bool(roots) and all(
        _is_vague(root, claims, changed) for root, claims in zip(roots or (), told, strict=True)
    )
    says = "silent" if not roots else "right" if is_right else "vague" if is_vague else "false"
    return found | {"is_right": says == "right", "says": says}


def _is_vague(
    root: Mapping[str, Any], claims: Mapping[str, bool], changed: set[int] | None
) -> bool:
    """Whether all that a root claims is right, and it leaves out why, or whom to blame."""
    left_out = {"cause", "fix"} if root["cause"] == VAGUE else set()
    if changed is not None and not root.get("culprit") and not root.get("file"):
        left_out |= {"line"}
    return bool(left_out) and all(claims[name] for name in claims.keys() - left_out)


def _is_of(root: Mapping[str, Any], program: Path) -> bool:
    return Path(str(root.get("file") or "")).name == program.name


def _is_kernel(name: str, kernel: str) -> bool:
    """`kernel` is a name, or how it begins; several are separated by |."""
    return any(
        not known or (name.startswith(known) if known.endswith("_") else name == known)
        for known in kernel.split("|")
    )


def _blames(root: Mapping[str, Any], lines: set[int], program: Path) -> bool:
    """Whether the line that is to be changed is one of these, by the culprit or the root itself."""
    place = (root.get("culprit") or {}).get("place") or f"{root.get('file')}:{root.get('line')}"
    file, _, line = str(place).rpartition(":")
    is_there = program.as_posix().endswith(f"/{file.lstrip('/')}")
    return is_there and line.isdigit() and int(line) in lines


def _claims(
    root: Mapping[str, Any],
    known: Mapping[str, tuple[str, ...]],
    kernel: str,
    lines: set[int],
    fix: Fix | None,
    *,
    is_own: bool,
) -> dict[str, bool]:
    return {
        "cause": root.get("cause") in known["causes"],
        "kernel": _is_kernel(root.get("kernel") or "", kernel),
        "argument": not known["arguments"] or root.get("argument") in known["arguments"],
        "line": not lines or not is_own or root.get("line") in lines,
        "fix": fix is None or _is_fix(root, fix),
    }


def _is_fix(root: Mapping[str, Any], fix: Fix) -> bool:
    """Alternatives are no claim that any of them is right, but one must be."""
    alternatives = root.get("alternatives") or ()
    texts = [str(one.get("fix") or "") for one in alternatives] or [str(root.get("fix") or "")]
    said = " ".join((*texts, str(root.get("sentence") or "")))
    is_never = not alternatives and bool(fix.never) and re.search(fix.never, said, re.I)
    return any(re.search(fix.says, text, re.I) for text in texts) and not is_never
