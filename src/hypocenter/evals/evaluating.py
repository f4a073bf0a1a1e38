"""Runs lm-eval's evaluator on a model, where that library is installed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from hypocenter.base.errors import MissingPackage, UsageError
from hypocenter.engine.llm import LLM


class EvalTask(msgspec.Struct, frozen=True):
    """The figures of a task or group, as lm-eval calls them: `acc,none` and `acc_stderr,none`."""

    name: str
    version: str
    num_samples: int
    figures: dict[str, float]


def require_library() -> None:
    """Raises MissingPackage where lm-eval is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise MissingPackage("hypo eval", "lm_eval") from error


def evaluate(
    llm: LLM,
    tasks: Sequence[str],
    *,
    folder: Path | None,
    num_fewshot: int | None,
    limit: int | None,
) -> list[EvalTask]:
    """The figures of tasks by name, of which `folder` may have files of its own.

    `limit`: so many samples of each. Raises MissingPackage, and UsageError for an unknown task.
    """
    require_library()
    # It fetches what a task names, and nothing else is to be told of what is run here.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from hypocenter.evals.language_model import HypocenterLM

    manager = TaskManager(include_path=str(folder) if folder is not None else None)
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise UsageError(f"lm-eval has no task {unknown[0]!r}; name one of its own, or --include")
    found = simple_evaluate(
        HypocenterLM(llm),
        tasks=list(tasks),
        task_manager=manager,
        num_fewshot=num_fewshot,
        limit=limit,
        log_samples=False,
    )
    return _figures(found)


def _figures(found: Any) -> list[EvalTask]:
    of_samples = found.get("n-samples", {})
    return [
        EvalTask(
            name,
            str(found.get("versions", {}).get(name, "")),
            int(of_samples.get(name, {}).get("effective", 0)),
            {
                key: float(value)
                for key, value in figures.items()
                if "," in key and isinstance(value, float | int)
            },
        )
        for name, figures in found["results"].items()
    ]
