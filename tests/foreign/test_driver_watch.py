"""What a process asks of its driver is written down, against a driver and a CUPTI made of C."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pretended.fake_driver import SCALE, SCATTER, Fake, has_compiler

from hypocenter.base.errors import ErrorKind
from hypocenter.coredump.names import source_name
from hypocenter.foreign import hooks
from hypocenter.foreign.driver.library import Cupti, DriverLibrary, NotHere
from hypocenter.foreign.driver.watch import DriverWatch
from hypocenter.foreign.seen_memory import storages_are_kept
from hypocenter.record import driver_run, driver_table
from hypocenter.record.driver_log import DriverLogWriter, read_driver_log
from hypocenter.record.driver_run import NO_ANSWER, DriverRun
from hypocenter.record.runtime_text import kind_of_text

pytestmark = pytest.mark.skipif(not has_compiler(), reason="takes a C compiler")


class Watched:
    """A run folder, and a fake driver that is watched into it."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.fake = folder, Fake()
        self.writer = DriverLogWriter(folder)
        self.is_noted = False
        driver = DriverLibrary(str(self.fake.path))
        self.watch = DriverWatch(self.writer, driver, cache, lambda: self.is_noted)
        self.cupti = Cupti(self.watch.callback, self.fake.path)

    def read(self) -> DriverRun:
        run, missing = read_driver_log(self.folder, source_name)
        assert run is not None
        assert missing == ()
        return run

    def close(self) -> None:
        self.watch.end()
        self.cupti.close()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The callback is compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def watched(tmp_path: Path, cache: Path) -> Iterator[Watched]:
    made = Watched(tmp_path, cache)
    yield made
    made.close()


def _here(line: int) -> str:
    return f"{__file__}:{line}"


def test_a_launch_is_told_with_its_parameters_and_its_line(watched: Watched) -> None:
    memory = watched.fake.allocate(4096)
    line = (ctypes.c_int(), test_a_launch_is_told_with_its_parameters_and_its_line)[1]
    first = line.__code__.co_firstlineno
    assert watched.fake.launch(SCATTER, memory, 0, 77) == 0
    run = watched.read()
    [kernel], [launch] = run.kernels, run.launches
    assert (kernel.symbol, kernel.parameters) == ("scatter", ((0, 8), (8, 8), (16, 4)))
    assert (launch.grid, launch.block, launch.shared_bytes) == ((4, 1, 1), (128, 1, 1), 64)
    assert launch.data == memory.to_bytes(8, "little") + bytes(8) + (77).to_bytes(4, "little")
    file, _, number = launch.site.rpartition(":")
    # The line of the test's own helper that called the driver: no frame of a library.
    assert Path(file).name == "fake_driver.py"
    assert int(number) > 0
    assert first > 0
    assert launch.code == 0
    assert run.num_launches == 1


def test_parameters_in_one_buffer_and_launches_with_a_configuration(watched: Watched) -> None:
    memory = watched.fake.allocate(64)
    assert watched.fake.launch(SCALE, memory, 5, is_packed=True) == 0
    assert watched.fake.launch(SCALE, memory, 6, is_extended=True, blocks=9) == 0
    packed, extended = watched.read().launches
    assert packed.data == memory.to_bytes(8, "little") + (5).to_bytes(4, "little")
    assert extended.data == memory.to_bytes(8, "little") + (6).to_bytes(4, "little")
    assert (extended.grid, extended.shared_bytes) == ((9, 1, 1), 64)
    assert watched.read().kernels[0].name == "scale"


def test_a_refused_launch_is_told_with_the_answer_and_the_limits(watched: Watched) -> None:
    assert watched.fake.launch(SCALE, 1 << 40, 5, threads=2048) == 1
    run = watched.read()
    [launch], [refusal] = run.launches, run.refusals
    assert (launch.code, launch.block, launch.data) == (1, (2048, 1, 1), b"")
    assert (refusal.seq, refusal.name) == (launch.seq, "CUDA_ERROR_INVALID_VALUE")
    assert refusal.sentence == "invalid argument"
    assert refusal.limits["threads of a block"] == 1024


