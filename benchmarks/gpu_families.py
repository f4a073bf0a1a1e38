"""Each family on a real GPU: logits of a small random model beside transformers in float32.

The models are those of `tests/model/test_families.py`, which runs a few of them on a simulated GPU.
Each is run twice: its prompt in one pass, then token by token, so that kernels of many rows and of
one are both compiled and used. Several processes share the card, for compiling takes the time.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))
#: As in `tests/model/test_families.py`: largest difference over largest logit.
TOLERANCE = 3e-5
SECONDS = 300.0
NUM_PROMPT_TOKENS, NUM_DECODE_TOKENS = 96, 40
#: A process holds a context on the card, and some hundreds of megabytes of the host.
NUM_JOBS = max(1, min(12, (os.cpu_count() or 2) // 2))


def run(device: str) -> dict[str, Any]:
    """Run every family that the transformers at hand has; content when all are within bounds."""
    from models.family_table import FAMILIES

    rows = sorted(_rows(sorted(FAMILIES), device), key=lambda row: str(row["family"]))
    absent = [row["family"] for row in rows if "absent" in row]
    wrong = [row for row in rows if "absent" not in row and not _is_within(row)]
    return {
        "ok": len(rows) > len(absent) and not wrong and len(rows) == len(FAMILIES),
        "num_families": len(FAMILIES),
        "num_run": len(rows) - len(absent),
        "absent": absent,
        "wrong": wrong,
        "rows": rows,
        "table": _table(rows),
    }


def _is_within(row: dict[str, Any]) -> bool:
    return "problem" not in row and max(row["prompt"], row["decode"]) < TOLERANCE


def _rows(names: list[str], device: str) -> Iterator[dict[str, Any]]:
    """One row a family; what had not begun by the deadline is left out."""
    until = time.monotonic() + SECONDS
    pool = ProcessPoolExecutor(NUM_JOBS, mp_context=get_context("spawn"))
    try:
        running = {pool.submit(examine, name, device): name for name in names}
        for done in as_completed(running, timeout=max(1.0, until - time.monotonic())):
            yield done.result()
    except TimeoutError:
        return
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def examine(name: str, device: str) -> dict[str, Any]:
    """The largest relative errors of a family's prompt and of its decode."""
    import numpy as np
    from models.families import engine_logits, hf_logits, make_family

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            _require_norm_of_groups(name)
            model = make_family(name, Path(folder))
        except (AttributeError, ImportError) as error:
            return {"family": name, "absent": str(error)[:200]}
        try:
            errors = {}
            for kind, num_tokens, chunk in (
                ("prompt", NUM_PROMPT_TOKENS, 512),
                ("decode", NUM_DECODE_TOKENS, 1),
            ):
                ids = model.token_ids[:num_tokens]
                ours = engine_logits(model.path, ids, model.context_length, chunk, device)
                theirs = hf_logits(model.hf_model, ids)
                errors[kind] = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
        except Exception as error:  # told as this family's result, and makes the section fail
            problem = f"{type(error).__name__}: {error}"
            return {"family": name, "problem": problem[:600]}
    return {"family": name, **errors, "seconds": round(time.monotonic() - began, 1)}


def _require_norm_of_groups(name: str) -> None:
    """Raise ImportError where a family's gated norm has groups that this transformers leaves out.

    Version 5.17 takes one mean over all channels of Granite's, whatever the configuration says.
    """
    from models.family_table import FAMILIES

    family = FAMILIES[name]
    if family.arch == "granitehybrid" and family.config["mamba_n_groups"] > 1:
        from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite

        norm = granite.GraniteMoeHybridRMSNormGated
        if "group_size" not in inspect.signature(norm).parameters:
            raise ImportError(f"{norm.__name__} has no groups")


def _table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| family | prompt | decode |", "|---|---|---|"]
    for row in rows:
        if "prompt" in row:
            lines.append(f"| {row['family']} | {row['prompt']:.1e} | {row['decode']:.1e} |")
        else:
            told = row.get("problem") or f"needs a newer transformers: {row['absent']}"
            lines.append(f"| {row['family']} | {told} | |")
    return lines
