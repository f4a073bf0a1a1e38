"""Settings that come from the environment; the only reader of `HYPO_*`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from hypocenter.base.errors import UsageError
from hypocenter.settings.config import AUTO, DEVICE, DEVICE_LIMIT, EngineConfig


@dataclass(frozen=True, slots=True)
class Environment:
    """Settings that come from the environment: where files may be written, how much is said."""

    cache_dir: Path
    log: str
    debug: bool
    record: bool
    run_dir: Path
    trace: bool
    guard: bool
    nan: bool
    driver: bool
    #: None: where it has been compiled.
    native: bool | None
    instructions: str
    packed_bytes: int
    api_key: str
    admin_key: str
    #: What `auto` stands for; "": what suits the machine.
    device: str

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Environment:
        """Read every `HYPO_*` variable; raises UsageError for an unknown one or a bad value.

        Those of `hypo serve`'s options are its own to judge.
        """
        unknown = sorted(
            name
            for name in environ
            if name.startswith("HYPO_") and name not in KNOWN and not name.startswith(OF_SERVE)
        )
        if unknown:
            raise UsageError(f"{unknown[0]} is set, but known variables are {', '.join(KNOWN)}")
        log = environ.get("HYPO_LOG", "warning").lower()
        if log not in ("debug", "info", "warning", "error"):
            raise UsageError(f"HYPO_LOG is {log!r}, but must be debug, info, warning or error")
        return cls(
            _cache_dir(environ),
            log,
            _flag("HYPO_DEBUG", environ, "0"),
            _flag("HYPO_RECORD", environ, "1"),
            _run_dir(environ),
            _flag("HYPO_TRACE", environ, "0"),
            _flag("HYPO_GUARD", environ, "0"),
            _flag("HYPO_NAN", environ, "0"),
            _flag("HYPO_DRIVER", environ, "0"),
            _flag("HYPO_NATIVE", environ, "0") if environ.get("HYPO_NATIVE") else None,
            _instructions(environ),
            _gib("HYPO_PACKED_GIB", environ, "32"),
            environ.get("HYPO_API_KEY", ""),
            environ.get("HYPO_ADMIN_KEY", ""),
            _device(environ),
        )


def chosen_log(environ: Mapping[str, str] = os.environ) -> str | None:
    """The level that HYPO_LOG names; None where nobody has set it. `Environment` has checked it."""
    return environ.get("HYPO_LOG", "").lower() or None


#: Paths of CPU instructions that can be asked for, the fastest first.
INSTRUCTIONS = ("avx512-bf16", "avx512-vnni", "avx-vnni", "avx2", "plain")


def _instructions(environ: Mapping[str, str]) -> str:
    """The path that HYPO_INSTRUCTIONS names; empty: whatever the machine has."""
    name = environ.get("HYPO_INSTRUCTIONS", "").lower()
    if name and name not in INSTRUCTIONS:
        raise UsageError(
            f"HYPO_INSTRUCTIONS is {name!r}, but must be one of {', '.join(INSTRUCTIONS)}"
        )
    return name


def _device(environ: Mapping[str, str]) -> str:
    """The device that HYPO_DEVICE names; empty: the one that suits the machine."""
    name = environ.get("HYPO_DEVICE", "")
    if name in ("", AUTO):
        return ""
    if not DEVICE.fullmatch(name):
        raise UsageError(f"HYPO_DEVICE is {name!r}, but {DEVICE_LIMIT}")
    return name


#: Every environment variable that hypocenter reads, with what it does.
KNOWN: dict[str, str] = {
    "HYPO_DEVICE": "device where none is named: auto, cpu, cuda, hip or one of these by number",
    "HYPO_CACHE_DIR": "folder for compiled kernels and packed weights (default: ~/.cache)",
    "HYPO_PACKED_GIB": "GiB of packed weights that the cache may hold, 0 for none (default: 32)",
    "HYPO_LOG": "debug, info, warning or error (default: warning)",
    "HYPO_DEBUG": "1 shows tracebacks, like --debug",
    "HYPO_RECORD": "0 switches the recorder off (default: 1)",
    "HYPO_TRACE": "1 runs engines in launch mode traced, as hypo doctor --suspect does",
    "HYPO_TRACE_BYTES": "bytes of arguments that a traced run keeps (default: 67108864)",
    "HYPO_GUARD": "1 guards the Triton launches of a program that is recorded, as hypo guard does",
    "HYPO_NAN": "1 looks at the numbers of a program that is recorded, as hypo doctor --nan does",
    "HYPO_DRIVER": "1 has CUPTI record each launch of a program that is recorded, of any kernel",
    "HYPO_NATIVE": "1 compiles the machine code that sees torch's operations, and 0 does without "
    "(default: it is used where it has been compiled; --nan has it compiled for later runs)",
    "HYPO_INSTRUCTIONS": "path that CPU kernels take: " + ", ".join(INSTRUCTIONS),
    "HYPO_API_KEY": "key that clients of hypo serve must have, and that bench-serve sends",
    "HYPO_ADMIN_KEY": "key of the routes of hypo serve below /debug/ and /models/",
    "HYPO_RUN_DIR": "folder for what runs record (default: /dev/shm/hypo-UID)",
}

#: The variables that nothing shows or records, and no worker gets.
SECRETS = ("HYPO_API_KEY", "HYPO_ADMIN_KEY")
#: What the variables of `hypo serve`'s options begin with: HYPO_SERVE_PORT is its --port.
OF_SERVE = "HYPO_SERVE_"

#: Variables of others that change what a kernel does; shown, recorded, and honoured where they
#: say so.
FOREIGN_VARIABLES = (
    "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "HSA_ENABLE_SDMA",
    "HSA_OVERRIDE_GFX_VERSION", "HIP_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL",
    "CUDA_LAUNCH_BLOCKING", "HIP_DUMP_API_LOG", "OMP_NUM_THREADS", "XDG_CACHE_HOME",
)  # fmt: skip
FOREIGN_PREFIXES = ("NUMBA_", "TRITON_")


def relevant_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that are set and change what is run: ours and those of others."""
    return {
        name: environ[name]
        for name in sorted(environ)
        if (name in KNOWN or name in FOREIGN_VARIABLES or name.startswith(FOREIGN_PREFIXES))
        and name not in SECRETS
    }


