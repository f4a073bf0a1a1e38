"""The command `hypo`: its verbs, and how an exception becomes one line and an exit code.

Each verb imports its part inside the verb, so that `hypo --help` loads neither numpy nor numba.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from hypocenter.base.errors import (
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    HypoError,
    UsageError,
)
from hypocenter.cli import interrupt
from hypocenter.cli.doctor_app import doctor, guard
from hypocenter.cli.eval_app import eval_tasks
from hypocenter.cli.model_app import Model, ModelOptions, embed, models, pull, quantize
from hypocenter.cli.options import (
    AsJson,
    ContextSize,
    EngineOptions,
    OutputOptions,
    PromptOptions,
    Quiet,
    RunSources,
    SamplingOptions,
    message_of,
)
from hypocenter.cli.serve_app import bench_serve, kill_serve, serve
from hypocenter.cli.tool_options import (
    AgainstOptions,
    BenchOptions,
    BisectOptions,
    ExportFile,
    PerplexityOptions,
    TraceOptions,
)
from hypocenter.cli.usage import (
    EPILOGUE,
    finish_help,
    forgotten_dashes,
    usage_message,
)
from hypocenter.cli.verify_app import audit, verify
from hypocenter.cli.words.reading import in_our_words
from hypocenter.cli.words.settings import fill

if TYPE_CHECKING:
    from rich.console import Console


def _version() -> str:
    from hypocenter.base.package import version

    return f"hypo {version()}"


app = App(
    name="hypo",
    help="Runs GGUF language models and explains its own faults.",
    help_epilogue=EPILOGUE,
    help_format="plaintext",
    version=_version,
    version_flags=["--version", "-V"],
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)

app.command(serve)
app["serve"].config = fill
app.command(doctor, usage="Usage: hypo doctor [OPTIONS] [BUNDLE] [-- COMMAND...]")
app.command(guard, usage="Usage: hypo guard [OPTIONS] -- COMMAND...")
app.command(bench_serve)
app.command(kill_serve)
app.command(embed)
app.command(pull)
app.command(verify)
app.command(audit)
app.command(eval_tasks, name="eval")
app.command(quantize)
app.command(models)
app.register_install_completion_command(help="Complete commands and options in this shell.")


@app.command
def run(
    model: Model = None,
    question: Annotated[
        str | None, Parameter(help="What a chat is asked; after the answer it ends.")
    ] = None,
    /,
    *,
    models: ModelOptions | None = None,
    prompt: PromptOptions | None = None,
    sampling: SamplingOptions | None = None,
    engine: EngineOptions | None = None,
    output: TraceOptions | None = None,
) -> None:
    """Chat with the model, answer one QUESTION, or continue a text (-p or -f).

    Without any of them the question is read from stdin, when that is no
    terminal. In a chat Ctrl-C stops the answer and Ctrl-D leaves; /help tells
    more.
    """
    from hypocenter.cli.verbs import run as cli_run

    prompt, sampling = prompt or PromptOptions(), sampling or SamplingOptions()
    engine, output = engine or EngineOptions(), output or TraceOptions()
    config = engine.config()  # refused before a model is fetched
    path = (models or ModelOptions()).path(model, device=engine.device, quiet=output.quiet)
    cli_run.run(path, question, prompt, sampling, config, output)


@app.command
def inspect(
    model: Model = None,
    /,
    *,
    models: ModelOptions | None = None,
    ctx_size: ContextSize = None,
    check: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="Look for NaN and Inf in every tensor; sha256 of the file.",
        ),
    ] = False,
    json: AsJson = False,
) -> None:
    """Show what a model file holds and what memory it needs. Runs nothing.

    With --check the exit code is 4 when a NaN or an infinity was found.
    """
    from hypocenter.cli.verbs import inspect as cli_inspect

    cli_inspect.inspect((models or ModelOptions()).path(model), ctx_size, check=check, as_json=json)


@app.command
def bench(
    model: Model = None,
    /,
    *,
    models: ModelOptions | None = None,
    tests: BenchOptions | None = None,
    engine: EngineOptions | None = None,
    json: AsJson = False,
) -> None:
    """Measure prompt and generation speed: a table like that of llama-bench.

    Tokenising and sampling are not counted. The last column is the share of the
    memory bandwidth, measured in the same run, that reading each weight once
    per token amounts to.
    """
    from hypocenter.cli.verbs import bench as cli_bench

    engine, tests = engine or EngineOptions(), tests or BenchOptions()
    config = engine.config()
    path = (models or ModelOptions()).path(model, device=engine.device)
    cli_bench.bench(path, tests, config, as_json=json)


@app.command
def perplexity(
    model: Model = None,
    /,
    *,
    models: ModelOptions | None = None,
    options: PerplexityOptions | None = None,
    engine: EngineOptions | None = None,
) -> None:
    """Measure how well a model predicts a text, as llama-perplexity does.

    The text is cut into chunks of -c tokens (512), each begins with BOS where
    the model wants one, and the tokens of its second half are scored. The error
    is the standard error of the mean.
    """
    from hypocenter.cli.verbs import perplexity as cli_perplexity

    engine, options = engine or EngineOptions(), options or PerplexityOptions()
    config = engine.config()
    path = (models or ModelOptions()).path(model, device=engine.device, quiet=options.quiet)
    cli_perplexity.perplexity(path, options, config)


@app.command
def warm(
    model: Model = None,
    /,
    *,
    models: ModelOptions | None = None,
    engine: EngineOptions | None = None,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Prepare a model, so that its next start is short: for an image of a container, say.

    Compiles the kernels that it needs and packs its weights. Both stay in the
    cache folder (HYPO_CACHE_DIR). Give the options of the runs to come.
    """
    from hypocenter.cli.verbs import warm as cli_warm

    engine = engine or EngineOptions()
    config = engine.config()
    path = (models or ModelOptions()).path(model, device=engine.device, quiet=quiet)
    cli_warm.warm(path, config, as_json=json, quiet=quiet)