@pytest.fixture
def failing(watched: Watched) -> Iterator[Watched]:
    """A GPU that fails in its first launch, for which the program waits."""
    watched.fake.fail_launches(700)
    yield watched
    watched.fake.fail_launches(0)


def test_the_first_launch_of_a_kernel_is_told_whole_if_it_is_the_one_that_fails(
    failing: Watched,
) -> None:
    """Behind it the driver does not even say what the kernel takes."""
    memory = failing.fake.allocate(64)
    failing.fake.free(memory)
    assert failing.fake.launch(SCATTER, memory, 0, 77) == 700
    run = failing.read()
    [kernel], [launch] = run.kernels, run.launches
    assert kernel.parameters == ((0, 8), (8, 8), (16, 4))
    assert launch.data == memory.to_bytes(8, "little") + bytes(8) + (77).to_bytes(4, "little")
    assert run.failed_launch == launch
    assert launch.seq > run.memory[0].freed_seq > 0
    assert [refusal.seq for refusal in run.refusals] == [launch.seq]


def test_a_launch_in_which_the_process_ends_is_told(failing: Watched) -> None:
    failing.fake.fail_launches(700, is_end=True)
    failing.fake.launch(SCATTER, 1 << 40, 0, 77)
    run = failing.read()
    [kernel], [launch] = run.kernels, run.launches
    assert (kernel.symbol, launch.grid, launch.code) == ("scatter", (4, 1, 1), NO_ANSWER)
    assert (launch.data, run.num_launches, run.failed_launch) == (b"", 1, None)
    assert "fake_driver.py" in launch.site


def test_a_kernel_that_its_first_launch_loads_is_told_whole(watched: Watched) -> None:
    watched.fake.load_late()
    watched.fake.launch(SCALE, 1 << 40, 5)
    run = watched.read()
    assert run.kernels[0].parameters == ((0, 8), (8, 4))
    assert run.launches[0].data == (1 << 40).to_bytes(8, "little") + (5).to_bytes(4, "little")


def test_memory_is_told_with_its_end_and_comes_back(watched: Watched) -> None:
    first, second = watched.fake.allocate(100), watched.fake.allocate(200)
    watched.fake.free(first)
    gone, there = watched.read().memory
    assert (gone.address, gone.num_bytes, gone.call) == (first, 100, "cuMemAlloc")
    assert gone.freed_seq > there.seq > gone.seq
    assert "fake_driver.py" in gone.freed_site
    assert (there.address, there.freed_seq) == (second, 0)


def test_old_launches_and_freed_memory_make_room(watched: Watched) -> None:
    for number in range(driver_table.NUM_LAUNCHES + 50):
        watched.fake.launch(SCALE, 1 << 40, number)
    kept = watched.fake.allocate(8)
    for _ in range(driver_table.NUM_MEMORY + 10):
        watched.fake.free(watched.fake.allocate(8))
    run = watched.read()
    assert run.num_launches == driver_table.NUM_LAUNCHES + 50
    last = int.from_bytes(run.launches[-1].data[8:], "little")
    assert last == driver_table.NUM_LAUNCHES + 49
    assert len(run.launches) == driver_run.MAX_LAUNCHES
    whole = driver_table.Table((watched.folder / driver_table.NAME).read_bytes(), {})
    alive = [memory.address for memory in whole.memory() if not memory.freed_seq]
    assert alive == [kept]


def test_a_thread_that_python_does_not_know_is_told_without_a_line(watched: Watched) -> None:
    """And does not wait for Python's lock, which this test holds all the while."""
    lib = ctypes.PyDLL(str(watched.fake.path))  # keeps the lock during the call
    lib.fake_function.restype = ctypes.c_void_p
    assert lib.fake_thread(ctypes.c_void_p(lib.fake_function(SCATTER)), 3) == 0
    launches = watched.read().launches
    assert [launch.site for launch in launches] == ["", "", ""]
    assert [launch.block for launch in launches] == [(32, 1, 1)] * 3


