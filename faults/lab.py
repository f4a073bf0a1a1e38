"""The table that a victim is laid on: how its defect gets into the engine, and out of it again.

Changes are made in the process of `child.py` and end with it; nothing here runs a model.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from faults.model import model_path
from hypocenter.base.dtypes import TORCH_NAMES, Int32s
from hypocenter.base.errors import UsageError
from hypocenter.base.package import kernel_module
from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.device import copies, devices, memory
from hypocenter.device.backend import Backend
from hypocenter.engine import runner as runner_module
from hypocenter.engine.batch import Batch
from hypocenter.engine.runner import Runner
from hypocenter.model.layers import step_buffers
from hypocenter.model.tensors.table import Weights
from hypocenter.record.recorder import open_recorder
from hypocenter.settings.config import EngineConfig, is_simulated
from hypocenter.settings.environment import Environment

if TYPE_CHECKING:
    from hypocenter.engine.llm import LLM

_MISSING = object()

#: A prompt and a length that take few steps: an interpreted token costs a quarter of a second.
PROMPTS: tuple[tuple[int, ...], ...] = ((72, 105, 300),)
NUM_TOKENS = 3
CONFIG = {"context_length": 64, "max_batch_tokens": 4, "max_batch_requests": 2}


def _require_keywords(around: Callable[..., Any], original: Callable[..., Any]) -> None:
    """Raises UsageError where a function that stands around another lacks keywords of it."""
    own = inspect.signature(around).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in own.values()):
        return
    for name, one in inspect.signature(original).parameters.items():
        is_often_named = one.default is not one.empty or one.kind is one.KEYWORD_ONLY
        if is_often_named and name not in own:
            raise UsageError(f"{around.__qualname__} takes no {name}, which {original} does")


class Lab:
    """What `plant` and `twin` get: a run of the engine that they may change before it begins.

    `config` are fields of EngineConfig, `prompts` token ids of requests that run together,
    `num_tokens` how many each generates, `sampling` more fields of their SamplingParams,
    `warm_up` prompts that run before them for one token, `model` the file.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.config: dict[str, Any] = {"device": device, **CONFIG}
        self.prompts = [list(prompt) for prompt in PROMPTS]
        self.num_tokens = NUM_TOKENS
        self.sampling: dict[str, Any] = {}
        self.warm_up: list[list[int]] = []
        self.model: Path = model_path()
        self.is_armed = True
        self._undo = ExitStack()
        self._before_step: list[Callable[[Runner, Batch], Batch]] = []
        self._after_step: list[Callable[[Runner], object]] = []
        self._after_load: list[Callable[[LLM], object]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._undo.close()

    # -- how a defect gets in -------------------------------------------------------------------

    def patch(self, owner: Any, name: str, value: Any) -> Any:
        """Set an attribute until the lab closes; returns what it was."""
        before = vars(owner).get(name, _MISSING)
        was = getattr(owner, name, None)
        setattr(owner, name, value)
        if before is _MISSING:
            self._undo.callback(delattr, owner, name)
        else:
            self._undo.callback(setattr, owner, name, before)
        return was

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace a function by `around(original, *args, **keywords)`.

        Raises UsageError where `around` does not take a keyword that the function has.
        """
        raw = vars(owner)[name]
        original = raw.__func__ if isinstance(raw, classmethod) else raw
        _require_keywords(around, original)

        @functools.wraps(original)  # ops ask functions for the names of their parameters
        def call(*args: Any, **keywords: Any) -> Any:
            return around(original, *args, **keywords)

        self.patch(owner, name, classmethod(call) if isinstance(raw, classmethod) else call)

    def edit(self, name: str, *changes: tuple[str, str]) -> None:
        """Exchange text in the module `name` of kernels; what it defines is replaced by the result.

        Each old text must stand there once. Raises UsageError where it does not.
        """
        module = importlib.import_module(kernel_module(name))
        made = edit_module(module, *changes)
        self._undo.callback(sys.modules.pop, made.__name__, None)
        for name, value in vars(made).items():
            if getattr(value, "__module__", None) == made.__name__ and hasattr(module, name):
                self._exchange(getattr(module, name), value)

    def _exchange(self, old: Any, new: Any) -> None:
        """In all modules of kernels, for some import names from others."""
        for name, module in list(sys.modules.items()):
            if name.startswith("hypocenter.kernels."):
                for key in [key for key, value in vars(module).items() if value is old]:
                    self.patch(module, key, new)

    def disarm(self) -> None:
        """Switch off what refuses wrong arguments before they reach a kernel."""
        import hypocenter.model.offline.specimens  # noqa: F401  (every module of kernels)

        self.is_armed = False
        for name, module in list(sys.modules.items()):
            if name.startswith("hypocenter.kernels."):
                for value in vars(module).values():
                    if isinstance(value, Contract) and value.check is not _accept:
                        self.patch(value, "check", _accept)
        self.patch(Runner, "_check", lambda runner, batch: None)
        copies.arm_copies(False)
        self._undo.callback(copies.arm_copies, True)
        recorder = open_recorder()
        recorder.arm("contracts", False)
        recorder.arm("step indices", False)

    def change_layer(self, index: int, **tensors: Callable[[Tensor], Tensor]) -> None:
        """Load the model with tensors of a layer replaced by what the functions make of them."""

        def load(original: Callable[..., Weights], *given: Any, **keywords: Any) -> Weights:
            weights = original(*given, **keywords)
            layers = list(weights.layers)
            own: dict[str, Any] = {
                name: make(getattr(layers[index], name)) for name, make in tensors.items()
            }
            layers[index] = replace(layers[index], **own)
            return replace(weights, layers=tuple(layers))

        self.wrap(runner_module, "load_weights", load)

    def run_two_requests(self) -> None:
        """Two requests run together, and both of their prompts fit one step."""
        self.prompts = [[72, 105], [300, 301, 9]]
        self.config["max_batch_tokens"] = 8

    def leave_undefined(self, owner: type) -> None:
        """Buffers that `owner.allocate` makes begin as torch.empty gives them, not cleared."""
        module = sys.modules[owner.__module__]

        def allocate(make: Callable[..., Any], *given: Any, **keywords: Any) -> Any:
            cleared = self.patch(module, "allocate", memory.allocate_undefined)
            try:
                return make(*given, **keywords)
            finally:
                self.patch(module, "allocate", cleared)

        self.wrap(owner, "allocate", allocate)

    # -- hooks ----------------------------------------------------------------------------------

    def after_load(self, hook: Callable[[LLM], object]) -> None:
        """Call `hook` when the model is loaded, and before the first step."""
        self._after_load.append(hook)

    def set_apart(self, name: str, change: Callable[[int, str], Tensor] | None = None) -> None:
        """Give an input of the step memory of its own, or what `change` makes of (size, device)."""

        def make_indices(num_tokens: int, device: str) -> Tensor:
            return memory.allocate(name, "step", DType.I32, (num_tokens,), device=device)

        def inputs(
            make: Any, cls: Any, num_tokens: int, *sizes: int, device: str, **more: Any
        ) -> Any:
            given = make(cls, num_tokens, *sizes, device=device, **more)
            return replace(given, **{name: (change or make_indices)(num_tokens, device)})

        self.wrap(step_buffers.StepInputs, "allocate", inputs)

    def before_step(self, hook: Callable[[Runner, Batch], Batch]) -> None:
        """Run each step with the batch that `hook` makes of it."""
        self._before_step.append(hook)
        if len(self._before_step) + len(self._after_step) == 1:
            self.wrap(Runner, "run", self._step)

    def after_step(self, hook: Callable[[Runner], object]) -> None:
        """Call `hook` when the launches of a step have been made."""
        self._after_step.append(hook)
        if len(self._before_step) + len(self._after_step) == 1:
            self.wrap(Runner, "run", self._step)

    def change_batch(self, **fields: Callable[[Batch], Int32s]) -> None:
        """Run each step with arrays of its batch replaced by what the functions make of it."""

        def change(_: Runner, batch: Batch) -> Batch:
            arrays: dict[str, Any] = {name: make(batch) for name, make in fields.items()}
            return replace(batch, **arrays)

        self.before_step(change)

    def _step(self, run: Callable[..., Tensor], runner: Runner, batch: Batch) -> Tensor:
        for before in self._before_step:
            batch = before(runner, batch)
        logits = run(runner, batch)
        for after in self._after_step:
            after(runner)
        return logits

    def run_hooks(self, llm: LLM) -> None:
        for hook in self._after_load:
            hook(llm)

    # -- what victims need of the device ----------------------------------------------------------

    def simulate(self, **options: Any) -> None:
        """Open the simulated GPU with options of its own (graphs, compile_check, seed).

        A real GPU makes graphs anyway; other options it has none of.
        """
        from hypocenter.device.amd.emu import open_emu
        from hypocenter.device.sim.sim import open_sim

        if options == {"graphs": True} and not is_simulated(self.device):
            return
        if not is_simulated(self.device):
            raise UsageError(f"{self.device} is no simulated GPU; its options are its own")
        opened = open_emu if self.device.startswith("emu:") else open_sim
        devices.use_backend(opened(self.device, **options))

    @property
    def backend(self) -> Backend:
        devices.open_device(self.device)
        return devices.backend_of(self.device)

    def pointer(self, address: int, dtype: DType) -> Any:
        """A pointer to elements of `dtype` at any address, as C has them."""
        if is_simulated(self.device):
            return self.backend.argument(address, dtype, 0)
        return _Pointer(address, TORCH_NAMES[dtype.name])

    def engine_config(self) -> EngineConfig:
        """A cache of one context wherever it runs: a real GPU's would have blocks of any number."""
        return EngineConfig(**{"kv_tokens": self.config["context_length"], **self.config})


@dataclass(frozen=True, slots=True)
class _Pointer:
    """As much of a tensor as Triton looks at in one; a graph need not keep its memory."""

    address: int
    dtype: str

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return 0


def alter(values: Int32s, index: int | tuple[int, ...], value: int) -> Int32s:
    """A copy with one entry changed."""
    copy = values.copy()
    copy[index] = value
    return copy


def _accept(**arguments: Any) -> dict[str, Any]:
    return {}


def edit_module(module: ModuleType, *changes: tuple[str, str]) -> ModuleType:
    """A module like `module`, made from its source with texts exchanged; see Lab.edit."""
    text = inspect.getsource(module)
    for old, new in changes:
        if (count := text.count(old)) != 1:
            raise UsageError(f"{module.__name__}: {old!r} stands there {count} times, not once")
        text = text.replace(old, new)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    # Below a package of the same name it is known for a kernel of the project that was changed.
    copy = Environment.read().cache_dir / "lab" / digest
    path = copy.joinpath(*module.__name__.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    short = path.stem
    # Triton and tracebacks read the text from a file.
    own = path.with_suffix(f".{os.getpid()}")
    own.write_text(text, "utf-8")
    own.replace(path)
    spec = importlib.util.spec_from_file_location(f"hypocenter_lab.{short}", path)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made
