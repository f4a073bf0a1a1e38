"""The verbs of servers; each imports its part inside, so that help loads little."""

from __future__ import annotations

import signal as signals
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from hypocenter.base.errors import UsageError
from hypocenter.cli.model_app import Model, ModelOptions
from hypocenter.cli.options import AsJson, EngineOptions, Quiet
from hypocenter.cli.serve_options import ServeOptions
from hypocenter.cli.served_models import chosen_models
from hypocenter.settings.environment import key_of_clients

if TYPE_CHECKING:
    from hypocenter.server.kills import KillPlan
    from hypocenter.server.load import Load

#: MODEL of `hypo serve`, which takes several.
Served = Annotated[
    tuple[str, ...],
    Parameter(
        show_default=False,
        help="GGUF files, or OWNER/NAME[:QUANT] of a hub; the bundled model when left out.",
    ),
]
_MAX_KILLS, _MAX_STREAMS, _MAX_TOKENS = 100_000, 1024, 100_000
_MAX_EVERY = 3600.0


def serve(
    model: Served = (),
    /,
    *,
    models: ModelOptions | None = None,
    server: ServeOptions | None = None,
    engine: EngineOptions | None = None,
    quiet: Quiet = False,
) -> None:
    """Serve one or more models over HTTP, as OpenAI's clients expect it.

    Of several, each is loaded when a request names it, and makes room for
    others when nobody does; one is there all the time.

    A worker process runs the model. When it dies, another one goes on with
    every open request: clients see a pause. SIGTERM or Ctrl-C lets open answers
    end; a second one does not. It needs the extra: pip install
    'hypocenter[server]'.

    Each option may also come from the environment (HYPO_SERVE_PORT=8000) or
    from a TOML file (--config). The command line comes first, then the
    environment, then the file.
    """
    from hypocenter.cli.verbs import serve as cli_serve

    engine, server = engine or EngineOptions(), server or ServeOptions()
    config = engine.config()  # refused before a model is fetched
    choice = chosen_models(
        model, models or ModelOptions(), server, device=engine.device, quiet=quiet
    )
    cli_serve.serve(choice, server, config, quiet=quiet)


@Parameter(name="*")
@dataclass(frozen=True)
class LoadOptions:
    """The requests that a server is put under."""

    url: Annotated[str, Parameter(name="--url", help="The server.")] = "http://127.0.0.1:8080"
    uds: Annotated[
        str | None,
        Parameter(name="--uds", help="Unix socket to connect to, in place of the URL's port."),
    ] = None
    num_requests: Annotated[
        int, Parameter(name=("-n", "--num-requests", "--num-prompts"), help="Requests in all.")
    ] = 64
    concurrency: Annotated[
        int | None,
        Parameter(
            name=("-np", "--concurrency", "--max-concurrency"),
            help="Requests that are open at once. [default: 16, where no rate is given]",
        ),
    ] = None
    rate: Annotated[
        float | None,
        Parameter(name=("--rate", "--request-rate"), help="Requests a second, as people come."),
    ] = None
    prompt_length: Annotated[
        int, Parameter(name=("--prompt-length", "--input-len"), help="Words of each prompt.")
    ] = 128
    output_length: Annotated[
        int, Parameter(name=("--output-length", "--output-len"), help="Tokens of each answer.")
    ] = 64
    lengths: Annotated[
        Literal["fixed", "sharegpt"],
        Parameter(name="--lengths", help="All alike, or drawn as those of people's chats."),
    ] = "fixed"
    shared_prefix: Annotated[
        int, Parameter(name="--shared-prefix", help="Words that all prompts begin with.")
    ] = 0
    seed: Annotated[int, Parameter(name=("-s", "--seed"), help="Of prompts and arrivals.")] = 0
    model: Annotated[
        str | None, Parameter(name=("-m", "--model"), help="[default: the server's first one]")
    ] = None
    api_key: Annotated[
        str | None,
        Parameter(
            name="--api-key",
            help="Key to send. Without it HYPO_API_KEY or OPENAI_API_KEY has it, for this machine "
            "and for https.",
        ),
    ] = None

    def load(self) -> Load:
        """What is asked for; raises UsageError."""
        from hypocenter.server.load import Load

        given = dict(vars(self))
        if self.api_key is None:
            given["api_key"] = key_of_clients(self.url)
        if self.concurrency is None and self.rate is None:
            given["concurrency"] = 16
        return Load(**given)


def bench_serve(
    *, load: LoadOptions | None = None, json: AsJson = False, quiet: Quiet = False
) -> None:
    """Put a server under load, and measure what its clients see.

    Any server with OpenAI's /v1/completions will do. Answers are as long as
    they are asked to be where the server knows ignore_eos.
    """
    from hypocenter.cli.verbs import bench_serve as cli_bench

    cli_bench.bench_serve((load or LoadOptions()).load(), as_json=json, quiet=quiet)


@Parameter(name="*")
@dataclass(frozen=True)
class KillOptions:
    """How workers are killed, and under which load."""

    kills: Annotated[int, Parameter(help="Workers to kill.")] = 20
    streams: Annotated[int, Parameter(help="Answers that are open at once.")] = 32
    tokens: Annotated[int, Parameter(help="Tokens of each answer.")] = 200
    signal: Annotated[
        Literal["KILL", "SEGV", "ABRT", "BUS"], Parameter(help="What they are killed by.")
    ] = "KILL"
    every: Annotated[
        float, Parameter(help="The longest time in seconds from a worker's start to its death.")
    ] = 1.5
    seed: Annotated[int, Parameter(help="Of the requests and the moments.")] = 0
    device: Annotated[str, Parameter(help="Device of the workers.")] = "cpu"

    def plan(self, model: str) -> KillPlan:
        """What was asked for; raises UsageError for a number out of its range."""
        from hypocenter.server.kills import KillPlan

        limits = {
            "--kills": (self.kills, _MAX_KILLS),
            "--streams": (self.streams, _MAX_STREAMS),
            "--tokens": (self.tokens, _MAX_TOKENS),
        }
        for name, (value, high) in limits.items():
            if not 1 <= value <= high:
                raise UsageError(f"{name} is {value}, but must be from 1 to {high}")
        if not 0 <= self.every <= _MAX_EVERY:
            raise UsageError(
                f"--every is {self.every:g}, but must be from 0 to {_MAX_EVERY:g} seconds"
            )
        return KillPlan(
            model=model,
            num_kills=self.kills,
            num_streams=self.streams,
            num_tokens=self.tokens,
            signal=signals.Signals[f"SIG{self.signal}"],
            seed=self.seed,
            device=self.device,
            max_seconds=self.every,
        )


def kill_serve(
    model: Model = None,
    /,
    *,
    kills: KillOptions | None = None,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Kill the workers of a server under load, and compare each answer with an undisturbed one.

    The exit code is 4 when a client saw an error, or an answer was changed.
    """
    from hypocenter.cli.verbs import kill_serve as cli_kill

    plan = (kills or KillOptions()).plan(ModelOptions().path(model))
    cli_kill.kill_serve(plan, as_json=json, quiet=quiet)