def test_threads_of_python_launch_at_once(watched: Watched) -> None:
    def many() -> None:
        for number in range(200):
            watched.fake.launch(SCALE, 1 << 40, number)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run = watched.read()
    assert run.num_launches == 800
    assert len({launch.seq for launch in run.launches}) == driver_run.MAX_LAUNCHES
    assert len(run.kernels) == 1


def test_a_launch_that_is_noted_elsewhere_has_no_line_of_its_own(watched: Watched) -> None:
    watched.is_noted = True
    watched.fake.launch(SCALE, 1 << 40, 1)
    [launch] = watched.read().launches
    assert (launch.site, len(launch.data)) == ("", 12)


def test_graphs_are_counted(watched: Watched) -> None:
    watched.fake.launch_graph()
    watched.fake.launch_graph()
    assert watched.read().num_graphs == 2


def test_a_kernel_behind_an_unloaded_module_is_asked_for_anew(watched: Watched) -> None:
    watched.fake.launch(SCALE, 1 << 40, 1)
    watched.fake.unload()
    watched.fake.launch(SCALE, 1 << 40, 1)
    assert len(watched.read().kernels) == 2


def test_the_record_goes_on_in_another_folder(watched: Watched, tmp_path: Path) -> None:
    memory = watched.fake.allocate(8)
    watched.fake.launch(SCALE, memory, 1)
    watched.folder = tmp_path / "next"
    watched.folder.mkdir()
    watched.writer.move(watched.folder)
    watched.watch.begin()
    watched.fake.launch(SCALE, memory, 2)
    run = watched.read()
    assert [launch.data[8] for launch in run.launches] == [1, 2]
    assert run.memory[0].address == memory
    assert all(launch.site for launch in run.launches)


def test_another_subscriber_is_told_in_one_sentence(tmp_path: Path, cache: Path) -> None:
    fake = Fake()
    fake.refuse_subscribers(39)
    try:
        with pytest.raises(NotHere, match="another tool has subscribed to CUPTI before"):
            Watched(tmp_path, cache)
    finally:
        fake.refuse_subscribers(0)


def test_what_is_not_there_is_told_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(NotHere, match=r"the driver \(libnone.so\) cannot be loaded"):
        DriverLibrary("libnone.so")
    before = os.environ["PATH"]
    os.environ["PATH"] = str(tmp_path)
    try:
        with pytest.raises(NotHere, match="it takes a C compiler"):
            DriverWatch(DriverLogWriter(tmp_path), DriverLibrary(str(Fake().path)), tmp_path, bool)
    finally:
        os.environ["PATH"] = before


def test_a_table_that_is_damaged_is_told_of(watched: Watched) -> None:
    watched.fake.launch(SCALE, 1 << 40, 1)
    (watched.folder / "driver-table").write_bytes(b"short")
    run, missing = read_driver_log(watched.folder, source_name)
    assert run is not None
    assert run.launches == ()
    assert "has 5 bytes, but a table has" in missing[0].reason


@pytest.mark.parametrize(
    "said",
    [
        "CudaAPIError: [700] Call to cuCtxSynchronize results in CUDA_ERROR_ILLEGAL_ADDRESS",
        "CudaAPIError: [719] Call to cuMemcpyDtoH results in UNKNOWN_CUDA_ERROR",
        "CUDARuntimeError: cudaErrorIllegalAddress: an illegal memory access was encountered",
        "XlaRuntimeError: INTERNAL: CUDA_ERROR_MISALIGNED_ADDRESS",
    ],
)
def test_the_words_of_other_libraries_are_those_of_a_fault(said: str) -> None:
    assert kind_of_text(said) is ErrorKind.FOUND_LATER
    assert any(words in said for words in hooks._OF_A_GPU)
    assert kind_of_text("CudaAPIError: [1] Call to cuLaunchKernel results in INVALID_VALUE") is (
        ErrorKind.OTHER
    )


def test_a_program_without_torch_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of numba's: there is no storage to watch, and no torch to ask."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert storages_are_kept() is False
