"""`hypo verify` and `hypo audit` as the command line has them: words, and who does the work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from hypocenter.base.errors import UsageError
from hypocenter.cli.model_app import Model, ModelOptions
from hypocenter.cli.new_file import check_new_file
from hypocenter.cli.options import AsJson, EngineOptions, Quiet, naming_options

_GROUP = Group("Verification", sort_key=1)


@Parameter(name="*", group=_GROUP)
@dataclass(frozen=True)
class VerifyOptions:
    """How long is looked, and at what beside."""

    quick: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="Look for 20 s, not two minutes; the first run compiles for a minute at most.",
        ),
    ] = False
    long: Annotated[
        bool, Parameter(negative="", show_default=False, help="Look for a quarter of an hour.")
    ] = False
    memory: Annotated[
        bool,
        Parameter(negative="", show_default=False, help="Write patterns into free memory, too."),
    ] = False
    arch: Annotated[str, Parameter(name="--arch", help="Of a file: the GPU that it sees.")] = (
        "sm_90"
    )
    budget: Annotated[
        float,
        Parameter(name="--budget", help="Of a file: processor seconds for running programs."),
    ] = 60.0
    tests: Annotated[
        str | None,
        Parameter(
            help="Of a file: write each smallest failing launch into this folder, as a test."
        ),
    ] = None
    html: Annotated[str | None, Parameter(help="Also write a page to this new file.")] = None

    @property
    def effort(self) -> str:
        """A key of EFFORTS; raises UsageError for both words."""
        if self.quick and self.long:
            raise UsageError("--quick and --long exclude each other; give one of them")
        return "quick" if self.quick else "long" if self.long else "default"


def verify(
    model: Annotated[
        str | None,
        Parameter(
            help="A model as of hypo run, the bundled one when left out; or FILE.py with kernels "
            "of your own, which is run."
        ),
    ] = None,
    /,
    *,
    models: ModelOptions | None = None,
    options: VerifyOptions | None = None,
    engine: EngineOptions | None = None,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Look whether this machine computes a model rightly.

    Each form of a launch runs on drawn inputs and is held against float64. Then
    logits are held against the CPU engine's, and the same work is repeated under
    load. Each stage plants an error of known size and must see it. What was not
    looked at is told. The exit code is 4 when something is wrong, and 5 when a
    planted error was not seen.

    Of FILE.py each launch runs on the CPU with every access checked, and is held
    against the function that @hypocenter.reference(kernel) marks.
    """
    from hypocenter.cli.verbs import verify as cli_verify

    engine, options = engine or EngineOptions(), options or VerifyOptions()
    if options.html is not None:
        check_new_file("--html", options.html)
    if model is not None and model.endswith(".py"):
        cli_verify.verify_own(
            Path(model),
            options.arch,
            options.budget,
            Path(options.tests) if options.tests is not None else None,
            page=options.html,
            as_json=json,
        )
        return
    effort, config = options.effort, engine.config()
    path = (models or ModelOptions()).path(model, device=engine.device, quiet=quiet)
    with naming_options(EngineOptions):
        cli_verify.verify(
            path,
            config,
            effort,
            with_memory=options.memory,
            page=options.html,
            as_json=json,
            quiet=quiet,
        )


_AUDIT_GROUP = Group("Audit", sort_key=1)


@Parameter(name="*", group=_AUDIT_GROUP)
@dataclass(frozen=True)
class AuditOptions:
    """How much is run."""

    long: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="More runs, a longer soak, and of a simulated GPU the sizes of a real one.",
        ),
    ] = False
    html: Annotated[str | None, Parameter(help="Also write a page to this new file.")] = None


def audit(
    model: Model = None,
    /,
    *,
    models: ModelOptions | None = None,
    options: AuditOptions | None = None,
    engine: EngineOptions | None = None,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Audit what the engine does with a model, by what it records of itself.

    Most gates run the same requests in two ways and compare the bits: prompts in
    chunks, answers token by token, batches of up to 64, graphs, before and after a
    death. Other devices, two ranks, and ops in parts on a GPU are held to a
    distance. Which way a side took is read from the engine's record. A gate fails
    where that is not what was asked for, or where both sides took the same. Others
    look at repeats, at copies between host and device, and at memory. Each gate
    plants errors and must see them. What cannot be run is not audited, with the
    reason. The exit code is 4 when something is wrong, and 5 when a planted error
    was not seen.
    """
    from hypocenter.cli.verbs import audit as cli_audit

    engine, options = engine or EngineOptions(), options or AuditOptions()
    if options.html is not None:
        check_new_file("--html", options.html)
    config = engine.config()
    path = (models or ModelOptions()).path(model, device=engine.device, quiet=quiet)
    with naming_options(EngineOptions):
        cli_audit.audit(
            path, config, is_long=options.long, page=options.html, as_json=json, quiet=quiet
        )
