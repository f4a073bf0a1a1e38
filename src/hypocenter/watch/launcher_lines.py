"""What launchers and loggers put before the lines of a program, taken off: for every reader of
lines in this room. What a report shows is the text as it was.

Forms: vLLM's and Ray's `(Name pid=1, ip=...)`, torchrun's `[rank0]:` and `[default0]:`, mpirun's
`[1,0]<stderr>:`, docker compose's `name-1  | `, `kubectl logs --prefix`, journald, lines of a
container's log, times and levels as Python's logging, glog, torch and loguru write them.
"""

from __future__ import annotations

import functools
import re

#: So many parts of prefixes stand before one line at most.
MAX_STACKED = 12

_DATE = r"(?:\d{4}[-/])?\d\d[-/]\d\d"
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
_ISO = rf"\d{{4}}-\d\d-\d\d[T ]{_CLOCK}(?:Z| ?[+-]\d\d:?\d\d)?"
_TIME = rf"(?:{_ISO}|{_DATE} {_CLOCK}|{_CLOCK})"
_LEVEL = r"(?:TRACE|DEBUG|INFO|NOTICE|WARNING|WARN|ERROR|CRITICAL|FATAL)"
_FILE = r"[\w./-]{1,80}\.(?:py|pyx|cpp|cc|cxx|c|cu|h|hpp|rs|go):\d{1,6}"

#: Who wrote a line: lines of one process are told from those of another by this.
_WHO = re.compile(
    r"\((?:[A-Za-z_][\w.:-]{0,60} )?(?:\w{1,20}=[\w.:-]{1,40},? ){0,4}pid=\d{1,10}"
    r"(?:, ip=[\w.:]{1,45})?\)(?: |$)"
    r"|\[rank ?\d{1,6}\]: ?|\[(?:default|trainer|worker|local_rank|node)\d{1,6}\]:"
    r"|\[\d{1,6},\d{1,6}\]<(?:stdout|stderr)>:"
    r"|[A-Za-z0-9][\w.-]{0,80}(?:[-_]\d{1,4} {1,40}| {2,40})\|(?: |$)"
    r"|\[pod/[\w.-]{1,253}/[\w.-]{1,63}\](?: |$)"
    rf"|(?:[A-Z][a-z]{{2}} [ \d]\d {_CLOCK}|{_ISO}) [\w.-]{{1,64}} "
    r"(?:[\w@.\\/-]{1,80}\[\d{1,10}\]|kernel):(?: |$)"
)
#: When a line was written, and by what part of its program.
_WHEN = re.compile(
    rf"{_LEVEL} (?={_TIME})|{_TIME}(?: (?:stdout|stderr) [FP]| \| {_LEVEL} *\| [\w.<>:]{{1,120}} -"
    rf"| -(?= [\w.]{{1,80}} - {_LEVEL}))?(?:: | |$)"
    rf"|\[{_TIME}(?: (?:DP|TP|PP|EP)\d{{1,4}}){{0,4}}\](?: |$)"
    r"|\[?[IWEF]\d{3,4} \d\d:\d\d:\d\d\.\d{1,9} (?: *\d{1,10} )?[^\s\]]{1,100}:\d{1,6}\](?: |$)"
    rf"|\[[IWE] {_FILE}\](?: |$)"
)
#: What counts only behind one of the others: alone it is a program's own text.
_BEHIND = re.compile(
    rf"(?:- )?\[?{_LEVEL}\]?(?:: | - | -$| {{1,4}}\| | (?={_TIME})| |$)"
    rf"|\[{_FILE}(?::\w{{1,60}})?\](?: |$)|[\w.]{{1,80}} - (?={_LEVEL}\b)"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}m")
_TRACEBACK = "Traceback (most recent call last)"


@functools.lru_cache(maxsize=4)
def without_prefixes(text: str) -> str:
    """The text without colours and without what launchers put before each line.

    Lines of a traceback that lines of other processes came between stand together again, where the
    prefixes say whose each is.
    """
    lines: list[str] = []
    open_tracebacks: dict[str, list[str]] = {}
    for raw in _COLOUR.sub("", text).split("\n"):
        who, line = split_prefix(raw)
        held = open_tracebacks.get(who)
        if held is not None:
            held.append(line)
            if line and not line.startswith((" ", "Traceback")):
                lines += open_tracebacks.pop(who)
        elif who and line.startswith(_TRACEBACK):
            open_tracebacks[who] = [line]
        else:
            lines.append(line)
    for held in open_tracebacks.values():
        lines += held
    return "\n".join(lines)


def split_prefix(line: str) -> tuple[str, str]:
    """Who wrote a line, "" where nothing says it, and the line itself, with its indentation."""
    who, at = "", 0
    for _ in range(MAX_STACKED):
        if found := _WHO.match(line, at):
            who += found[0].rstrip()
        else:
            found = _WHEN.match(line, at) or (_BEHIND.match(line, at) if at else None)
        if found is None:
            break
        at = found.end()
    return who, line[at:]
