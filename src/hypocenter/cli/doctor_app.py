"""The verbs `hypo doctor` and `hypo guard`, which run a command; each imports its part inside."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from hypocenter.cli.options import AsJson
from hypocenter.cli.tool_options import DoctorOptions
from hypocenter.cli.usage import VERBS


def doctor(
    *words: Annotated[str, Parameter(name="BUNDLE", help="Folder of a bundle.")],
    options: DoctorOptions | None = None,
    json: AsJson = False,
) -> None:
    """Find out why a run broke: from its bundle, or from a command behind -- that is run here.

    The command is one of hypo's, such as run MODEL, or any other program;
    of a Python program (-- python script.py) the launches of all Triton
    kernels are recorded, without a change to it.
    Its output is shown as it comes (on stderr with --json or --markdown),
    its stderr is kept, and Ctrl-C goes to it. When it faults, what it left
    is saved as a bundle and examined.

    The exit code is 3 when a fault was found, else the command's own; 1
    when --suspect finds nothing recorded to examine. A torch program that
    torch's anomaly mode ends is run once more with --nan.
    """
    if options and options.self_test:
        from hypocenter.cli.verbs import self_test

        self_test.self_test(words, options, as_json=json)
        return
    from hypocenter.cli.verbs import doctor as cli_doctor

    asked = cli_doctor.request(words, options or DoctorOptions(), VERBS, as_json=json)
    cli_doctor.doctor(asked)


def guard(
    *words: Annotated[str, Parameter(name="COMMAND", help="Behind --: what is run.")],
    json: AsJson = False,
) -> None:
    """Run a program with every Triton launch guarded: wrong accesses are masked off and told.

    The program stays as it is. On a GPU, or under TRITON_INTERPRET=1, each
    launch runs as a variant of its kernel that keeps every access inside the
    tensors of that launch, wherever their memory lies. So the program
    survives, and what is silently wrong in a pool of memory is found. Of each
    line and argument the first wrong access is told. What has no guarded form
    runs as it is, and is listed.

    The exit code is 4 when a wrong access was found, else the command's own;
    1 when nothing was launched.
    """
    from hypocenter.cli.verbs import guard as cli_guard

    cli_guard.guard(words, VERBS, as_json=json)
