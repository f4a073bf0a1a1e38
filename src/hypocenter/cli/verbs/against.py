"""`hypo diff MODEL --against ENGINE`: the same tokens here and in another engine, and whose fault a
difference is. Judges by `peers/verdict.py`; holds the words of its report."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec

from hypocenter.base.errors import EXIT_GATE, UsageError
from hypocenter.base.own_folder import own_folder
from hypocenter.cli.answer import open_llm
from hypocenter.cli.output import show, show_json
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.cli.tool_options import AgainstOptions
from hypocenter.engine.float64_steps import Float64Steps, NotComputed
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.gguf.file import GGUFFile, open_gguf
from hypocenter.peers.asking import PEERS, Peer, PeerAnswer, ask, require
from hypocenter.peers.own_weights import Differences, OtherFile, OtherFolder
from hypocenter.peers.pairing import trace_of
from hypocenter.peers.readings import ProductReading, SideReading, readings_of
from hypocenter.peers.verdict import FirstFault, Judges, PeerVerdict, judge
from hypocenter.settings.config import EngineConfig
from hypocenter.trace.comparing import OPS
from hypocenter.trace.points import ModelTrace
from hypocenter.trace.reading import read_trace

#: Of the elements of our trace so many bytes are kept.
_DATA_BYTES = 4 << 30


class AgainstReport(msgspec.Struct, frozen=True):
    """What `hypo diff --against` found. `other_tokens`: what the peer's own tokenizer makes of the
    text, where that is something else; both were given ours."""

    peer: str
    model: str
    peer_model: str
    num_tokens: int
    other_tokens: tuple[int, ...] | None
    op: str | None
    verdict: PeerVerdict
    #: Tensors that are apart by no more than their types explain, and how far, relative.
    weights_apart: dict[str, float]
    #: How each reads activations, by the first product with each type of weights.
    readings: tuple[ProductReading, ...]


def against(path: str, asked: AgainstOptions) -> None:
    """Find and print; leaves with EXIT_GATE where an op of one of the two is wrong, or the two read
    other weights or tokens, or it is not known. Raises UsageError where the engine is not there,
    or its model is none that can be held against ours; before either is run."""
    assert asked.against is not None
    peer, model = PEERS[asked.against], Path(path)
    peer_model = Path(asked.peer_model) if asked.peer_model is not None else model
    python = asked.peer_python or sys.executable
    with ExitStack() as stack:
        file = stack.enter_context(open_gguf(model))
        if not peer_model.exists():
            raise UsageError(f"--peer-model {peer_model}: there is no such file or folder")
        require(peer, python, peer_model)
        other = peer_model if peer_model.is_dir() else stack.enter_context(open_gguf(peer_model))
        _require_vocabulary(file, other)
        progress = stack.enter_context(ProgressDisplay(quiet=asked.quiet or asked.json))
        ours, prompt_ids = _trace_ours(model, asked, progress)
        progress(f"running {peer.name}", 0.5)
        answer = ask(peer, python, peer_model, asked.prompt, _tokens(ours))
        found = hold(peer, answer, ours, file, other, progress)
        if answer.token_ids is not None and answer.token_ids != prompt_ids:
            found = msgspec.structs.replace(found, other_tokens=answer.token_ids)
    if asked.json:
        show_json(found)
    else:
        show("\n".join(lines_of(found)))
    if found.verdict.first is not None or found.other_tokens is not None:
        sys.exit(EXIT_GATE)


def _require_vocabulary(file: GGUFFile, other: GGUFFile | Path) -> None:
    """Raises UsageError for a peer's model with another number of tokens than ours."""
    arch = read_architecture(file)
    read = OtherFolder(other, arch) if isinstance(other, Path) else OtherFile(other)
    if read.vocab_size != arch.vocab_size:
        name = other if isinstance(other, Path) else other.path
        raise UsageError(
            f"--peer-model {name} has a vocabulary of {read.vocab_size} tokens, and {file.path} "
            f"one of {arch.vocab_size}; both run the same tokens, so name one of as many"
        )


