"""Hostile bundles for `hypo doctor`, `diff` and `replay`; `scripts/test-fuzz` runs it.

Each input is a bundle of the lab with one to three of its numbers, texts or lists replaced by worse
ones. Every command must end by itself, in bounded time and memory, with an exit code of ours, and
print JSON that is JSON and text without control characters. The first input that fails is kept.
"""

from __future__ import annotations

import ast
import copy
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(1, str(Path(__file__).parents[2]))

from outside.hostile import answer_problem, run_trials
from outside.hostile_pages import page_problem
from recorded.core_dumps import bundle_folder

from faults.harmless import find
from faults.victim_run import run_child

#: Victims of the lab whose bundles are the seeds: rungs of every sort look at them.
VICTIMS = (
    "slot_beyond_cache", "foreign_block", "sentinel_block", "rope_base_zero", "missing_wait",
    "grid_product", "late_out_of_memory", "unowned_block",
)  # fmt: skip
#: Programs that stopped a GPU: where it stood is in their bundles.
DUMPED = ("far_index", "row_stride", "embedding_range")
#: A replay runs kernels, so it takes a hundred times as long as reading does.
REPLAY_EVERY = 100
NUMBERS = (
    0, -1, 1, 2, 3, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**63, -(2**63), 2**64,
    2**70, 10**400, 0.5, -0.0, 1e308,
)  # fmt: skip
TEXTS = (
    "", "x", "\x1b]0;title\x07\x1b[2J", "\u202e\u2028\x9b\xa0\x7f", "a\nCAUSE forged\n# heading",
    "<script>alert(1)</script>", "![x](http://example.invalid)", "../../etc/passwd", "/dev/zero",
    "nan", "F32", "I32", "sim:mi300x", "cuda:0", "%s{0}", "[" * 200, "(" * 2000 + ")" * 2000,
    "x" * 70_000, "lambda: 0", "2**2**2**2**9", "rows * 10**9", "a if b else c", "\x00", "é漢🙂",
)  # fmt: skip
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [0] * 17, {"a": 1})

Node = dict[str, Any] | list[Any]


def places(node: Any) -> Iterator[tuple[Node, Any]]:
    """Every (container, key) below `node`."""
    items: Any = ()
    if isinstance(node, dict):
        items = node.items()
    elif isinstance(node, list):
        items = enumerate(node)
    for key, value in items:
        yield node, key
        yield from places(value)


def spoil(bundle: Any, source: random.Random) -> str:
    """Replace one value; says which and with what."""
    kind = source.choice((int, int, int, str, str, list, dict))
    found = [(node, key) for node, key in places(bundle) if type(node[key]) is kind]
    if not found:
        return "nothing"
    # By the name of the field first: there are thousands of addresses, and one wavefront.
    names = sorted({_name(key) for _, key in found})
    name = source.choice(names)
    node, key = source.choice([place for place in found if _name(place[1]) == name])
    before = node[key]
    if source.random() < 0.1:
        node[key] = source.choice(OTHERS)
    elif kind is int:
        node[key] = source.choice((*NUMBERS, before + 1, before - 1, before * 2, -before))
    elif kind is str:
        node[key] = source.choice((*TEXTS, before + "x", before[1:], before.upper()))
    elif kind is list:
        node[key] = source.choice((before * 2, before[:1], before[::-1], before[1:], before * 50))
    else:
        node[key] = {k: v for k, v in before.items() if source.random() < 0.8}
    return f"{name}: {str(before)[:60]} -> {str(node[key])[:60]}"


def _name(key: Any) -> str:
    return key if isinstance(key, str) else "*"


def prepare(seeds_folder: Path) -> Callable[[random.Random, Path], str]:
    """Run the victims once; a trial spoils the bundle of one of them."""
    seeds = []
    for victim in VICTIMS:
        seed = seeds_folder / victim
        run_child(find([victim])[0], seed, twin=False)
        seeds.append(seed / "bundle")
    seeds += [bundle_folder(name, seeds_folder) for name in DUMPED]
    parsed = {seed: json.loads((seed / "bundle.json").read_text()) for seed in seeds}

    def trial(source: random.Random, folder: Path) -> str:
        seed = source.choice(seeds)
        bundle = copy.deepcopy(parsed[seed])
        told = [spoil(bundle, source) for _ in range(source.choice((1, 1, 2, 3)))]
        spoiled = folder / "bundle"
        shutil.copytree(seed, spoiled)
        (spoiled / "bundle.json").write_text(json.dumps(bundle))
        files = [str(folder / name) for name in ("page.html", "trace.json", "repro.py")]
        page = ("doctor", str(spoiled), "--json", "--html", files[0], "--perfetto", files[1])
        commands = [
            ("doctor", str(spoiled), "--json"), ("doctor", str(spoiled), "--all"),
            ("doctor", str(spoiled), "--markdown"), ("diff", str(seed), str(spoiled), "--json"),
            ("diff", str(spoiled), str(seed)), page,
        ]  # fmt: skip
        asked = [source.choice(commands)]
        if source.random() < 1 / REPLAY_EVERY:
            asked = [*commands, ("replay", str(spoiled), "--budget", "5", "--json"),
                     ("replay", str(spoiled), "--export", files[2])]  # fmt: skip
        problems = filter(None, (answer_problem(*command) for command in asked))
        wrong = next(problems, "") or _problem_of_files(*files)
        return wrong and f"{seed.parent.name}; {'; '.join(told)}: {wrong}"

    return trial


def _problem_of_files(page: str, trace: str, repro: str) -> str:
    """What is wrong with the files that were written; "" where nothing is."""
    if os.path.exists(page) and (wrong := page_problem(Path(page).read_text())):
        return f"the page: {wrong}"
    if os.path.exists(trace):
        json.loads(Path(trace).read_text(), parse_constant=float)
    if os.path.exists(repro):
        ast.parse(Path(repro).read_text())
    return ""


if __name__ == "__main__":
    run_trials("bundles", __doc__ or "", prepare)
