"""`hypo eval`: prints the figures of tasks that `evals/evaluating.py` has run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from hypocenter.cli.answer import open_llm
from hypocenter.cli.output import show, show_json
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.cli.tool_options import EvalOptions
from hypocenter.evals.evaluating import EvalTask, require_library
from hypocenter.evals.evaluating import evaluate as run_tasks
from hypocenter.settings.config import EngineConfig

__all__ = ["evaluate", "require_library"]


def evaluate(
    path: str,
    config: EngineConfig,
    names: Sequence[str],
    options: EvalOptions,
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run the tasks and print their figures.

    Raises UsageError for an unknown task, and what a model is refused by.
    """
    folder = Path(options.include) if options.include is not None else None
    with (
        ProgressDisplay(quiet=quiet or as_json) as progress,
        open_llm(path, config, progress) as llm,
    ):
        progress.clear()
        num_fewshot, limit = options.num_fewshot, options.limit
        found = run_tasks(llm, names, folder=folder, num_fewshot=num_fewshot, limit=limit)
    if as_json:
        show_json({"model": Path(path).name, "tasks": found})
    else:
        show("\n".join(task_lines(found)))


def task_lines(found: Sequence[EvalTask]) -> Iterator[str]:
    """A line for each figure of each task, with its standard error."""
    width = max((len(task.name) for task in found), default=0)
    for task in found:
        for key, value in task.figures.items():
            metric, _, kind = key.partition(",")
            if metric.endswith("_stderr"):
                continue
            error = task.figures.get(f"{metric}_stderr,{kind}")
            spread = f" +/- {error:.4f}" if error is not None else ""
            shown = metric if kind in ("", "none") else f"{metric} ({kind})"
            yield f"{task.name:<{width}}  {shown:<20} {value:.4f}{spread}  n={task.num_samples}"
