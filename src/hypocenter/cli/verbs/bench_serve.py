"""`hypo bench-serve`: puts a server under load and prints what its clients measure."""

from __future__ import annotations

import msgspec

from hypocenter.base.errors import HypoError
from hypocenter.cli.output import show, show_json
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.server.load import NEEDS_KEY, PERCENTILES, Figures, Load, run_load

_TIMES = (
    ("time to first token (TTFT)", "ttft_ms"),
    ("time per output token (TPOT)", "tpot_ms"),
    ("between two pieces (ITL)", "itl_ms"),
    ("whole request (E2EL)", "e2el_ms"),
)


def bench_serve(load: Load, *, as_json: bool, quiet: bool) -> None:
    """Run the load and print its figures. Raises HypoError when not one request was answered."""
    with ProgressDisplay(quiet=quiet) as progress:
        figures, _ = run_load(load, progress)
    if figures.num_errors == figures.num_requests:
        hint = NEEDS_KEY if figures.first_error.startswith("status 401") else ""
        raise HypoError(f"no request was answered: {figures.first_error}{hint}")
    if as_json:
        asked = {name: getattr(load, name) for name in load.__dataclass_fields__}
        del asked["api_key"]
        show_json({"load": asked, **msgspec.to_builtins(figures)})
    else:
        show(table(figures))


def table(figures: Figures) -> str:
    """The figures as lines of a table."""
    rows = [
        ("requests", f"{figures.num_requests}"),
        ("errors", f"{figures.num_errors}"),
        ("seconds", f"{figures.seconds:.2f}"),
        ("prompt tokens", f"{figures.prompt_tokens} ({figures.cached_tokens} cached)"),
        ("output tokens", f"{figures.output_tokens}"),
        ("requests/s", f"{figures.requests_per_second:.2f}"),
        ("output tokens/s", f"{figures.output_tokens_per_second:.1f}"),
        ("all tokens/s", f"{figures.total_tokens_per_second:.1f}"),
    ]
    lines = [f"{name:<30} {value:>12}" for name, value in rows]
    heads = ["mean", *(f"p{percentile}" for percentile in PERCENTILES)]
    lines += ["", f"{'milliseconds':<30}" + "".join(f"{head:>11}" for head in heads)]
    for name, field in _TIMES:
        spread = getattr(figures, field)
        cells = "".join(
            f"{spread[head]:>11.2f}" if head in spread else f"{'-':>11}" for head in heads
        )
        lines.append(f"{name:<30}{cells}")
    if figures.first_error:
        lines += ["", f"first error: {figures.first_error}"]
    return "\n".join(lines)
