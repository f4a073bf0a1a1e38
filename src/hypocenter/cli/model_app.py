"""The model that a verb is given, a file or a name, and the verbs `hypo pull` and `hypo models`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from hypocenter.base.errors import UsageError
from hypocenter.base.package import bundled_model
from hypocenter.cli.options import AsJson, EngineOptions, Quiet, TextOptions
from hypocenter.cli.tool_options import QuantizeOptions

#: MODEL of every verb that takes one.
Model = Annotated[
    str | None,
    Parameter(
        help="GGUF file, or OWNER/NAME[:QUANT] of a hub, such as OWNER/NAME:Q4_K_M; the bundled "
        "model when left out."
    ),
]
_MODEL_GROUP = Group("Model", sort_key=0)


@Parameter(name="*", group=_MODEL_GROUP)
@dataclass(frozen=True)
class ModelOptions:
    """Other ways to name the model, as llama.cpp has them."""

    model: Annotated[
        str | None, Parameter(name=("-m", "--model"), help="Another way to name MODEL.")
    ] = None
    hf_repo: Annotated[
        str | None,
        Parameter(
            name=("-hf", "--hf-repo"),
            help="A model of a hub: OWNER/NAME[:QUANT]. It is fetched once. HF_TOKEN, HF_HOME and "
            "HF_ENDPOINT are heeded.",
        ),
    ] = None

    def path(self, positional: str | None, *, device: str = "cpu", quiet: bool = False) -> str:
        """The model file, fetched if need be; raises UsageError when it is named in two ways."""
        named = {"MODEL": positional, "-m": self.model, "-hf": self.hf_repo}
        given = {way: name for way, name in named.items() if name is not None}
        if len(given) > 1:
            ways = " and ".join(f"{way} {name!r}" for way, name in given.items())
            raise UsageError(f"two models, {ways}; name it once")
        if not given:
            return str(bundled_model())
        [(way, name)] = given.items()
        from hypocenter.cli.verbs.models import model_file

        return model_file(name, is_hub=way == "-hf", device=device, quiet=quiet)


def embed(
    model: Annotated[
        str,
        Parameter(help="GGUF file, or OWNER/NAME[:QUANT] of a hub, that gives vectors or scores."),
    ],
    /,
    *texts: Annotated[str, Parameter(help="Texts, or with --query documents.")],
    options: TextOptions | None = None,
    engine: EngineOptions | None = None,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Print the vector of each text, or with --query a score, the best first.

    A model that writes text gives vectors with --pooling mean or last.
    """
    from hypocenter.cli.verbs import embed as cli_embed

    engine = engine or EngineOptions()
    config = engine.config()  # refused before a model is fetched
    path = ModelOptions().path(model, device=engine.device, quiet=quiet)
    cli_embed.embed(path, texts, config, options or TextOptions(), as_json=json, quiet=quiet)


def quantize(
    source: Annotated[
        str,
        Parameter(name="IN", help="GGUF file, the first of a split model, or OWNER/NAME[:QUANT]."),
    ],
    out: Annotated[str, Parameter(name="OUT", help="The new file.")],
    kind: Annotated[str, Parameter(name="TYPE", help="Such as Q4_K_M, Q6_K, Q8_0, F16 or BF16.")],
    /,
    *,
    options: QuantizeOptions | None = None,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Write a model in another type, with the bytes that llama-quantize writes.

    Metadata stay but for general.file_type and general.quantization_version,
    and a split model becomes one file. The new file appears when it is whole.
    """
    from hypocenter.cli.verbs import quantize as cli_quantize

    path = ModelOptions().path(source, quiet=quiet)
    options = options or QuantizeOptions()
    cli_quantize.quantize(path, out, kind, options, as_json=json, quiet=quiet)


def pull(
    name: Annotated[
        str, Parameter(help="OWNER/NAME[:QUANT], OWNER/NAME/FILE.gguf, or an address.")
    ],
    /,
    *,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Fetch a model, or what has changed of it since; then say where it is.

    Without QUANT the one is taken that suits the memory of this machine. A
    download that breaks off goes on where it stopped, and what came is
    compared with the digest that the hub gives. Files lie in the cache of
    Hugging Face's own tools: HF_HOME, HF_TOKEN, HF_ENDPOINT and
    HF_HUB_OFFLINE are heeded.
    """
    from hypocenter.cli.verbs import models

    models.pull(name, as_json=json, quiet=quiet)


def models(
    action: Annotated[
        Literal["list", "remove"], Parameter(help="list, or remove: of NAME.")
    ] = "list",
    name: Annotated[
        str | None, Parameter(help="OWNER/NAME[:QUANT] or an address, as the list has it.")
    ] = None,
    /,
    *,
    json: AsJson = False,
) -> None:
    """Show the models that are here, or remove one, or all of a repository."""
    from hypocenter.cli.verbs import models as cli_models

    cli_models.models(action, name, as_json=json)
