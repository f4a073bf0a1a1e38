"""`hypo serve` and its options, spelled as llama-server and vLLM do where they agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from hypocenter.cli.options import AsJson, EngineOptions, Quiet, model_path
from hypocenter.config import MAX_KEY_BYTES, Environment
from hypocenter.errors import UsageError

_SERVER_GROUP = Group("Server", sort_key=1)


@Parameter(name="*", group=_SERVER_GROUP)
@dataclass(frozen=True)
class ServeOptions:
    """Where the server listens, whom it answers, and how much it takes on."""

    host: Annotated[
        str, Parameter(name="--host", help="Address to listen at; 0.0.0.0 is every one.")
    ] = "127.0.0.1"
    port: Annotated[int, Parameter(name="--port", help="Port to listen at; 0 takes any.")] = 8080
    api_key: Annotated[
        tuple[str, ...],
        Parameter(
            name="--api-key",
            negative="",
            show_default=False,
            help="Key that clients must have, for every route but /health; may be given again. "
            "Others can read a command line: HYPO_API_KEY and --api-key-file hide it.",
        ),
    ] = ()
    api_key_file: Annotated[
        str | None, Parameter(name="--api-key-file", help="File with a key on each line.")
    ] = None
    admin_key: Annotated[
        str | None, Parameter(name="--admin-key", help="Key of the routes below /debug/.")
    ] = None
    parallel: Annotated[
        int,
        Parameter(
            name=("-np", "--parallel", "--max-num-seqs"),
            help="Requests that run at once; others wait.",
        ),
    ] = 32
    kv_tokens: Annotated[
        int | None,
        Parameter(
            name="--kv-tokens",
            help="Tokens that the KV cache holds, of all requests together. [default: 4 contexts]",
        ),
    ] = None
    max_queued: Annotated[
        int, Parameter(name="--max-queued", help="Requests that may wait; then come 429s.")
    ] = 512
    served_model_name: Annotated[
        tuple[str, ...],
        Parameter(
            name=("--served-model-name", "-a", "--alias"),
            negative="",
            show_default=False,
            help="Name that clients call the model by; may be given again. "
            "[default: the file's name]",
        ),
    ] = ()
    cors_origin: Annotated[
        tuple[str, ...],
        Parameter(
            name="--cors-origin",
            negative="",
            show_default=False,
            help="Site whose pages may ask, such as https://example.com; may be given again.",
        ),
    ] = ()
    grace: Annotated[
        float,
        Parameter(name="--grace", help="Seconds that open answers get after SIGTERM or Ctrl-C."),
    ] = 30.0
    deadline: Annotated[
        float,
        Parameter(
            name="--deadline",
            help="Seconds that a step may take before its worker is replaced; the first one, which "
            "compiles, gets 600.",
        ),
    ] = 120.0
    bundles: Annotated[
        str,
        Parameter(
            name="--bundles",
            help="Folder for what a worker leaves that dies of a fault; the last eight are kept. "
            "An empty text keeps none.",
        ),
    ] = "hypo-faults"

    def keys(self) -> tuple[str, ...]:
        """All keys of clients. Raises UsageError for a file without any."""
        keys = [*self.api_key, *filter(None, [Environment.read().api_key])]
        if self.api_key_file is not None:
            try:
                with open(self.api_key_file, encoding="utf-8") as file:
                    lines = file.read(MAX_KEY_BYTES).split("\n")
            except UnicodeDecodeError:
                raise UsageError(f"--api-key-file {self.api_key_file} is not UTF-8") from None
            found = [line.strip() for line in lines if line.strip()]
            if not found:
                raise UsageError(f"--api-key-file {self.api_key_file} holds no key")
            keys += found
        if any(not key.strip() for key in keys):
            raise UsageError("an --api-key is empty; leave it out to let everybody in")
        return tuple(keys)


def serve(
    model: Annotated[
        str | None, Parameter(help="GGUF file; the bundled model when left out.")
    ] = None,
    /,
    *,
    server: ServeOptions | None = None,
    engine: EngineOptions | None = None,
    quiet: Quiet = False,
) -> None:
    """Serve the model over HTTP, as OpenAI's clients expect it.

    A worker process runs the model. When it dies, another one goes on with
    every open request: clients see a pause. SIGTERM or Ctrl-C lets open answers
    end; a second one does not. It needs the extra: pip install
    'hypocenter[server]'.
    """
    from hypocenter.cli.verbs import serve as cli_serve

    engine, server = engine or EngineOptions(), server or ServeOptions()
    cli_serve.serve(model_path(model), server, engine.config(), quiet=quiet)


def bench_serve(
    *,
    url: Annotated[str, Parameter(name="--url", help="The server.")] = "http://127.0.0.1:8080",
    num_requests: Annotated[
        int, Parameter(name=("-n", "--num-requests", "--num-prompts"), help="Requests in all.")
    ] = 64,
    concurrency: Annotated[
        int | None,
        Parameter(
            name=("-np", "--concurrency", "--max-concurrency"),
            help="Requests that are open at once. [default: 16, where no rate is given]",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        Parameter(name=("--rate", "--request-rate"), help="Requests a second, as people come."),
    ] = None,
    prompt_length: Annotated[
        int, Parameter(name=("--prompt-length", "--input-len"), help="Words of each prompt.")
    ] = 128,
    output_length: Annotated[
        int, Parameter(name=("--output-length", "--output-len"), help="Tokens of each answer.")
    ] = 64,
    lengths: Annotated[
        Literal["fixed", "sharegpt"],
        Parameter(name="--lengths", help="All alike, or drawn as those of people's chats."),
    ] = "fixed",
    shared_prefix: Annotated[
        int, Parameter(name="--shared-prefix", help="Words that all prompts begin with.")
    ] = 0,
    seed: Annotated[int, Parameter(name=("-s", "--seed"), help="Of prompts and arrivals.")] = 0,
    model: Annotated[
        str | None, Parameter(name=("-m", "--model"), help="[default: the server's first one]")
    ] = None,
    api_key: Annotated[str | None, Parameter(name="--api-key", help="Key to send.")] = None,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Put a server under load, and measure what its clients see.

    Any server with OpenAI's /v1/completions will do. Answers are as long as
    they are asked to be where the server knows ignore_eos.
    """
    from hypocenter.cli.verbs import bench_serve as cli_bench
    from hypocenter.server.load import Load

    load = Load(
        url=url,
        model=model,
        api_key=api_key,
        num_requests=num_requests,
        concurrency=16 if concurrency is None and rate is None else concurrency,
        rate=rate,
        prompt_length=prompt_length,
        output_length=output_length,
        lengths=lengths,
        shared_prefix=shared_prefix,
        seed=seed,
    )
    cli_bench.bench_serve(load, as_json=json, quiet=quiet)
