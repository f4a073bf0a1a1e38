"""`hypo warm`: compiles a model's kernels and packs its weights before they are needed."""

from __future__ import annotations

import time

import msgspec

from hypocenter.cli.answer import open_llm
from hypocenter.cli.output import show, show_json
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.settings.cache_folder import folder_bytes, private_folder
from hypocenter.settings.config import EngineConfig

#: Prompts of so many tokens run once: a step of some rows takes other kernels than one of many.
_PROMPT_LENGTHS = (1, 5, 40)


class _Warmth(msgspec.Struct):
    """What the next start finds. `weights_not_kept`: why not, empty when they are.

    `gpu_forms`: how many forms of kernels a GPU was given, which lie in `gpu_cache`.
    """

    seconds: float
    cache: str
    kernels_bytes: int
    weights_bytes: int
    weights_not_kept: str
    gpu_forms: int
    gpu_cache: str


def warm(path: str, config: EngineConfig, *, as_json: bool, quiet: bool) -> None:
    """Load a model, run short prompts, and say what the next start finds."""
    started = time.perf_counter()
    with ProgressDisplay(quiet=quiet) as progress, open_llm(path, config, progress) as llm:
        progress("running short prompts", 0.0)
        for length in _PROMPT_LENGTHS:
            ids = [0] * min(length, llm.context_length - 2)
            llm.generate(ids, max_tokens=2, ignore_eos=True, temperature=0.0)
        runner = llm.engine.runner
        not_kept, num_forms = runner.weights.not_kept, runner.num_forms
        gpu_cache = runner.kernel_folder
    kernels, weights = (private_folder(name)[0] for name in ("kernels", "weights"))
    found = _Warmth(
        time.perf_counter() - started,
        str(kernels.parent) if kernels else "",
        folder_bytes(kernels) if kernels else 0,
        folder_bytes(weights) if weights else 0,
        not_kept,
        num_forms,
        gpu_cache,
    )
    if as_json:
        show_json(found)
        return
    show(f"ready after {found.seconds:.1f} s; what the next start finds in {found.cache}:")
    show(f"  kernels         {_mib(found.kernels_bytes)} of all models and instruction sets")
    if found.gpu_cache:
        show(f"  GPU kernels     {found.gpu_forms} forms in {found.gpu_cache}")
    show(f"  packed weights  {f'not kept: {not_kept}' if not_kept else _mib(found.weights_bytes)}")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