@app.command
def env(*, json: AsJson = False) -> None:
    """Show every version, CPU feature, device and environment variable that matters here."""
    from hypocenter.cli.verbs import env as cli_env

    cli_env.env(as_json=json)


@app.command
def cache(
    action: Annotated[
        Literal["show", "clear"],
        Parameter(help="show, or clear: removes kernels and packed weights."),
    ] = "show",
    /,
    *,
    json: AsJson = False,
) -> None:
    """Show what the cache folder holds, or clear it. What is needed is made anew."""
    from hypocenter.cli.verbs import cache as cli_cache

    cli_cache.cache(clear=action == "clear", as_json=json)


@app.command
def kernels(
    file: Annotated[
        str | None,
        Parameter(help="Python file whose launches are taken; it is run. The project's without."),
    ] = None,
    /,
    *,
    arch: Annotated[
        str,
        Parameter(name="--arch", help="Architectures or products between commas, or all."),
    ] = "gfx942,gfx1100,sm_90",
    guarded: Annotated[
        bool, Parameter(negative="", show_default=False, help="Compile the checked variants.")
    ] = False,
    kernel: Annotated[str | None, Parameter(help="Only the kernel of this name.")] = None,
    json: AsJson = False,
) -> None:
    """Compile GPU kernels with no GPU present: registers, spills, shared memory, occupancy.

    The exit code is 4 when a kernel would not launch.
    """
    from hypocenter.cli.verbs import kernels as cli_kernels

    cli_kernels.kernels(file, arch, kernel, guarded=guarded, as_json=json)


@app.command
def check(
    file: Annotated[
        str,
        Parameter(
            help="FILE.py or FILE.py:kernel, which is run; with --on also HIP, .hsaco and .toml."
        ),
    ],
    /,
    *arguments: Annotated[str, Parameter(help="The file's own arguments; after -- for options.")],
    arch: Annotated[
        str, Parameter(name="--arch", help="GPUs that the file sees, between commas, or all.")
    ] = "sm_90",
    on: Annotated[
        str,
        Parameter(
            name="--on",
            show_default=False,
            help="AMD targets whose machine code is executed, between commas.",
        ),
    ] = "",
    budget: Annotated[
        float,
        Parameter(name="--budget", help="Processor seconds for running programs; then a sample."),
    ] = 60.0,
    verbose: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="Tell all int32 headroom, not only where a grid 100 times as large overflows.",
        ),
    ] = False,
    json: AsJson = False,
) -> None:
    """Run a file's Triton launches on the CPU and report every access that is wrong.

    This executes the file. It needs no GPU: device="cuda" is mapped to the CPU.
    Reported are accesses out of bounds, null pointers, uninitialised reads,
    races, outputs never written and int32 offsets that overflow. Of several GPUs
    the file is run once for each, and shares the budget. The exit code is 4 when
    something was found.

    With --on each launch is executed as AMD's machine code as well, by our
    emulator of it (not hardware). HIP is compiled by clang; its launches stand
    in a .toml file of the same name.
    """
    from hypocenter.cli.verbs import check as cli_check

    cli_check.check(file, arguments, arch, budget, on=on, as_json=json, show_all=verbose)


@app.command
def demo() -> None:
    """Show what the doctor does: a planted defect breaks a run, and the report is printed.

    It takes some seconds, and leaves a folder hypo-bundle. With Triton the run
    crashes a simulated GPU; without, the engine refuses a wrong entry on the
    CPU.
    """
    from hypocenter.cli.verbs import doctor as cli_doctor

    cli_doctor.demo()


