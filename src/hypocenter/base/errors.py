"""Every exception that hypocenter raises on purpose; each says thing, value, limit and way out.

Nothing here prints or exits: `cli/app.py` turns an exception into one line and an exit code.
"""

from __future__ import annotations

import enum
import shlex
from pathlib import Path
from typing import Self

from hypocenter.base.refusals import AnyRefusal, EntryOutOfRange, FieldOutOfRange
from hypocenter.base.wording import bytes_text

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_FAULT = 3
EXIT_GATE = 4
#: A check did not see an error that it planted itself, so what it found means nothing.
EXIT_BLIND = 5
EXIT_INTERRUPTED = 130
#: What a shell reports for a program that SIGPIPE ended; nothing was lost that anyone wanted.
EXIT_PIPE = 141


class ErrorKind(enum.StrEnum):
    """What an error of a device, or of its runtime, is about, where that is told apart.

    FOUND_LATER: made by something that ran, and found by the call that reports it.
    """

    OTHER = "other"
    FOUND_LATER = "found later"
    OUT_OF_MEMORY = "out of memory"
    NO_CODE = "no code for this architecture"
    ENDLESS = "a launch that does not end"
    HARDWARE = "hardware of the GPU"
    NOT_A_NUMBER = "a number that is none"


class HypoError(Exception):
    """Base of all expected failures. `exit_code` is what the command line returns.

    `settings` are the fields of a configuration that the message names; the command line puts its
    options there.
    """

    exit_code = EXIT_ERROR
    settings: tuple[str, ...] = ()


class UsageError(HypoError):
    """The caller asked for something that cannot be: an option, a value, a combination."""

    exit_code = EXIT_USAGE


class BadSetting(UsageError):
    """`field` of a configuration is `value`, and `limit` says what it may be or where it is.

    `also` is what else Python may give, and a command line cannot.
    """

    def __init__(self, field: str, value: object, limit: str, also: str = "") -> None:
        self.field = field
        self.value = value
        self.limit = limit
        super().__init__(self.text_for(field) + also)

    def text_for(self, name: str) -> str:
        """The sentence with another name for the field, such as that of an option."""
        value = self.value
        # Python refuses to write out numbers of more than 4300 digits.
        is_long = isinstance(value, int) and value.bit_length() > 1024
        shown = "a number of more than 300 digits" if is_long else repr(value)
        return f"{name} is {shown}, but {self.limit}"


class MissingPackage(UsageError):
    """What was asked for needs a package that the base installation does not have."""

    def __init__(self, what: str, package: str) -> None:
        self.package = package
        wanted = {
            "torch": "pip install torch (for AMD its ROCm build; a check runs with a CPU build)",
            "triton": "pip install triton; it needs no GPU",
            "tinygrad": "pip install 'hypocenter[amd]'",
            "ray": "pip install 'hypocenter[ray]'",
            "lm_eval": "pip install 'hypocenter[eval]'",
        }
        super().__init__(f"{what} needs {package}, which is not installed: {wanted[package]}")


def as_exception(error: BaseException) -> Exception:
    """The same, or an error about it where it would end whoever gets it (SystemExit and others)."""
    if isinstance(error, Exception):
        return error
    wrapped = HypoError(
        f"{type(error).__name__} was raised in the thread that steps, and ended this request; "
        "submit it again"
    )
    wrapped.__cause__ = error
    return wrapped


