"""Compiles kernels in worker processes, so that a compiler that dies or hangs costs one record."""

from __future__ import annotations

import os
import queue
import selectors
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from hypocenter.base import package
from hypocenter.base.errors import HypoError, UsageError
from hypocenter.base.refusals import Refused
from hypocenter.base.wording import signal_name
from hypocenter.check.compile_worker import Hello, Job, Listed
from hypocenter.device.limits import named_gpu
from hypocenter.device.offline.compiled import CompiledKernel

_WORKER = "hypocenter.check.compile_worker"
COMPILE_SECONDS = 300.0
#: Collecting may run a user's file.
COLLECT_SECONDS = 1800.0


def command_of_file(file: str, arch: str) -> list[str]:
    """What a worker runs that compiles the launches of a file, made as on a GPU of `arch`."""
    return [*package.module_command(_WORKER), file, arch]


class Worker:
    """One worker process, ended by leaving the `with`.

    `command` runs `compile_worker.serve`. `listed` and `note`, once it has started: what there is
    to compile, and why a file that was run for its launches ended early.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by __exit__)
        self.listed: list[Listed] = []
        self.note = ""

    def start(self) -> None:
        """Start the process; raises what it says, UsageError or HypoError, when it cannot work."""
        # Interpreted kernels do not compile; the variable is read when Triton is imported.
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self._stderr.seek(0)
        self._stderr.truncate()
        self._process = subprocess.Popen(
            self._command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
        )
        line = self._read_line(COLLECT_SECONDS)
        if not line:
            raise HypoError(f"the process that compiles kernels {self._end()}")
        hello = msgspec.json.decode(line, type=Hello)
        if hello.error:
            self.stop()
            kind = UsageError if hello.exit_code == UsageError.exit_code else HypoError
            raise kind(hello.error)
        self.listed, self.note = hello.specimens, hello.note

    def compile(self, job: Job) -> CompiledKernel:
        """The record of one job; of a compiler that died or hung, a record that says so."""
        if self._process is None:
            before = self.listed
            self.start()  # of a file: run again, since its kernels live in the process that died
            if before not in ([], self.listed):
                raise HypoError("the file launched other kernels when it was run a second time")
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(job) + b"\n")
            self._process.stdin.flush()
            line = self._read_line(COMPILE_SECONDS)
        except BrokenPipeError:
            line = b""
        if line:
            return msgspec.json.decode(line, type=CompiledKernel)
        return self._record_of_lost_job(job, f"does not compile: the compiler {self._end()}")

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._stderr.close()

    def _read_line(self, seconds: float) -> bytes:
        """A whole line, or nothing when the process ended or the time is up."""
        assert self._process is not None
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                return b""
        # The worker writes a line at once: what has begun also ends, or the process does.
        line = self._process.stdout.readline()
        return line if line.endswith(b"\n") else b""

    def _end(self) -> str:
        """How the process ended, and its last words; ends it when it still runs."""
        assert self._process is not None
        try:
            code = self._process.wait(1)
            how = f"ended with {_end_text(code)}"
        except subprocess.TimeoutExpired:
            how = "did not answer in time"
        self.stop()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"{how}: {lines[-1].strip()[:200]}" if lines else how

    def _record_of_lost_job(self, job: Job, problem: str) -> CompiledKernel:
        limits, listed = named_gpu(job.arch), self.listed[job.index]
        return CompiledKernel(
            kernel=listed.kernel,
            label=listed.label,
            arch=limits.arch,
            guarded=job.guarded,
            ok=False,
            problems=(Refused(what=problem),),
            threads=listed.num_warps * limits.wavefront,
            shared_limit=limits.shared_limit_bytes,
        )


def _end_text(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal_name(-code)


def compile_all(
    worker: Worker, jobs: Sequence[Job], extra: Worker | None, done: Callable[[int], Any]
) -> list[CompiledKernel]:
    """Records of `jobs` in their order, by `worker` and, at the same time, `extra`.

    `done` is told the number of finished jobs, from any thread.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(jobs)):
        waiting.put(index)
    records: dict[int, CompiledKernel] = {}

    def work(worker: Worker) -> None:
        while True:
            try:
                index = waiting.get_nowait()
            except queue.Empty:
                return
            records[index] = worker.compile(jobs[index])
            done(len(records))

    workers = [worker, *([extra] if extra is not None else [])]
    with ThreadPoolExecutor(len(workers)) as pool:
        futures = [pool.submit(work, worker) for worker in workers]
        try:
            for future in futures:
                future.result()
        except BaseException:  # Ctrl-C, say: the other thread must not go on to the end
            while not waiting.empty():
                waiting.get_nowait()
            raise
    return [records[index] for index in range(len(jobs))]