# Where each vendor's runtime is told to finish a launch before it returns, with the values that
# mean so. AMD's takes 1 (wait before), 2 (wait after) and 3 (both).
_BLOCKING = {
    "HIP_LAUNCH_BLOCKING": ("1", "true"),
    "AMD_SERIALIZE_KERNEL": ("1", "2", "3", "true"),
    "CUDA_LAUNCH_BLOCKING": ("1", "true"),
}


def launch_blocking(environ: Mapping[str, str] = os.environ) -> str | None:
    """The first variable, as NAME=value, that asks for a wait after each launch; None: no wait."""
    for name, values in _BLOCKING.items():
        if environ.get(name, "").strip().lower() in values:
            return f"{name}={environ[name]}"
    return None


def key_of_clients(url: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The key with which a server is asked: HYPO_API_KEY, or else OPENAI_API_KEY.

    None where neither is set, and for another machine without TLS, where others could read it.
    """
    try:
        parts = urlsplit(url)
    except ValueError:  # no address at all, of which others tell
        return None
    if parts.scheme != "https" and parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        return None
    return environ.get("HYPO_API_KEY") or environ.get("OPENAI_API_KEY") or None


def as_environment_asks(config: EngineConfig) -> EngineConfig:
    """The same, traced where HYPO_TRACE asks for that and no other mode was chosen."""
    if config.launch_mode == "off" and Environment.read().trace:
        return replace(config, launch_mode="traced")
    return config


def trace_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """Most bytes of arguments of the last steps that a traced run keeps."""
    text = environ.get("HYPO_TRACE_BYTES", "").strip() or str(64 << 20)
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise UsageError(f"HYPO_TRACE_BYTES is {text!r}, but must be a number of bytes")
    return int(text)


def _cache_dir(environ: Mapping[str, str]) -> Path:
    if chosen := environ.get("HYPO_CACHE_DIR"):
        return Path(chosen)
    base = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME", "~")).expanduser())
    return Path(base) / ("hypocenter" if "XDG_CACHE_HOME" in environ else ".cache/hypocenter")


def _run_dir(environ: Mapping[str, str]) -> Path:
    if chosen := environ.get("HYPO_RUN_DIR"):
        return Path(chosen)
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK):
        return memory / f"hypo-{os.getuid()}"
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "hypo"
    return _cache_dir(environ) / "runs"


def _gib(name: str, environ: Mapping[str, str], default: str) -> int:
    """A number of GiB, in bytes."""
    text = environ.get(name, default)
    if not re.fullmatch("[0-9]{1,6}([.][0-9]{1,6})?", text, re.ASCII):
        raise UsageError(f"{name} is {text!r}, but must be a number from 0 to 999999")
    return int(float(text) * (1 << 30))


def _flag(name: str, environ: Mapping[str, str], default: str) -> bool:
    value = environ.get(name, default).lower()
    if value not in ("0", "1", "true", "false"):
        raise UsageError(f"{name} is {value!r}, but must be 0 or 1")
    return value in ("1", "true")
