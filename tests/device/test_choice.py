"""What `auto` stands for, on pretended machines: their drivers, their torch, their room."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hypocenter.base.cards import Card
from hypocenter.base.errors import BadSetting, UsageError
from hypocenter.device import choice
from hypocenter.device.choice import choose_device, with_device, with_replicas
from hypocenter.settings.config import EngineConfig

GIB = 1 << 30


def card(
    index: int, free_gib: int = 70, *, vendor: str = "nvidia", name: str = "", arch: str = "sm_90"
) -> Card:
    return Card(
        index=index,
        vendor=vendor,
        name=name or f"H100 {index}",
        uuid=f"GPU-{index}a",
        arch=arch,
        memory_bytes=80 * GIB,
        free_bytes=free_gib * GIB,
    )


class Machine:
    """GPUs and a torch that are pretended; `choose` asks there."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.cards = root, [card(0), card(1)]
        self.environ: dict[str, str] = {}
        monkeypatch.setattr(choice, "cards_now", lambda root: tuple(self.cards))
        monkeypatch.delenv("HYPO_DEVICE")
        self._monkeypatch = monkeypatch
        self.torch("cuda")

    def torch(self, build: str | None) -> None:
        """One that is not imported yet; None: none."""
        folder = self.root / "packages/torch"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text("raise ImportError('it was imported')")
        versions = {name: "13.0" if name == build else None for name in ("cuda", "hip")}
        (folder / "version.py").write_text("\n".join(f"{k} = {v!r}" for k, v in versions.items()))
        self._monkeypatch.delitem(sys.modules, "torch", raising=False)
        found = SimpleNamespace(origin=str(folder / "__init__.py"))
        find = (lambda name: None) if build is None else (lambda name: found)
        self._monkeypatch.setattr(importlib.util, "find_spec", find)

    def choose(self, needed_bytes: int = 0, num_gpus: int = 1) -> tuple[str, str]:
        chosen = choose_device(needed_bytes, num_gpus, environ=self.environ, root=self.root)
        return chosen.device, chosen.reason


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_the_first_gpu_with_room_is_taken(machine: Machine) -> None:
    assert machine.choose() == ("cuda", "H100 0, 70.00 GiB of 80.00 GiB free")
    machine.cards = [card(0, 10), card(1)]
    assert machine.choose(20 * GIB) == ("cuda:1", "H100 1, 70.00 GiB of 80.00 GiB free")
    assert machine.choose(10 * GIB)[0] == "cuda"


def test_a_model_that_fits_nowhere_runs_on_the_cpu_and_says_why(machine: Machine) -> None:
    machine.cards = [card(0, 10), card(1, 12)]
    why = "the model takes 20.00 GiB; H100 1, 12.00 GiB of 80.00 GiB free"
    assert machine.choose(20 * GIB) == ("cpu", why)


def test_several_gpus_are_in_a_row_and_each_has_room(machine: Machine) -> None:
    machine.cards = [card(0, 70), card(1, 10), card(2, 70), card(3, 70)]
    assert machine.choose(20 * GIB, 2)[0] == "cuda:2"
    assert machine.choose(20 * GIB, 3) == (
        "cpu", "the model takes 20.00 GiB on each of 3; H100 0, 70.00 GiB of 80.00 GiB free"
    )  # fmt: skip
    assert machine.choose(0, 5) == ("cpu", "5 GPUs are asked for, but 4 are here")


@pytest.mark.parametrize(
    ("visible", "device"),
    [
        ("1", "cuda"), ("1,0", "cuda"), ("GPU-1a,GPU-0a", "cuda"), ("7", "cpu"), ("", "cpu"),
        ("-1", "cpu"), ("0,9,1", "cuda"), ("MIG-5c", "cuda"),
    ],
)  # fmt: skip
def test_what_the_environment_hides_is_not_there(
    machine: Machine, visible: str, device: str
) -> None:
    machine.environ["CUDA_VISIBLE_DEVICES"] = visible
    chosen, why = machine.choose()
    assert chosen == device
    if device == "cpu":
        assert why == f"CUDA_VISIBLE_DEVICES={visible} hides every GPU"


def test_numbers_are_those_of_torch(machine: Machine) -> None:
    machine.cards = [card(0, 10), card(1)]
    machine.environ["CUDA_VISIBLE_DEVICES"] = "1,0"
    assert machine.choose(20 * GIB) == ("cuda", "H100 1, 70.00 GiB of 80.00 GiB free")
    machine.environ["CUDA_VISIBLE_DEVICES"] = "0,9,1"  # what follows a wrong one is hidden
    assert machine.choose(20 * GIB)[0] == "cpu"


def test_a_gpu_that_torch_cannot_drive_is_named(machine: Machine) -> None:
    machine.torch(None)
    why = "H100 0 is here, but torch is not: pip install 'hypocenter[gpu]'"
    assert machine.choose() == ("cpu", why)
    machine.torch("cpu")
    assert machine.choose() == ("cpu", "H100 0 is here, but torch is the CPU build")
    machine.torch("hip")
    assert machine.choose() == ("cpu", "H100 0 is here, but torch is the AMD build")
    machine.cards.append(card(2, vendor="amd", name="MI300X", arch=""))
    assert machine.choose() == ("hip", "MI300X, 70.00 GiB of 80.00 GiB free")


