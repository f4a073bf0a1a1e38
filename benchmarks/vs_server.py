"""Beside llama.cpp's `llama-server`: both serve the same file by turns, under the same load.

Each turn starts one server alone, asks the whole grid of it (streams, tokens of prompts, prompts of
their own and with a shared beginning), and ends it. The next turn is the other's, so that moods of
the machine meet both. Ratios are of the same turn: their median, lowest and highest. Prompts are
ids of tokens, so that both are asked for as many, whatever the file's words are. `{model}`,
`{port}`, `{context}` and `{slots}` in the peer's words are filled in. Writes JSON after each load.

    python benchmarks/vs_server.py model.gguf --device cuda \\
        --peer 'llama-server -m {model} --port {port} -c {context} -np {slots} -ngl 99 -fa on'
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from serve_process import free_port, own_command, running

from hypocenter.server.load import Figures, Load, run_load

ROOT = Path(__file__).parent.parent
#: What is compared: its name, where it lies in the figures, and what ours over the peer's is to be.
_FIGURES: tuple[tuple[str, Callable[[Figures], float], str], ...] = (
    ("tokens/s", lambda f: f.output_tokens_per_second, "at least 1.8"),
    ("first token, p50", lambda f: f.ttft_ms["p50"], "at most 0.6"),
    ("between pieces, p99", lambda f: f.itl_ms["p99"], "at most 0.7"),
)


class Cell(NamedTuple):
    """One load of the grid; half of a shared prompt is what all begin with."""

    streams: int
    prompt_tokens: int
    is_shared: bool

    def load(self, port: int, turn: int, options: argparse.Namespace) -> Load:
        own = self.prompt_tokens // 2 if self.is_shared else self.prompt_tokens
        return Load(
            url=f"http://127.0.0.1:{port}",
            num_requests=max(options.rounds * self.streams, 3),
            concurrency=self.streams,
            shared_prefix=self.prompt_tokens - own,
            token_ids=tuple(options.token_ids),
            prompt_length=own,
            output_length=options.output_length,
            seed=turn,
        )


def main() -> int:
    options = _options()
    cells = [
        Cell(streams, num_tokens, is_shared)
        for streams in options.streams
        for num_tokens in options.prompts
        for is_shared in (False, True)
    ]
    context = options.context or max(options.prompts) + options.output_length + 64
    slots = max(options.streams)
    own_words = ["--device", options.device, "-c", str(context), "-np", str(slots)]
    own_words += shlex.split(options.words)
    turns: list[dict[str, list[Figures]]] = []
    began = time.monotonic()
    for turn in range(options.turns):
        seconds = time.monotonic() - began
        if turn and options.seconds and seconds * (turn + 1) / turn > options.seconds:
            print(f"{turn} of {options.turns} turns: another one would not end in time")
            break
        of_turn: dict[str, list[Figures]] = {}
        turns.append(of_turn)
        for who in ("own", "peer") if options.peer else ("own",):
            port = free_port()
            command = own_command(options.model, port, *own_words)
            if who == "peer":
                filled = {"model": options.model, "port": port, "slots": slots}
                filled["context"] = context * slots
                command = [word.format(**filled) for word in shlex.split(options.peer)]
            of_turn[who] = []
            for figures in _ask_grid(command, port, turn, cells, options):
                of_turn[who].append(figures)
                _write(options, cells, turns)
        _show(cells, turns)
    return 0


def _ask_grid(
    command: Sequence[str], port: int, turn: int, cells: Sequence[Cell], options: argparse.Namespace
) -> Iterator[Figures]:
    """The figures of each load, of a server that is started for them."""
    with running(command, port):
        run_load(cells[0].load(port, 10_000, options))  # what is made at the first request is made
        for number, cell in enumerate(cells):
            figures, _ = run_load(cell.load(port, 100 * turn + number, options))
            if figures.num_errors:
                raise SystemExit(f"{command[0]}, {cell}: {figures.first_error}")
            print(f"{Path(command[0]).name} {tuple(cell)}: {_line(figures)}", flush=True)
            yield figures


def _line(figures: Figures) -> str:
    return ", ".join(f"{name} {of(figures):.1f}" for name, of, _ in _FIGURES)


def _show(cells: Sequence[Cell], turns: Sequence[dict[str, list[Figures]]]) -> None:
    """A row for each load; beside a peer ours, the peer's, and ours over the peer's."""
    goals = [f"{name} ({goal})" if "peer" in turns[0] else name for name, _, goal in _FIGURES]
    print(f"| streams | prompt | {' | '.join(goals)} |\n{'|---' * (2 + len(goals))}|")
    for number, cell in enumerate(cells):
        shown = []
        for _, of, _ in _FIGURES:
            values = {who: [of(t[who][number]) for t in turns] for who in turns[0]}
            medians = [statistics.median(some) for some in values.values()]
            text = ", ".join(f"{value:.1f}" for value in medians)
            if "peer" in values:
                pairs = zip(values["own"], values["peer"], strict=True)
                ratios = sorted(own / peer for own, peer in pairs)
                text += f": {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            shown.append(text)
        what = f"{cell.prompt_tokens}{', half of it shared' if cell.is_shared else ''}"
        print(f"| {cell.streams} | {what} | {' | '.join(shown)} |")


def _write(
    options: argparse.Namespace, cells: Sequence[Cell], turns: Sequence[dict[str, list[Figures]]]
) -> None:
    report: dict[str, Any] = {
        "model": options.label or Path(options.model).name,
        "date": datetime.date.today().isoformat(),
        "gpu": options.gpu,
        "device": options.device,
        "peer": options.peer,
        "output_tokens": options.output_length,
        "cells": [cell._asdict() for cell in cells],
        "turns": msgspec.to_builtins(turns),
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--peer", default="", help="command of the peer, as one text")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--words", default="", help="further words for hypo serve")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prompts", type=int, nargs="+", default=[256, 2000], help="tokens")
    parser.add_argument("--output-length", type=int, default=128, help="tokens")
    parser.add_argument("--rounds", type=int, default=2, help="answers of each stream")
    parser.add_argument(
        "--token-ids", type=int, nargs=2, default=(300, 30000), help="of prompts, from and below"
    )
    parser.add_argument("--seconds", type=float, help="begin no turn that would end later")
    parser.add_argument("--label", help="what the model is called in the report")
    parser.add_argument("--gpu", help="what the card is called there")
    parser.add_argument("--context", type=int, help="of each request")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/vs_server.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