class Words(str):
    """A description where a message would show a value; it stands there without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


MISSING = Words("missing")


class BadModelFile(HypoError):
    """A model file breaks the format or its own metadata.

    `field` names what is wrong, `value` what was read, `limit` what would have been right;
    `refusal` has a number and its bounds.
    """

    refusal: FieldOutOfRange | None = None

    def __init__(
        self, path: str | Path, field: str, value: object, limit: str, way_out: str = ""
    ) -> None:
        self.path = Path(path)
        self.field = field
        self.value = value
        self.limit = limit
        self.way_out = way_out
        shown = _shorten(value)
        tail = f"; {way_out}" if way_out else ""
        super().__init__(f"{self.path}: {field} is {shown}, but {limit}{tail}")

    @classmethod
    def out_of_range(
        cls, path: str | Path, field: str, value: float, low: float, high: float, of: str = ""
    ) -> Self:
        """The error for a number that is not from `low` to `high`, the range of `of`."""
        remark = f", the range of {of}" if of else ""
        refusal = FieldOutOfRange(file=str(path), field=field, value=value, low=low, high=high)
        error = cls(path, field, value, f"must be {refusal.range}{remark}")
        error.refusal = refusal
        return error


class UnsupportedModel(BadModelFile):
    """The file is well formed, but holds a type, architecture or tokenizer we do not run."""


class ModelNotFound(HypoError):
    """No model is there under the name that was given; `way` is what the user may do."""

    def __init__(self, what: str, way: str = "") -> None:
        self.way = way
        super().__init__(f"{what}; {way}" if way else what)


class HubError(ModelNotFound):
    """A hub does not answer, refuses, or gives something else than it promised."""


class TokenizerError(HypoError):
    """Text or token ids that the tokenizer cannot handle; `refusal` is of an id outside."""

    refusal: EntryOutOfRange | None = None

    @classmethod
    def outside(cls, token_id: int, vocab_size: int) -> Self:
        """The error for a token id that no token of the vocabulary has."""
        error = cls(f"token id is {token_id}, but the vocabulary has {vocab_size} tokens")
        error.refusal = EntryOutOfRange(
            argument="token_ids",
            entry=(0,),
            value=token_id,
            of="the vocabulary",
            bound=vocab_size,
            num_live=1,
        )
        return error


class TemplateError(HypoError):
    """A chat template failed, or exceeded its time or memory limit."""


class ContextOverflow(UsageError):
    """A request needs more positions than the context has."""

    settings = ("context_length",)

    def __init__(self, num_tokens: int, context_length: int, trained_length: int) -> None:
        self.num_tokens = num_tokens
        self.context_length = context_length
        self.trained_length = trained_length
        way_out = (
            f"shorten the prompt or raise context_length, up to {trained_length}"
            if context_length < trained_length
            else "shorten the prompt, or take a model that was trained for more"
        )
        super().__init__(
            f"this model's maximum context length is {context_length} tokens, but the prompt has "
            f"{num_tokens}; {way_out}"
        )


class TooMuchText(UsageError):
    """`field` has more characters than are read; of a prompt, than fit into the context."""

    def __init__(self, field: str, num_chars: int, max_chars: int) -> None:
        self.field = field
        super().__init__(
            f"{field} has {num_chars} characters, but no more than {max_chars} can fit; shorten it"
        )


class OutOfBlocks(HypoError):
    """The KV cache has no free block left for a request."""

    settings = ("context_length",)

    def __init__(self, num_needed: int, num_free: int, num_blocks: int) -> None:
        self.num_needed = num_needed
        self.num_free = num_free
        self.num_blocks = num_blocks
        super().__init__(
            f"KV cache: {num_needed} blocks needed, but {num_free} of {num_blocks} are free; "
            "raise context_length or run fewer requests at once"
        )


class NoHostMemory(OutOfBlocks):
    """The KV cache has blocks left, but the machine has no memory for them."""

    settings = ("kv_tokens",)

    def __init__(self, num_needed: int, num_free: int, num_blocks: int, why: str) -> None:
        super().__init__(num_needed, num_free, num_blocks)
        self.args = (f"KV cache: {num_needed} blocks needed, but {num_free} can be had: {why}",)


class BadLogits(HypoError):
    """The model gave a row of logits from which no token can be chosen.

    `model` is its file, where that is known; `adapters` are the names of those of the request.
    """

    def __init__(
        self,
        row: int,
        num_bad: int,
        vocab_size: int,
        model: Path | None = None,
        adapters: tuple[str, ...] = (),
    ) -> None:
        self.row = row
        self.num_bad = num_bad
        self.vocab_size = vocab_size
        self.model = model
        self.adapters = adapters
        found = (
            f"logits row {row}: {num_bad} of {vocab_size} values are NaN or +inf"
            if num_bad
            else f"logits row {row}: all {vocab_size} values are -inf, so no token can be chosen"
        )
        if model:
            found = f"{model}: {found}"
        if adapters:
            found += (
                f"; the request has adapters ({', '.join(adapters)}): leaving one out, or a "
                "smaller scale, shows whether it is at fault"
            )
        if model:
            look = f"hypo inspect {shlex.quote(str(model))} --check"
            found += f"; {look} looks for NaN in the weights{' of the model' if adapters else ''}"
        super().__init__(found)

    def of_request(self, model: Path | None, adapters: tuple[str, ...]) -> BadLogits:
        """The same, with the model named, and the adapters that its request has."""
        return BadLogits(self.row, self.num_bad, self.vocab_size, model, adapters)


class GrammarError(HypoError):
    """An answer could not be held to its form any longer: `field` asked for it, `reason` is why."""

    def __init__(self, field: str, reason: str) -> None:
        self.field = field
        self.reason = reason
        super().__init__(f"{field}: {_bounded_text(reason, 300)}; simplify it")


class NoTokenLeft(UsageError):
    """The settings named `fields` together allow no token that an answer could go on with."""

    def __init__(self, fields: tuple[str, ...]) -> None:
        self.fields = fields
        super().__init__(f"no token may come next by {' and '.join(fields)}; allow more")


class LaunchRejected(HypoError):
    """A kernel's arguments break what the kernel demands; nothing was launched."""

    def __init__(self, kernel: str, refusal: AnyRefusal) -> None:
        self.kernel = kernel
        self.refusal = refusal
        super().__init__(f"{kernel}: {refusal}")


