"""`hypo perplexity`: how well a model predicts a text, and how far it is from a base.

Computes by `engine/perplexity.py`; holds the words of its report.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from hypocenter.base.errors import UsageError
from hypocenter.cli.answer import open_llm
from hypocenter.cli.options import PromptOptions
from hypocenter.cli.output import show, show_json
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.cli.prompt_text import read_prompt
from hypocenter.cli.tool_options import PerplexityOptions
from hypocenter.settings.config import EngineConfig

#: Tokens of a chunk, as llama.cpp's tool has them.
CONTEXT = 512


def perplexity(path: str, asked: PerplexityOptions, config: EngineConfig) -> None:
    """Measure and print; raises UsageError."""
    from hypocenter.engine import perplexity as measuring  # loads what runs models

    with ExitStack() as stack:
        base = None
        if asked.is_compared:
            if asked.base is None:
                raise UsageError("--kl-divergence compares with a base; name --kl-divergence-base")
            if asked.file is not None:
                raise UsageError("the base of --kl-divergence has the text already; leave out -f")
            base = measuring.LogitsReader(Path(asked.base))
            stack.callback(base.close)
            if config.context_length not in (None, base.context):
                raise UsageError(
                    f"-c is {config.context_length}, and the chunks of {asked.base} are of "
                    f"{base.context}; leave out -c"
                )
        text = read_prompt(PromptOptions(file=asked.file))
        if text is None and base is None:
            raise UsageError("give a text by -f FILE")
        context = base.context if base is not None else config.context_length or CONTEXT
        config = replace(config, context_length=context, max_batch_requests=1, prefix_cache=False)
        progress = stack.enter_context(ProgressDisplay(quiet=asked.quiet))
        llm = stack.enter_context(open_llm(path, config, progress))

        def show_chunk(number: int, total: int, so_far: float) -> None:
            progress(f"chunk {number} of {total}: perplexity {so_far:.4f}", number / total)

        if base is not None:
            found = measuring.compare(llm, base, show_chunk, asked.chunks)
            progress.clear()
            show_json(found) if asked.json else show("\n".join(_divergence(found)))
            return
        assert text is not None
        # As llama.cpp's -f does.
        chunks = measuring.chunks_of(llm, text.removesuffix("\n"), context, asked.chunks)
        writer = None
        if asked.base is not None:
            writer = measuring.LogitsWriter(Path(asked.base), chunks, llm.vocab_size)
            stack.callback(writer.close)
        result = measuring.measure(llm, chunks, writer, show_chunk)
        progress.clear()
        if asked.json:
            show_json(result)
        else:
            show(
                f"perplexity {result.perplexity:.4f} +/- {result.error:.5f} of {result.num_tokens} "
                f"tokens in {result.num_chunks} chunks of {result.context_length}"
            )


def _divergence(found: object) -> list[str]:
    from hypocenter.engine.perplexity import Divergence

    assert isinstance(found, Divergence)
    quantiles = ", ".join(f"{name} %: {value:.6f}" for name, value in found.quantiles.items())
    same, more = found.same_top, found.probability
    return [
        f"perplexity of the model  {found.model.perplexity:.6f} +/- {found.model.error:.6f}",
        f"perplexity of the base   {found.base.perplexity:.6f} +/- {found.base.error:.6f}",
        f"ln of their ratio        {found.log_ratio.mean:.6f} +/- {found.log_ratio.error:.6f}",
        f"correlation of ln        {100 * found.correlation:.2f} %",
        f"KL divergence            {found.divergence.mean:.6f} +/- {found.divergence.error:.6f}",
        f"  at most                {found.divergence_max:.6f}",
        f"  quantiles              {quantiles}",
        f"change of probability    {100 * more.mean:.3f} +/- {100 * more.error:.3f} %",
        f"  root mean square       {100 * found.probability_rms:.3f} %",
        f"same most likely token   {100 * same.mean:.3f} +/- {100 * same.error:.3f} %",
    ]
