"""Writes the tables of `benchmarks/results/README.md` that files beside it hold the figures of.

Run `python -m tools.results_page` after a measurement. A table stands between a line
`<!-- table: NAME -->` and `<!-- end -->`; the prose around it is a person's. `files` is the list of
all files: one that nothing here describes is refused.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))
import vs_report  # noqa: E402

from faults.program import programs  # noqa: E402

RESULTS = BENCHMARKS / "results"
PAGE = RESULTS / "README.md"
_TABLE = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)
_BESIDE = "speed, memory and accuracy beside llama.cpp"
_FAMILIES = "scripts/gpu --only environment,families"
#: By a pattern of names, the first that fits: what a file holds, and what made it.
_KINDS = {
    "vs-llama-cpp-tinyllama-*": (_BESIDE, "benchmarks/vs_llama_cpp.py"),
    "vs-llama-cpp-nvidia-*": (
        "speed, start and memory on a card beside llama.cpp",
        "benchmarks/vs_llama_cpp.py --device cuda",
    ),
    "vs-llama-cpp-*-nvidia-*": (
        "the same of a mixture of experts",
        "benchmarks/vs_llama_cpp.py --device cuda --shape",
    ),
    "vs-llama-cpp-*": (
        f"{_BESIDE}, of a mixture of experts", "benchmarks/vs_llama_cpp.py --shape"
    ),
    "gpu-nvidia-h200-2026-11-23*": ("ops, decode, guards, marks and fault lab", "scripts/gpu"),
    "gpu-nvidia-h200-2026-11-27*": ("each family, with Mamba-2", _FAMILIES),
    "gpu-nvidia-h100-80gb-hbm3-2026-11-25*": (
        "prompts and batches, guarded programs before", "scripts/gpu --only environment,rows,guard"
    ),
    "gpu-nvidia-h100-80gb-hbm3-2026-11-26*": (
        "each op and each family", "scripts/gpu --only environment,ops,families"
    ),
    "gpu-nvidia-h100-80gb-hbm3-2026-11-27*": (
        "guarded programs and each family", "scripts/gpu --only guard, scripts/gpu --only families"
    ),
    "gpu_coredump*": ("what core dumps of a GPU tell of stopped programs", "scripts/gpu"),
    "attack-*": ("attacks on a server, each beside a prober", "scripts/test-attack"),
    "defaults-*": ("commands that name no device, on a card", "benchmarks/gpu_defaults.py"),
    "ranks-*": ("two GPUs beside one", "benchmarks/gpu_ranks.py"),
    "audit-families-*": (
        "an audit of a small random model of each architecture",
        "benchmarks/audit_figures.py families",
    ),
    "verify-plants-*": (
        "what `hypo verify --quick` says of changed kernels", "benchmarks/verify_figures.py"
    ),
    "audit-canaries-*": (
        "errors that the gates of an audit planted and saw", "benchmarks/audit_figures.py canaries"
    ),
    "perplexity-float64*": (
        "perplexity of four types beside llama.cpp's and that of float64",
        "benchmarks/perplexity_beside.py",
    ),
    "peer_llama_cpp*": (
        "logits and perplexity beside llama.cpp, per family and per file type", "scripts/test-peers"
    ),
    "draft-rounds*": (
        "what a draft model gains, and what the parts of a round take", "benchmarks/draft_rounds.py"
    ),
    "amd-forms*": (
        "each form of each kernel as AMD's machine code beside LLVM's text",
        "benchmarks/amd_forms.py",
    ),
    "amd-decode*": (
        "a decode step of the bundled model as AMD's machine code, on four emulated GPUs",
        "benchmarks/amd_decode.py",
    ),
    "adapter_cost*": (
        "what a LoRA adapter costs on a card, with several streams", "benchmarks/adapter_cost.py"
    ),
    "disk_cache*": (
        "blocks written to a disk and read back, beside what the disk does",
        "benchmarks/disk_cache.py",
    ),
    "switch_models*": (
        "switching back to a model of a folder, beside loading it alone",
        "benchmarks/switch_models.py",
    ),
    "trace-cost-*": (
        "what a trace of all points costs a card, and its figures beside those of a CPU",
        "benchmarks/trace_cost.py",
    ),
    "nan-cost-*": (
        "what `hypo doctor --nan` costs training steps, seen by Python and by machine code",
        "benchmarks/number_watch.py",
    ),
    "recorder_cost*": ("what the recorder costs on a CPU", "benchmarks/recorder_cost.py"),
    "doctor-corpus-135-*": (
        "what the doctor claims of 135 programs: five claims each",
        "faults/judge.py",
    ),
    "doctor-corpus-*": (
        "what NVIDIA's compute-sanitizer reports of 69 programs with a planted fault, and what the "
        "doctor said then",
        "",
    ),
    "engine-faults*": (
        "what the doctor named of 87 faults planted into the engine's source, and after 20 "
        "harmless changes of it",
        "faults/judge.py",
    ),
    "soundness-ablation*": (
        "false claims that come back without each check of a correction",
        "tests/faults/checks_ablation.py --out",
    ),
    "one-judge*": (
        "the same reports by the judges of before and by faults/judge.py", "faults/judge.py"
    ),
    "sanitizers-*": (
        "which planted faults torch's, Triton's and NVIDIA's own tools report",
        "benchmarks/vs_sanitizers.py",
    ),
    "start-ready-*": (
        "when a server on a card is ready, and what its first clients wait",
        "benchmarks/start_ready.py",
    ),
    "worker-death-*": (
        "what streams on a card wait when their worker dies", "benchmarks/worker_death.py"
    ),
    "replicas-*": (
        "two cards behind one server beside one, and a worker that is killed",
        "benchmarks/replicas.py",
    ),
    "vs-server-*": (
        "what clients see of a server on a card, beside those of llama-server",
        "benchmarks/vs_server.py",
    ),
    "paced-*": (
        "what clients see where prompts wait for others' answers, and where they do not",
        "benchmarks/vs_server.py",
    ),
    "start_time*": (
        "a command from its start to its end, beside llama.cpp's", "benchmarks/start_time.py"
    ),
    "serve_peer*": (
        "what clients of `hypo serve` see, beside those of llama-server", "benchmarks/serve_peer.py"
    ),
    "serve_agent*": (
        "what the prefix cache saves an agent's conversation", "benchmarks/serve_agent.py"
    ),
    "serve_soak*": (
        "thousands of requests, a third of them left by their clients",
        "benchmarks/serve_soak.py --requests 60000",
    ),
    "serve_kills*": (
        "answers of a server whose workers are killed, or have a planted defect",
        "hypo kill-serve --json, python -m faults serve --json",
    ),
}  # fmt: skip
#: What stands in the place of a machine and names none.
_NO_MACHINES = ("cuda", "gpu", "x86_64")
_TESTS = {"pp": "prompt of {}", "tg": "decode"}


def page(text: str, results: Path = RESULTS) -> str:
    """`text` with each of its tables made anew; raises ValueError for one that nothing makes."""
    return _TABLE.sub(lambda found: f"{found[1]}{_table(found[2], results)}\n{found[3]}", text)


def _table(name: str, results: Path) -> str:
    if name == "files":
        return _lines(_files(results), "file", "machine", "date", "holds", "made by")
    for pattern, make in _MAKERS.items():
        if fnmatch(name, pattern):
            return make(json.loads((results / name).read_text()))
    raise ValueError(f"{PAGE}: no table is made of {name!r}; known are files, {', '.join(_MAKERS)}")


def _files(results: Path) -> Iterator[tuple[str, ...]]:
    """A row for each file, of those of one kind side by side."""
    order = list(_KINDS)
    kinds = {path: _kind_of(path) for path in sorted(results.glob("*.json"))}
    for path in sorted(kinds, key=lambda path: (order.index(kinds[path]), path.name)):
        holds, maker = _KINDS[kinds[path]]
        told = json.loads(path.read_text())
        made_by = ", ".join(f"`{word}`" for word in maker.split(", ")) if maker else ""
        yield f"`{path.name}`", _machine(told, path.stem), _date(told, path.stem), holds, made_by


def _kind_of(path: Path) -> str:
    for pattern in _KINDS:
        if fnmatch(path.name, pattern):
            return pattern
    raise ValueError(f"{path.name}: say in tools/results_page.py what it holds and what made it")


def _machine(told: Any, stem: str) -> str:
    """The machine as a file or its name tells it; empty where neither does."""
    fields = told if isinstance(told, Mapping) else {}
    for name in ("card", "gpu", "processor", "machine", "device"):
        value = fields.get(name)
        value = value.get("name") if isinstance(value, Mapping) else value
        if isinstance(value, str) and value not in _NO_MACHINES:
            return value
    found = re.search(r"nvidia-(h\d+)", stem)
    return f"NVIDIA {found[1].upper()}" if found else ""


def _date(told: Any, stem: str) -> str:
    found = re.search(r"\d{4}-\d\d-\d\d", stem)
    date = told.get("date", "") if isinstance(told, Mapping) else ""
    return found[0] if found else str(date)[:10]


def _cpu(told: Mapping[str, Any]) -> str:
    """Speeds as multiples of llama.cpp's, shares of bandwidth, memory and divergence, by type."""
    rows = []
    for row in told["types"]:
        if row["type"] in vs_report.APART:
            continue
        shallow, deep, prompt = sorted(row["tests"], key=lambda test: (test[:2] != "tg", test))
        shares = (vs_report.bandwidth_share(row, engine, shallow) for engine in ("ours", "peer"))
        kept = (vs_report._kept(row, engine, deep) for engine in ("ours", "peer"))
        apart = (row["divergence"][engine]["kl"] for engine in ("ours", "peer"))
        rows.append((
            row["type"],
            _times(row, shallow),
            _shares(shares),
            _times(row, deep),
            _shares(kept),
            _times(row, prompt),
            f"{row['memory']['ours']['peak_bytes'] / 1e6:.0f}",
            " / ".join(f"{kl:.3g}" for kl in apart),
        ))  # fmt: skip
    return _lines(
        rows, "type", "decode", "share of bandwidth, ours / llama.cpp", "decode at depth 2000",
        "of depth 0, ours / llama.cpp", "prompt of 512", "peak memory, MB",
        "KL to F32, ours / llama.cpp",
    )  # fmt: skip