class Unguardable(HypoError):
    """A kernel holds something that has no guarded form; `line` is that of `file`."""

    def __init__(self, file: str, line: int, expression: str, reason: str) -> None:
        self.file = file
        self.line = line
        self.expression = expression
        self.reason = reason
        super().__init__(f"{file}:{line}: {_bounded_text(expression)}: {reason}")


class StaleLayout(HypoError):
    """Weights were packed otherwise than the layout says that was kept of the same file."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"{name} was packed otherwise than at the last start")


class NotShareable(HypoError):
    """Memory of a device cannot be given to another process there."""

    def __init__(self, device: str, reason: str) -> None:
        self.device, self.reason = device, reason
        super().__init__(f"{device}: its memory cannot be shared between processes: {reason}")


class OutOfMemory(HypoError):
    """A device has no room for an allocation, or for a model: `parts` says what takes how much.

    `settings` are those by which less would be asked for, and `fits` says what there is room for.
    """

    def __init__(
        self,
        device: str,
        num_bytes: int,
        num_used: int,
        limit_bytes: int,
        parts: str = "",
        settings: tuple[str, ...] = ("context_length",),
        fits: str = "",
    ) -> None:
        self.device = device
        self.num_bytes = num_bytes
        self.num_used = num_used
        self.limit_bytes = limit_bytes
        self.settings = settings
        asked, used, limit = map(bytes_text, (num_bytes, num_used, limit_bytes))
        smaller = f"take a smaller {', a smaller '.join(settings)} or a smaller model"
        super().__init__(
            f"{device}: {asked} asked for{parts and f' ({parts})'}, but {used} of {limit} are in "
            f"use; {f'what would fit: {fits}' if fits else smaller}"
        )


class ModelTooLarge(OutOfMemory):
    """What the settings ask for cannot fit, and nothing was loaded."""

    exit_code = EXIT_USAGE


class DeviceFault(HypoError):
    """The device reported an error for something that it ran.

    `call` is the call that returned the error, of `kernel` where it is a launch; when
    `is_asynchronous` holds, it is innocent, and the fault lies somewhere in what was launched
    before it.
    """

    exit_code = EXIT_FAULT

    def __init__(
        self,
        device: str,
        call: str,
        reason: str,
        *,
        is_asynchronous: bool,
        kernel: str = "",
        kind: ErrorKind = ErrorKind.OTHER,
    ) -> None:
        self.device = device
        self.call = call
        self.kernel = kernel
        self.reason = reason
        self.kind = kind
        self.is_asynchronous = is_asynchronous
        blame = f"reported at {call}, caused by a launch before it" if is_asynchronous else call
        super().__init__(f"{device}: {reason} ({blame})")


class RankLost(DeviceFault):
    """A process that held a part of the model has ended; `how` says by what.

    `call` is the collective, or what else needed it: empty while that is not known.
    """

    def __init__(
        self, device: str, rank: int, num_ranks: int, process: int, how: str, call: str = ""
    ) -> None:
        self.rank, self.num_ranks, self.process, self.how = rank, num_ranks, process, how
        reason = f"rank {rank} of {num_ranks}, process {process}, {how}, and a step needs all ranks"
        super().__init__(device, call or "step", reason, is_asynchronous=False)

    def during(self, call: str) -> RankLost:
        """The same with the call that failed for it."""
        return RankLost(self.device, self.rank, self.num_ranks, self.process, self.how, call)


class NotReplayed(HypoError):
    """A recorded launch cannot be replayed: `reason` is what is said of `kernel`."""

    def __init__(self, kernel: str, reason: str) -> None:
        self.kernel = kernel
        self.reason = reason
        super().__init__(f"{kernel} {reason}")


class SourceNotAllowed(NotReplayed):
    """A kernel is not installed as it was recorded, and the recorded text may not be run.

    `differing` is the function whose text is another; empty for a kernel of the program's own.
    """

    def __init__(self, kernel: str, differing: str = "") -> None:
        self.differing = differing
        what = "is the program's own kernel"
        if differing:
            what = "" if differing == kernel else f"calls {differing}, which "
            what += "is installed with another text than was recorded"
        not_run = "its recorded source was not run; --run-sources runs it"
        super().__init__(kernel, f"{what}; {not_run}")


class AccessRefused(HypoError):
    """Guarded launches masked off accesses outside their tensors; nothing was touched there.

    `faults` are records of what and where, `texts` a description of each in several lines.
    `launches` are those of the step, so that the reported program can be replayed.
    """

    exit_code = EXIT_FAULT

    def __init__(
        self,
        device: str,
        faults: tuple[object, ...],
        texts: list[str],
        launches: tuple[object, ...] = (),
    ) -> None:
        self.device = device
        self.faults = faults
        self.texts = texts
        self.launches = launches
        more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
        first = ", at ".join(line.strip() for line in texts[0].splitlines())
        super().__init__(f"{device}: {first}{more}")


class CopyRejected(HypoError):
    """A host copy was refused before it began."""

    def __init__(self, tensor: str, refusal: AnyRefusal, owner: str = "") -> None:
        self.tensor = tensor
        self.owner = owner
        self.refusal = refusal
        super().__init__(f"copy of {tensor}{owner and f' ({owner})'}: {refusal}")


class BadBundle(HypoError):
    """A crash bundle that cannot be read or written: `part` of it, and why."""

    def __init__(self, folder: str | Path, part: str, reason: str) -> None:
        self.folder = Path(folder)
        self.part = part
        self.reason = reason
        super().__init__(f"{self.folder}: {part} {_bounded_text(reason, 300)}")


class BadCoreDump(HypoError):
    """A GPU's core dump, or a part of one, that makes no sense: `name` of it, and why."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = _bounded_text(name, 200)
        self.reason = _bounded_text(reason, 300)
        super().__init__(f"{self.name} {self.reason}")


class BadCodeObject(HypoError):
    """Machine code of a GPU that cannot be read or run: `name` of it, and why."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = _bounded_text(name, 200)
        self.reason = _bounded_text(reason, 300)
        super().__init__(f"{self.name} {self.reason}")


class IntegrityError(HypoError):
    """A table of ours contradicts itself; the message names the first contradiction."""


def _shorten(value: object, max_chars: int = 120) -> str:
    return _bounded_text(repr(value), max_chars)


def _bounded_text(text: str, max_chars: int = 120) -> str:
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."