@app.command
def replay(
    bundle: Annotated[str, Parameter(help="Folder of a bundle.")],
    /,
    *,
    step: Annotated[int | None, Parameter(help="All launches of this step.")] = None,
    launch: Annotated[int | None, Parameter(help="The launch of this number.")] = None,
    run_sources: RunSources = False,
    budget: Annotated[
        float,
        Parameter(name="--budget", help="Processor seconds for running programs; then a sample."),
    ] = 60.0,
    export: ExportFile = None,
    output: OutputOptions | None = None,
) -> None:
    """Run a bundle's launches again, on the CPU, with every access checked.

    Without --step and --launch these are the launches that may have been under
    way when the run ended. Index tensors hold what was recorded; other tensors
    are zeros. It needs Triton and no GPU. The exit code is 4 when something
    was found, and 1 when not one launch could be replayed.
    """
    from hypocenter.cli.verbs import replay as cli_replay

    output = output or OutputOptions()
    said = {"as_json": output.json, "quiet": output.quiet}
    if export is not None:
        from hypocenter.cli.verbs.export import export_launch

        export_launch(bundle, export, step, launch, allow_source=run_sources, **said)
        return
    cli_replay.replay(bundle, step, launch, budget, allow_source=run_sources, **said)


@app.command
def diff(
    good: Annotated[
        str, Parameter(help="Folder of the bundle of a run as it should be, a trace, or a model.")
    ],
    bad: Annotated[
        str | None, Parameter(help="Folder of the bundle of the other run, or the other trace.")
    ] = None,
    /,
    *,
    options: AgainstOptions | None = None,
) -> None:
    """Show the first place where two recorded runs part, or a model here and in another engine.

    Compared are launches by name, grid and arguments, the inputs of each step,
    and what each tensor held after each launch where both runs were traced
    (--launch-mode traced). The exit code is 4 when they differ.

    Of two traces (hypo run --trace) it shows the first point that differs, how
    that grows from layer to layer, and which of the two agrees with float64.
    That needs their elements (--trace-data). The exit code is 4 when they
    differ by more than rounding of float32.

    With --against ENGINE a model is run here and there, with the same tokens.
    It names the first op that is wrong, and whose fault that is: float64 is
    asked about both. The exit code is 4 then.
    """
    from hypocenter.cli import trace_report
    from hypocenter.cli.verbs import replay as cli_replay

    options = options or AgainstOptions()
    if options.against is not None:
        from hypocenter.cli.verbs import against as cli_against

        if bad is not None:
            raise UsageError(f"{bad}: --against takes one model; the other side is the engine")
        path = ModelOptions().path(good, device=options.device, quiet=options.quiet)
        cli_against.against(path, options)
        return
    if bad is None:
        raise UsageError("name two runs or two traces, or a model and --against ENGINE")
    if trace_report.are_traces(good, bad):
        trace_report.diff_traces(good, bad, as_json=options.json)
        return
    cli_replay.diff(good, bad, as_json=options.json)


@app.command
def bisect(
    a: Annotated[
        str,
        Parameter(help="A model, a tree of sources, or routes OP=FORM; `usual` is no route."),
    ],
    b: Annotated[str, Parameter(help="The other one, of the same kind.")],
    /,
    *,
    options: BisectOptions | None = None,
) -> None:
    """Find the op at which two runs part, and the one thing that explains it.

    Both sides are run and traced. Then what they differ in (a tensor or a key
    of the metadata, a file of the sources, the form of an op) is exchanged
    piece by piece, until B gives what A gives in all bits. Trees are run: their
    code is executed. The exit code is 4 when the two differ.
    """
    from hypocenter.cli.verbs import bisect as cli_bisect

    options = options or BisectOptions()
    named = ModelOptions(model=options.model)
    path = named.path(None, device=options.device, quiet=options.quiet)
    cli_bisect.bisect(a, b, path, options)


@app.command
def mcp(
    *,
    run_below: Annotated[
        str | None,
        Parameter(
            name="--run-below",
            help="Folder whose files an agent may have run by hypo check. [default: none is run]",
        ),
    ] = None,
) -> None:
    """Let agents examine bundles and reports: a server of the Model Context Protocol on stdio.

    It reads, and runs no source. With --run-below an agent may also have a file
    below that folder checked, which executes it. It needs the extra: pip
    install 'hypocenter[mcp]'.
    """
    from hypocenter.cli.verbs import mcp as cli_mcp

    cli_mcp.serve(run_below)


finish_help(app)