def _shares(ratios: Iterable[vs_report.Ratio | None]) -> str:
    return " / ".join(f"{100 * ratio.median:.0f}" for ratio in ratios if ratio) + " %"


def _times(row: Mapping[str, Any], test: str) -> str:
    ours, peer = (vs_report.speeds(row, engine, test) for engine in ("ours", "peer"))
    return f"{vs_report.Ratio.of(ours, peer).median:.2f}"


def _ranks(told: Mapping[str, Any]) -> str:
    """Tokens per second of one and of two GPUs; medians of all repetitions."""
    rows = []
    for test, by_ranks in told["speed"].items():
        name, _, depth = test.partition(" @ d")
        one, two = (statistics.median(by_ranks[num_ranks]) for num_ranks in ("1", "2"))
        what = _TESTS[name[:2]].format(f"{int(name[2:]):,}")
        where = f" at depth {int(depth):,}" if depth else ""
        rows.append((what + where, _speed(one), _speed(two), f"{two / one:.2f}"))
    one, two = (told["outside"].get(num_ranks) for num_ranks in ("1", "2"))
    if one and two:
        rows.append(("decode, timed from outside", _speed(one), _speed(two), f"{two / one:.2f}"))
    return _lines(rows, "", "one", "two", "ratio")


def _speed(tokens_per_second: float) -> str:
    digits = 1 if tokens_per_second < 1000 else 0
    return f"{tokens_per_second:,.{digits}f}"


