"""`hypo mcp` under the official client: in this process, and over stdio as agents start it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from outside.terminal import assert_one_line, hypo_in_process
from recorded.bundles import Run as RecordedRun
from recorded.bundles import background, crash, decoder, step, tensors_of_decoder
from repository import ROOT

from hypocenter.base import package
from hypocenter.cli.verbs import mcp as cli_mcp
from hypocenter.record import bundle as bundles

# Importing it takes a second and more, in each process that only collects what is here.
if importlib.util.find_spec("mcp") is None:
    pytest.skip("mcp is not installed", allow_module_level=True)

Use = Callable[[Any], Awaitable[Any]]
EXAMPLES = ROOT / "examples"


def in_process(use: Use, run_below: Path | None = None) -> Any:
    """What `use` makes of a client of the server's tools."""

    import mcp

    async def run() -> Any:
        async with mcp.Client(cli_mcp.make_server(run_below)) as client:
            return await use(client)

    return asyncio.run(run())


def over_stdio(use: Use, *words: str) -> Any:
    """The same with a server in a process of its own, as an agent starts it."""

    import mcp

    async def run() -> Any:
        command = mcp.StdioServerParameters(
            command=sys.executable,
            args=["-P", "-m", "hypocenter", "mcp", *words],
            env=dict(os.environ),
        )
        async with mcp.Client(command) as client:
            return await use(client)

    return asyncio.run(run())


def call(tool: str, **arguments: Any) -> Use:
    async def use(client: Any) -> Any:
        return await client.call_tool(tool, arguments)

    return use


def text_of(result: Any, *, is_error: bool = False) -> str:
    assert bool(result.is_error) is is_error, result
    return "".join(one.text for one in result.content)


async def listed(client: Any) -> dict[str, Any]:
    return {tool.name: tool for tool in (await client.list_tools()).tools}


def test_nothing_is_run_unless_a_person_has_named_a_folder() -> None:
    tools = in_process(listed)
    assert set(tools) == {"examine_bundle", "explain_report"}
    assert all(tool.annotations.read_only_hint for tool in tools.values())
    more = in_process(listed, EXAMPLES)
    assert set(more) == {*tools, "check_file"}
    assert more["check_file"].annotations.read_only_hint is False
    assert more["check_file"].annotations.destructive_hint is True


@pytest.mark.parametrize(
    ("tool", "arguments", "told"),
    [
        ("examine_bundle", {"bundle": "/nowhere"}, "/nowhere: no such folder; `hypo doctor"),
        ("examine_bundle", {"bundle": "/", "seconds": 0}, "seconds is 0.0, but must be above 0"),
        ("examine_bundle", {"bundle": "/", "seconds": 1e9}, "at most 600"),
        ("explain_report", {"report": "/nowhere"}, "/nowhere: No such file or directory"),
        ("explain_report", {"report": str(ROOT / "README.md")}, "README.md is no JSON"),
        ("check_file", {"file": "../README.md"}, "does not lie below"),
        ("check_file", {"file": "/etc/passwd"}, "does not lie below"),
        ("check_file", {"file": "gone.py"}, "gone.py: no such file"),
        ("check_file", {"file": "missing_mask.py", "arguments": ["x"] * 101}, "at most 100"),
    ],
)
def test_a_tool_says_why_it_failed(tool: str, arguments: dict[str, Any], told: str) -> None:
    assert told in text_of(in_process(call(tool, **arguments), EXAMPLES), is_error=True)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (tmp_path / "other.py").write_text("print('ran')")
    (folder / "linked.py").symlink_to(tmp_path / "other.py")
    with pytest.raises(cli_mcp.ToolFailed, match="does not lie below"):
        cli_mcp.file_below(folder, "linked.py")


def report_of(tmp_path: Path, bundle: bundles.Bundle) -> Path:
    """The JSON of `hypo doctor`, in a file."""
    folder = tmp_path / "bundle"
    bundles.save(bundle, folder)
    done = hypo_in_process("doctor", "--json", str(folder))
    report = tmp_path / "report.json"
    report.write_text(done.stdout)
    return report


def test_an_explanation_says_how_far_a_cause_is_proven(tmp_path: Path) -> None:
    report = report_of(tmp_path, background())
    told = text_of(over_stdio(call("explain_report", report=str(report))))
    [root] = json.loads(report.read_text())["roots"]
    assert "How far it is proven: a root cause is proven." in told
    assert f"- Passes with {root['proof']['corrected']}: {root['proof']['green']}" in told
    assert f"): {root['fix']}" in told
    assert f"{root['file']}:{root['line']}" in told
    assert "Attach to an issue:" in told


def test_an_explanation_claims_no_cause_where_none_is_proven(tmp_path: Path) -> None:
    run = RecordedRun()
    tensors_of_decoder(run)
    step(run, decoder(run))
    run.copy_out("out")
    report = report_of(tmp_path, run.bundle(crash()))
    told = text_of(in_process(call("explain_report", report=str(report))))
    fields = json.loads(report.read_text())
    assert fields["roots"] == []
    assert "proven: no cause was found in what was recorded." in told
    assert "Fix" not in told
    not_tested = [h["cause"] for h in fields["hypotheses"] if h["verdict"] == "NOT TESTED"]
    assert f"Not tested, so neither found nor excluded:\n- {not_tested[0]}: " in told


def test_what_is_long_is_cut_and_says_so() -> None:
    text = cli_mcp.cut("x" * 150_000)
    assert text.endswith("x\n[cut off here: 50000 more characters]")
    assert cli_mcp.cut("short") == "short"


def test_a_verb_that_takes_too_long_ends_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "slow.py"
    pids = tmp_path / "pids"
    script.write_text(
        "import os, subprocess, time\n"
        f"child = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(package, "module_command", lambda name: [sys.executable])
    monkeypatch.setattr(cli_mcp, "_MARGIN_SECONDS", 1.0)
    with pytest.raises(cli_mcp.ToolFailed, match=r"took longer than 1\.5 seconds"):
        asyncio.run(cli_mcp.run_verb([str(script)], 0.5, (0,)))
    deadline = time.monotonic() + 10  # a killed process is gone when its turn comes next
    for pid in pids.read_text().split():
        while not _has_ended(Path(f"/proc/{pid}/status")):
            assert time.monotonic() < deadline, f"process {pid} goes on"
            time.sleep(0.01)


def _has_ended(status: Path) -> bool:
    try:
        return "State:\tZ" in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    done = hypo_in_process("mcp")
    assert done.returncode == 2
    assert_one_line(done.stderr, "pip install 'hypocenter[mcp]'")
    gone = hypo_in_process("mcp", "--run-below", "/nowhere")
    assert_one_line(gone.stderr, "--run-below /nowhere: no such folder")


@pytest.mark.tier("tools")
def test_an_agent_checks_a_file_and_examines_a_bundle(tmp_path: Path) -> None:
    bundles.save(background(), tmp_path / "bundle")

    async def use(client: Any) -> tuple[str, str]:
        checked = await client.call_tool("check_file", {"file": "missing_mask.py"})
        examined = await client.call_tool("examine_bundle", {"bundle": str(tmp_path / "bundle")})
        return text_of(checked), text_of(examined)

    checked, examined = over_stdio(use, "--run-below", str(EXAMPLES))
    assert "missing_mask.py:14" in checked
    assert "x_ptr" in checked
    assert examined.startswith("# ")