def own_verbs() -> set[str]:
    """The words that a command of `hypo` begins with."""
    return {word for word in app if not word.startswith("-")}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; always leaves by SystemExit with a documented code."""
    tokens, debug = _take_debug(sys.argv[1:] if argv is None else argv)
    try:
        with interrupt.handle_interrupts():
            debug = _prepare(debug)
            _tell_of_the_dead(tokens)
            if said := forgotten_dashes(tokens, list(app)):
                raise UsageError(said)
            tokens, remark = in_our_words(tokens, app)
            if remark is not None:
                _report(remark, debug=False)
            app(tokens, console=_help_console(tokens), exit_on_error=False, print_error=False)
            sys.stdout.flush()
        sys.exit(EXIT_OK)
    except KeyboardInterrupt:
        if sys.stderr and sys.stderr.isatty():
            print(file=sys.stderr)  # the cursor stands behind half an answer
        _report("interrupted", debug)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        from hypocenter.cli.output import leave_broken_pipe

        leave_broken_pipe()
    except CycloptsError as error:
        _report(usage_message(error), debug)
        sys.exit(EXIT_USAGE)
    except HypoError as error:
        _record_for_doctor(error)
        _report(f"{message_of(error)}{_way_to_the_doctor(error)}", debug)
        sys.exit(error.exit_code)
    except OSError as error:
        name = f"{error.filename}: " if error.filename is not None else ""
        _report(f"{name}{error.strerror or error}", debug)
        sys.exit(EXIT_ERROR)
    except Exception as error:
        _report(f"{type(error).__name__}: {error} (a defect; --debug shows where)", debug)
        sys.exit(EXIT_ERROR)


def _help_console(tokens: Sequence[str]) -> Console | None:
    """What a help page is written with: rich's own would leave with 1 when its reader went away."""
    if tokens and not {"--help", "-h"} & set(tokens):
        return None
    from rich.console import Console

    class PipeConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return PipeConsole()


def _take_debug(argv: Sequence[str]) -> tuple[list[str], bool]:
    """Remove `--debug` wherever it stands before `--`; `help VERB` is `VERB --help`.

    Whoever runs a command gets to see where it begins: a second `--` is a word as any other.
    """
    end = list(argv).index("--") if "--" in argv else len(argv)
    tokens = [token for token in argv[:end] if token != "--debug"]
    debug = len(tokens) < end
    if tokens[:1] == ["help"]:
        tokens = [*tokens[1:], "--help"]
    mark = ["--"] if tokens[:1] in (["doctor"], ["guard"]) and end < len(argv) else []
    return [*tokens, *mark, *argv[end:]], debug


def _prepare(debug: bool) -> bool:
    """Set up logging from the environment; returns whether tracebacks are wanted."""
    from hypocenter.settings.environment import Environment

    if sys.stdout is None:
        raise HypoError("stdout is closed, so what was asked for has nowhere to go")
    environment = Environment.read()
    logging.basicConfig(stream=sys.stderr, format="hypo: %(message)s", level=logging.WARNING)
    logging.getLogger("hypocenter").setLevel(environment.log.upper())
    for stream in (sys.stdout, sys.stderr):
        if stream and hasattr(stream, "reconfigure"):
            # A terminal that cannot show a character gets a mark for it instead of an error.
            stream.reconfigure(errors="backslashreplace")
    return debug or environment.debug


def _tell_of_the_dead(tokens: Sequence[str]) -> None:
    """Say once that the run before this one died; the doctor knows, and so does who asks him."""
    if not tokens or tokens[0].startswith("-") or tokens[0] == "doctor" or "--help" in tokens:
        return
    from hypocenter.settings.environment import Environment

    base = Environment.read().run_dir
    if base.is_dir():
        from hypocenter.watch import dead_runs

        if not dead_runs.is_watched(base) and (sentence := dead_runs.notice(base)):
            _report(sentence, debug=False)


def _record_for_doctor(error: HypoError) -> None:
    """Leaves the error as data where a doctor runs this command: it reads no sentence of ours.

    Wrong usage is no fault.
    """
    if error.exit_code == EXIT_USAGE:
        return
    from hypocenter.settings.environment import Environment
    from hypocenter.watch import dead_runs

    with contextlib.suppress(UsageError):  # of the environment itself, which was told of before
        if dead_runs.is_watched(Environment.read().run_dir):
            from hypocenter.record.recorder import open_recorder

            open_recorder().record_failure(error)


def _way_to_the_doctor(error: HypoError) -> str:
    """What to do about an error that the recorder has written down."""
    if not getattr(error, "is_recorded", False):
        return ""
    from hypocenter.record.recorder import Recorder, current
    from hypocenter.watch import dead_runs

    recorder = current()
    if not isinstance(recorder, Recorder):
        return ""
    if dead_runs.is_watched(recorder.folder.parent):
        return ""
    dead_runs.tell(recorder.folder)
    return "; see `hypo doctor --last`"


def _report(message: str, debug: bool) -> None:
    """One line on stderr."""
    if debug:
        traceback.print_exc()
    # Where stderr is gone too there is no one left to tell.
    from hypocenter.cli.output import say

    with contextlib.suppress(OSError):
        say(message)


if __name__ == "__main__":
    main()