def hold(
    peer: Peer,
    answer: PeerAnswer,
    ours: ModelTrace,
    file: GGUFFile,
    other: GGUFFile | Path,
    progress: ProgressDisplay | None = None,
) -> AgainstReport:
    """Hold our trace against a peer's answer of `other`: our file, another one, or a folder."""
    arch = read_architecture(file)
    theirs = trace_of(peer, answer, ours, arch)
    judges, unlike, reason = None, None, ""
    if not isinstance(other, GGUFFile) or Path(other.path) != Path(file.path):
        read = OtherFolder(other, arch) if isinstance(other, Path) else OtherFile(other)
        unlike = Differences(file, arch, read)
    try:
        judges = _judges(peer, ours, theirs, file, unlike)
    except NotComputed as error:
        reason = str(error)
    verdict = judge(ours, theirs, judges, reason, progress or (lambda what, share: None))
    first = verdict.first
    return AgainstReport(
        answer.version,
        str(file.path),
        str(other if isinstance(other, Path) else other.path),
        sum(len(step.token_ids) for step in ours.steps),
        None,
        OPS[first.name].format(layer=first.layer) if first is not None else None,
        verdict,
        unlike.within if unlike is not None else {},
        _readings(file, ours, theirs, judges),
    )


def _readings(
    file: GGUFFile, ours: ModelTrace, theirs: ModelTrace, judges: Judges | None
) -> tuple[ProductReading, ...]:
    if judges is None:
        return ()
    pairs = zip(ours.steps, theirs.steps, strict=True)
    return tuple(readings_of(file, pairs, (judges.ours, judges.theirs)))


def _judges(
    peer: Peer, ours: ModelTrace, theirs: ModelTrace, file: GGUFFile, unlike: Differences | None
) -> Judges:
    """Raises NotComputed for a model that has no float64 form."""
    judge_of_ours = Float64Steps(file, ours)
    if unlike is None:
        of_theirs = Float64Steps(file, theirs)
        return Judges(judge_of_ours, of_theirs, lambda name, layer: (), peer.attention_limit)
    of_theirs = Float64Steps(file, theirs, unlike.other.weight, unlike.other.arch)
    return Judges(judge_of_ours, of_theirs, unlike, peer.attention_limit)


def _trace_ours(
    model: Path, asked: AgainstOptions, progress: ProgressDisplay
) -> tuple[ModelTrace, tuple[int, ...]]:
    """Our trace, and the tokens of the prompt."""
    config = EngineConfig(device=asked.device, max_batch_requests=1, prefix_cache=False)
    with own_folder("hypo-against-") as folder:
        path = folder / "ours.trace"
        with open_llm(str(model), config, progress) as llm:
            trace = llm.trace(path, max_data_bytes=_DATA_BYTES)
            ids = llm.tokenizer.encode(asked.prompt)
            llm.generate(ids, max_tokens=asked.num_tokens, temperature=0.0, ignore_eos=True)
            trace.close()
        return read_trace(path), tuple(ids)


def _tokens(trace: ModelTrace) -> list[int]:
    """All tokens that were run, by their positions."""
    ids: dict[int, int] = {}
    for step in trace.steps:
        ids |= zip(step.positions, step.token_ids, strict=True)
    return [ids[at] for at in sorted(ids)]


