"""The verbs of `hypo lab`; each imports its part inside, so that help loads no kernels."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import App, Parameter

from hypocenter.cli.options import AsJson, Quiet

VictimNames = Annotated[
    str, Parameter(name="NAME", help="Victims and harmless changes; all of them when left out.")
]
Name = Annotated[str, Parameter(help="Victim, as `hypo lab list` names it.")]
Device = Annotated[
    str,
    Parameter(
        show_default=False,
        help="Device instead of the victim's own, a simulated GPU; cuda or hip, say.",
    ),
]

lab = App(
    name="lab",
    help="Plant known defects in the real engine, and score what the doctor makes of them.",
    help_format="plaintext",
)


@lab.command(name="list")
def list_victims(*, json: AsJson = False) -> None:
    """Show every victim and harmless change: its name, how it shows, and what it is."""
    from hypocenter.cli.verbs import lab as lab_score

    lab_score.list_victims(as_json=json)


@lab.command
def run(
    name: Name,
    /,
    *,
    twin: Annotated[
        bool, Parameter(negative="", help="Its healthy twin: the same way, without the defect.")
    ] = False,
    device: Device = "",
    out: Annotated[
        str | None, Parameter(help="New folder for its bundle and for what it recorded.")
    ] = None,
) -> None:
    """Run one victim. It faults as it would in the field, so the exit code is that of its end."""
    from hypocenter.cli.verbs import lab as lab_score

    lab_score.run(name, twin=twin, device=device, out=out)


@lab.command
def score(
    *names: VictimNames,
    device: Device = "",
    jobs: Annotated[int, Parameter(help="Victims that run at the same time.")] = 2,
    json: AsJson = False,
) -> None:
    """Run victims and their twins, have each bundle diagnosed, and count what was told right.

    The doctor gets the bundle alone. The exit code is 4 when a victim does not
    show its symptom, goes undetected, too few are named right, a healthy twin
    or a harmless change has a finding, or the doctor is too slow.
    """
    from hypocenter.cli.verbs import lab as lab_score

    lab_score.score(names, device=device, num_jobs=jobs, as_json=json)


@lab.command
def serve(
    model: Annotated[
        str | None, Parameter(help="GGUF file; the bundled model when left out.")
    ] = None,
    /,
    *,
    kills: Annotated[int, Parameter(help="Workers to kill.")] = 20,
    streams: Annotated[int, Parameter(help="Answers that are open at once.")] = 32,
    tokens: Annotated[int, Parameter(help="Tokens of each answer.")] = 200,
    signal: Annotated[
        Literal["KILL", "SEGV", "ABRT", "BUS"], Parameter(help="What they are killed by.")
    ] = "KILL",
    every: Annotated[
        float, Parameter(help="The longest time in seconds from a worker's start to its death.")
    ] = 1.5,
    illegal_access: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="No signal: a kernel of each worker writes far outside of its tensor.",
        ),
    ] = False,
    plant: Annotated[
        str | None,
        Parameter(
            help="Victims, or all: a worker has the defect, and all that shows is what clients get."
        ),
    ] = None,
    seed: Annotated[int, Parameter(help="Of the requests and the moments.")] = 0,
    device: Annotated[
        str | None,
        Parameter(help="Device of the workers. [default: cpu; with --plant the victim's own]"),
    ] = None,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Kill the workers of a server under load, and compare each answer with an undisturbed one.

    The exit code is 4 when a client saw an error, or an answer was changed.
    """
    from hypocenter.cli.model_app import ModelOptions
    from hypocenter.cli.verbs import lab_serve

    if plant is not None:
        lab_serve.serve_planted(plant, device=device or "", as_json=json, quiet=quiet)
        return
    plan = lab_serve.plan_of(
        ModelOptions().path(model),
        kills,
        streams,
        tokens,
        signal,
        seed,
        device or "cpu",
        illegal_access,
        every,
    )
    lab_serve.serve(plan, as_json=json, quiet=quiet)