def _attacks(told: Sequence[Mapping[str, Any]]) -> str:
    """The worst that a prober saw beside any attack."""
    health, token, held = (
        max(row[name] for row in told if row[name] is not None)
        for name in ("health_beside", "ttft_beside", "server_bytes")
    )
    rows = [
        ("`/health` beside an attack", f"{health:.2f} s", "0.3 s"),
        ("first token of another client", f"{token:.2f} s", "0.5 s"),
        ("memory of the server", f"{held / 2**20:.0f} MiB", "384 MiB, of which 256 are for bodies"),
    ]
    return _lines(rows, "", "worst of all attacks", "limit")


def _classes(told: Mapping[str, Any]) -> str:
    """Programs by the class of their fault: what the doctor said, and who else reported any."""
    classes = {one.name: _class_of(one.truth.causes) for one in programs()}
    corpus = json.loads((RESULTS / "doctor-corpus-nvidia-h200.json").read_text())
    tools = {
        name: {"compute-sanitizer": any(own.values())} for name, own in corpus["sanitizer"].items()
    }
    for path in sorted(RESULTS.glob("sanitizers-*.json")):
        for name, own in json.loads(path.read_text())["reported"].items():
            tools.setdefault(name, {}).update(own)
    others = list(dict.fromkeys(tool for own in tools.values() for tool in own))
    rows = [row for row in told["rows"] if row["collection"] in ("programs", "written")]

    def line(label: str, names: Mapping[str, str]) -> tuple[str, ...]:
        says = [sum(now == word for now in names.values()) for word in _SAYS]
        beside = []
        for tool in others:
            seen = [
                tools[name][tool] for name in names if tools.get(name, {}).get(tool) is not None
            ]
            beside.append(f"{sum(seen)} of {len(seen)}" if seen else "")
        return (label, str(len(names)), *map(str, says), *beside)

    lines = []
    for label in dict.fromkeys([*_CLASSES, *classes.values()]):
        names = {row["name"]: row["now"] for row in rows if classes.get(row["name"]) == label}
        lines += [line(label, names)] if names else []
    lines.append(line("all", {row["name"]: row["now"] for row in rows}))
    return _lines(lines, "class", "programs", *_SAYS, *others)