def test_a_gpu_that_no_kernel_is_built_for_is_named(machine: Machine) -> None:
    machine.cards = [card(0, arch="sm_61")]
    assert machine.choose() == ("cpu", "no kernel is built for H100 0, sm_61")
    machine.cards.append(card(1))
    assert machine.choose()[0] == "cuda:1"


def test_a_machine_without_gpus(machine: Machine) -> None:
    machine.cards = []
    assert machine.choose() == ("cpu", "no GPU driver is loaded")
    assert not choose_device(root=machine.root, environ={}).has_gpu
    (machine.root / "dev").mkdir()
    (machine.root / "dev/nvidiactl").touch()
    assert machine.choose() == ("cpu", "the driver of NVIDIA is loaded, but reports no GPU")


def test_hypo_device_overrules(machine: Machine) -> None:
    machine.environ["HYPO_DEVICE"] = "cpu"
    assert machine.choose() == ("cpu", "HYPO_DEVICE says so")
    machine.environ["HYPO_DEVICE"] = "auto"
    assert machine.choose()[0] == "cuda"
    machine.environ["HYPO_DEVICE"] = "gpu"
    with pytest.raises(UsageError, match="HYPO_DEVICE is 'gpu', but must be auto, cpu, cuda"):
        machine.choose()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of three parts, of 30 GiB together."""
    for number in (1, 2, 3):
        with open(tmp_path / f"m-0000{number}-of-00003.gguf", "wb") as file:
            file.truncate(10 * GIB)
    (tmp_path / "other-00001-of-00003.gguf").write_bytes(b"x")
    return tmp_path / "m-00001-of-00003.gguf"


def test_a_model_must_have_room(machine: Machine, model: Path) -> None:
    machine.cards = [card(0, 30), card(1, 31)]
    config, chosen = with_device(model, EngineConfig())
    assert (config.device, str(chosen)) == (
        "cuda:1", "device cuda:1: H100 1, 31.00 GiB of 80.00 GiB free"
    )  # fmt: skip
    assert with_device(model, EngineConfig(tensor_parallel=2))[0].device == "cuda"
    assert with_device(model, EngineConfig(device="cuda")) == (EngineConfig(device="cuda"), None)


def test_settings_that_only_a_cpu_follows_choose_it(machine: Machine, model: Path) -> None:
    assert with_device(model, EngineConfig(float_products="bf16"))[0].device == "cpu"
    machine.cards = []
    with pytest.raises(BadSetting, match="tensor_parallel is 2, but a CPU has all cores"):
        with_device(model, EngineConfig(tensor_parallel=2))


def test_replicas_have_gpus_in_a_row(machine: Machine) -> None:
    machine.cards = [card(number) for number in range(4)]

    def devices(num: int, device: str = "cuda", num_parts: int = 1) -> tuple[str, ...]:
        config = EngineConfig(device=device, tensor_parallel=num_parts)
        return with_replicas(config, num, environ=machine.environ, root=machine.root)[1]

    assert devices(1) == ("cuda",)
    assert devices(4) == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert devices(2, num_parts=2) == ("cuda:0", "cuda:2")
    assert devices(2, "cuda:2") == ("cuda:2", "cuda:3")
    assert devices(3, "sim:h200", num_parts=2) == ("sim:h200",) * 3
    with pytest.raises(UsageError) as raised:
        devices(3, num_parts=2)
    expected = "--replicas is 3 with -tp 2: that takes 6 GPUs, but 4 are here; take at most 2"
    assert str(raised.value) == expected
    with pytest.raises(UsageError, match="3 GPUs from cuda:2 on, but 2 are here; take at most 2"):
        devices(3, "cuda:2")
    with pytest.raises(UsageError, match="takes 16 GPUs, but 4 are here; take a smaller -tp"):
        devices(2, num_parts=8)
    machine.environ["CUDA_VISIBLE_DEVICES"] = "3,1"
    assert devices(2) == ("cuda:0", "cuda:1")
    with pytest.raises(UsageError, match="takes 3 GPUs, but 2 are here"):
        devices(3)
    machine.environ["CUDA_VISIBLE_DEVICES"] = ""
    with pytest.raises(UsageError, match="takes 2 GPUs, but 0 are here; take --device cpu"):
        devices(2)
    for number in (0, 65):
        with pytest.raises(UsageError, match=f"--replicas is {number}, but must be from 1 to 64"):
            devices(number)


def test_replicas_divide_the_cores_and_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(9)))
    config, devices = with_replicas(EngineConfig(device="cpu"), 4)
    assert (config.num_threads, devices) == (2, ("cpu",) * 4)
    assert config.cpu_memory_fraction == EngineConfig().cpu_memory_fraction / 4
    config, _ = with_replicas(EngineConfig(device="cpu", num_threads=3), 4)
    assert config.num_threads == 3
    with pytest.raises(UsageError, match="--replicas is 10, but must be at most 9"):
        with_replicas(EngineConfig(device="cpu"), 10)


def test_replicas_that_auto_has_no_gpus_for_are_refused(machine: Machine, model: Path) -> None:
    machine.cards = [card(0), card(1, 10)]
    with pytest.raises(UsageError) as raised:
        with_device(model, EngineConfig(), num_replicas=2)
    assert str(raised.value) == (
        "--replicas is 2: the model takes 31.00 GiB on each of 2; H100 0, 70.00 GiB of 80.00 GiB "
        "free; take fewer, or name --device cpu"
    )
    machine.cards = []
    assert with_device(model, EngineConfig(), num_replicas=2)[0].device == "cpu"