def lines_of(found: AgainstReport) -> Iterator[str]:
    """The result in words: whose fault first, what was compared last."""
    verdict, first = found.verdict, found.verdict.first
    if found.other_tokens is not None:
        yield (
            f"{found.peer} reads other tokens in this text: {_some(found.other_tokens)}; both were "
            "run with ours"
        )
    if first is not None:
        yield from _fault(found, first)
    elif verdict.num_judged:
        num, most = verdict.num_judged, verdict.num_differing
        yield (
            f"no fault: at {f'all {num}' if num == most else f'{num} of {most}'} points that "
            "differ each of the two does what float64 makes of its own inputs and weights"
        )
    elif verdict.num_differing:
        yield f"no difference beyond rounding; float64 was not asked{_because(verdict)}"
    elif verdict.num_points:
        yield f"no difference: at none of {verdict.num_points} points do the two part"
    else:
        yield f"nothing was compared: {found.peer} has none of our points"
    if (beside := verdict.not_explained) is not None and beside != first:
        yield (
            f"before that the two part at {_where(beside)}, where float64 was not asked"
            f"{_because(verdict)}: {_percent(beside.apart)} apart"
        )
    if found.weights_apart:
        name = max(found.weights_apart, key=lambda each: found.weights_apart[each])
        yield (
            f"the two read other weights, within what their types explain: {name} is "
            f"{_percent(found.weights_apart[name])} apart, of {len(found.weights_apart)} such "
            "tensors the farthest"
        )
    yield from _products(found)
    if verdict.growth:
        shown = verdict.growth
        if len(shown) > 16:
            shown = (*shown[:8], *shown[-8:])
        numbers = ", ".join(f"{layer}: {_percent(apart)}" for layer, apart in shown)
        yield f"how far apart what each layer gives is: {numbers}"
    if verdict.logits_apart is not None:
        yield (
            f"logits are {_percent(verdict.logits_apart)} apart; the most likely token is the same "
            f"in {verdict.num_same_top} of {verdict.num_logit_rows} rows"
        )
    if 0 < verdict.num_judged < verdict.num_differing and verdict.whose != "unknown":
        yield f"float64 was not asked everywhere{_because(verdict)}"
    missing = f"; it has no {', '.join(verdict.missing)}" if verdict.missing else ""
    yield (
        f"compared with {found.peer}: {verdict.num_points} points of {found.num_tokens} tokens"
        f"{missing}"
    )


def _products(found: AgainstReport) -> Iterator[str]:
    """What rounding of activations explains: how far products are from float64, and why."""
    products = found.verdict.products
    if products.num_points:
        yield (
            f"at {products.num_points} products ours is {_percent(products.of_ours)} from float64, "
            f"and {found.peer} {_percent(products.of_theirs)}"
        )
    for reading in found.readings:
        if not reading.ours.form == reading.theirs.form == "f32":
            sides = ("ours", reading.ours), (found.peer, reading.theirs)
            said = "; ".join(f"{who} {_form(side)}" for who, side in sides)
            yield f"with weights in {reading.weights} {said}"


def _form(side: SideReading) -> str:
    if side.form in ("", "f32"):
        said = f"is {_percent(side.off)} from float64"
        return f"reads f32 and {said}" if side.form else f"{said} by no form that is known here"
    return (
        f"reads {side.form}: {_percent(side.off)} from float64, and {_percent(side.off_by_form)} "
        "from float64 with these"
    )


def _fault(found: AgainstReport, first: FirstFault) -> Iterator[str]:
    verdict = found.verdict
    where = _where(first)
    if verdict.whose == "unknown":
        yield f"the two part at {where}: {_percent(first.apart)} apart"
        yield (
            f"whose fault that is is not known: float64 was not asked{_because(verdict)}; rounding "
            f"explains {_percent(first.limit)} there, or an expert that was chosen otherwise by it"
        )
        return
    assert first.of_ours is not None
    assert first.of_theirs is not None
    errors = (
        f"ours is {_percent(first.of_ours)} off, {found.peer} {_percent(first.of_theirs)}; "
        f"rounding explains {_percent(first.limit)}"
    )
    if verdict.whose == "weights":
        said = "neither engine is wrong: " if verdict.not_explained is None else ""
        yield f"{said}the two read other weights or facts at {where}"
        yield from first.unlike
    elif verdict.whose == "both":
        yield f"float64 agrees with neither at {where}"
    else:
        wrong, right = (found.peer, "ours") if verdict.whose == "theirs" else ("ours", found.peer)
        yield f"{wrong} is wrong at {where}; float64 agrees with {right}"
    yield f"there the two are {_percent(first.apart)} apart, and from float64 {errors}"


def _where(fault: FirstFault) -> str:
    return f"{OPS[fault.name].format(layer=fault.layer)}, step {fault.step}"


def _because(verdict: PeerVerdict) -> str:
    return f" ({verdict.not_judged})" if verdict.not_judged else ""


def _some(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids[:8])) + " ..." * (len(ids) > 8)


def _percent(relative: float) -> str:
    return f"{100 * relative:.2g} %"