_SAYS = ("right", "vague", "silent", "false")
#: The first cause of a truth, by class.
_CLASSES = {
    "accesses outside": (
        "missing tail mask", "off by one", "buffer too small", "wrong stride", "grid too small",
        "scalar out of range", "access outside its tensor", "grid too large",
    ),
    "indices": ("index out of range", "position out of range", "sentinel consumed"),
    "32 bits": ("offset overflow",),
    "races": ("race between programs", "race between lanes", "autotuned in place"),
    "unwritten": ("output not written", "uninitialised read", "undefined lane"),
    "order of streams": (
        "missing wait between streams", "buffer rewritten in flight", "buffer read in flight",
        "memory reused in flight", "event never recorded",
    ),
    "freed and wild pointers": (
        "use after free", "captured pointer freed", "wild pointer", "null pointer", "host pointer",
        "tensor on another device",
    ),
    "types": ("dtype width", "misalignment"),
    "NaN and infinity": ("non-finite value", "non-finite padding"),
    "wrong arithmetic alone": (),
}  # fmt: skip


def _class_of(causes: Sequence[str]) -> str:
    first = next(iter(causes), "")
    found = (label for label, own in _CLASSES.items() if first in own or not (first or own))
    return next(found, "others")


#: What is compared of two servers.
_OF_SERVER: tuple[Callable[[Mapping[str, Any]], float], ...] = (
    lambda figures: figures["output_tokens_per_second"],
    lambda figures: figures["ttft_ms"]["p50"],
    lambda figures: figures["itl_ms"]["p99"],
)


def _servers(told: Mapping[str, Any]) -> str:
    """Of each load ours, the other's, and ours over that; medians of all turns."""
    rows = []
    for number, cell in enumerate(told["cells"]):
        what = f"{cell['prompt_tokens']:,}{', half of them shared' if cell['is_shared'] else ''}"
        shown = []
        for of in _OF_SERVER:
            ours = [of(turn["own"][number]) for turn in told["turns"]]
            peers = [turn.get("peer", []) for turn in told["turns"]]
            theirs = [of(peer[number]) for peer in peers if number < len(peer)]
            text = _speed(statistics.median(ours))
            if theirs:
                ratios = [own / peer for own, peer in zip(ours, theirs, strict=False)]
                text += f" / {_speed(statistics.median(theirs))}, {statistics.median(ratios):.2f} x"
            shown.append(text)
        rows.append((str(cell["streams"]), what, *shown))
    return _lines(
        rows, "streams", "prompt, tokens",
        f"tokens per second, ours / {told.get('beside', 'llama-server')}",
        "first token, ms, p50", "between pieces, ms, p99",
    )  # fmt: skip


