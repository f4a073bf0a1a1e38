"""`hypo eval` as the command line has it."""

from __future__ import annotations

from hypocenter.cli.model_app import Model, ModelOptions
from hypocenter.cli.options import AsJson, EngineOptions, Quiet
from hypocenter.cli.tool_options import EvalOptions


def eval_tasks(
    model: Model = None,
    /,
    *,
    models: ModelOptions | None = None,
    options: EvalOptions | None = None,
    engine: EngineOptions | None = None,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run tasks of lm-eval, by its own library, on an engine of this process.

    pip install 'hypocenter[eval]' brings the library. It fetches the data that a
    task names. Files of tasks may run Python, and name files of this machine.
    """
    from hypocenter.cli.verbs import eval as cli_eval

    engine, options = engine or EngineOptions(), options or EvalOptions()
    names, config = options.names, engine.config()
    cli_eval.require_library()
    path = (models or ModelOptions()).path(model, device=engine.device, quiet=quiet)
    cli_eval.evaluate(path, config, names, options, as_json=json, quiet=quiet)