def _audited(told: Mapping[str, Any]) -> str:
    """Each architecture, its gates, and which of them are not audited, or why it was refused."""
    rows = [
        (row["architecture"], row["verdict"], "", row["why"], "")
        if "why" in row
        else (
            row["architecture"],
            row["verdict"],
            f"{len(row['right'])} of {row['num_gates']}",
            ", ".join(row["not_audited"]),
            f"{row['seen']:,} of {row['planted']:,}",
        )
        for row in told["rows"]
    ]
    table = _lines(
        rows, "architecture", "verdict", "gates that are right", "not audited", "errors seen"
    )
    if (left := told["num_architectures"] - len(rows)) > 0:
        table += f"\n\nOf {told['num_architectures']} architectures {left} are not in this file."
    return table


def _plants(told: Mapping[str, Any]) -> str:
    """Each changed kernel, and which stages of a verification found it."""
    rows = [
        (
            row["plant"],
            row.get("why", row["verdict"]),
            ", ".join(row["caught_by"]),
            str(len(row.get("forms", ()))),
            str(row.get("seconds", "")),
        )
        for row in told["rows"]
    ]
    return _lines(rows, "changed", "verdict", "caught by", "forms named", "seconds in all")


def _canaries(told: Mapping[str, Any]) -> str:
    rows = [
        (row["gate"], str(row["runs"]), row["planted"], f"{row['num_seen']:,} of "
         f"{row['num_planted']:,}")
        for row in told["rows"]
    ]  # fmt: skip
    return _lines(rows, "gate", "runs", "planted", "seen")


def _perplexities(told: Mapping[str, Any]) -> str:
    """Of each type the perplexities, how far ours is from others, and how far each token is."""
    rows, whose = [], ("float64", "ours", "our form", "llama.cpp", "llama.cpp's form")
    pairs = ("ours - float64", "float64 - llama.cpp's form", "ours - llama.cpp's form")
    for row in told["rows"]:
        apart = [row["percent_apart"][pair] for pair in pairs]
        rows.append(
            (
                row["file_type"],
                *(f"{row['perplexity'][who]:.4f}" for who in whose),
                *(f"{found['mean']:+.3f} ± {found['error']:.3f}" for found in apart),
                *(f"{row['token_rms'][pair]:.4f}" for pair in (*pairs, "ours - our form")),
            )
        )
    heads = ("ours, float64", "float64, llama.cpp's form", "ours, llama.cpp's form")
    return _lines(
        rows,
        "type",
        *(f"perplexity, {who}" for who in whose),
        *(f"{pair}, %" for pair in heads),
        *(f"{pair}, a token" for pair in (*heads, "ours, our form")),
    )


def _traced(told: Mapping[str, Any]) -> str:
    """Of each model and kind of step both times, and the median of their ratios."""
    rows = []
    for row in told["rows"]:
        off, on = (statistics.median(side) for side in zip(*row["milliseconds"], strict=True))
        ratios = [on / off for off, on in row["milliseconds"]]
        span = f"{row['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append((f"{row['model']}, {row['what']}", f"{off:.2f}", f"{on:.2f}", span))
    return _lines(rows, "milliseconds of a step", "without", "with a trace", "ratio")


def _watched(told: Mapping[str, Any]) -> str:
    """Steps by size (width, tokens, sequences, layers) and by how they are seen."""
    rows = []
    for row in told["rows"]:
        least, median, most = row["ratio"]
        size = str(row["size"]).strip("()")
        is_alone = row["way"] == "alone"
        ratio = "" if is_alone else f"{median:.2f} ({least:.2f} to {most:.2f})"
        rows.append((size, row["way"], f"{row['milliseconds']:.1f}", ratio))
    return _lines(rows, "width, tokens, sequences, layers", "seen", "ms a step", "times alone")


_MAKERS: dict[str, Callable[[Any], str]] = {
    "one-judge*": _classes,
    "vs-llama-cpp-tinyllama-*": _cpu,
    "ranks-*": _ranks,
    "vs-server-*": _servers,
    "paced-*": _servers,
    "attack-*": _attacks,
    "audit-families-*": _audited,
    "verify-plants-*": _plants,
    "audit-canaries-*": _canaries,
    "perplexity-float64*": _perplexities,
    "trace-cost-*": _traced,
    "nan-cost-*": _watched,
}


def _lines(rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]], *head: str) -> str:
    """A table in Markdown; figures stand on the right."""
    body = [head, *rows]
    rule = ["---" if at == 0 or head[0] == "file" else "---:" for at in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (body[0], rule, *body[1:]))


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
