"""Rows as the one table: a line for each run that is not as wanted or asked for, and the counts."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from faults.judge import Claim, Says
from faults.row import Role, Row

_COLUMNS = tuple(says.value for says in Says)
#: What the doctor may take of a bundle. Of programs the seconds are those of the whole command.
MEDIAN_SECONDS, MOST_SECONDS = 10.0, 60.0
_DIAGNOSED = ("victims", "harmless")


def line_of(row: Row) -> str:
    """One run: what it is worth, and what was told first."""
    root = (row.roots or [{}])[0]
    keys = ("cause", "kernel", "argument", "file", "line")
    told = " ".join(str(root.get(key)) for key in keys if root.get(key))
    wrong = [name for name, claim in row.claims.items() if claim != Claim.RIGHT]
    says = row.says or ("alarm" if row.is_alarm else "quiet")
    claims = f"  [{', '.join(wrong)}]" if wrong and row.says != Says.SILENT else ""
    problems = f"  {'; '.join(row.problems)}" if row.problems else ""
    return (
        f"{row.collection:<9} {row.name:<32} {row.platform:<10} {row.role:<8} {says:<7}"
        f"{row.seconds:>6.1f}  {told}{claims}{problems}"
    )


def counts_of(rows: Sequence[Row]) -> Mapping[str, int]:
    """Of faults how many are right, vague, silent and false; of the others runs and alarms."""
    faults = [row for row in rows if row.role is Role.FAULT]
    by = Counter(row.says for row in faults)
    return {
        "faults": len(faults),
        **{says: by[says] for says in _COLUMNS},
        "unseen": sum(not row.is_seen for row in faults),
        "healthy": len(rows) - len(faults),
        "alarms": sum(row.is_alarm for row in rows),
        "applied": sum(row.mended is not None for row in faults),
        "mended": sum(row.mended is True for row in faults),
    }


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The counts by collection and platform, and of all.

    `unseen` are faults of which a doctor should say nothing, such as wrong arithmetic: there
    silence is what is wanted. `applied` are fixes that could be tried, `mended` those that helped.
    """
    kinds = list(dict.fromkeys((row.collection, row.platform) for row in rows))
    names = list(counts_of(rows))
    yield f"{'collection':<12}{'platform':<11}" + "".join(f"{name:>9}" for name in names)
    for collection, platform in kinds:
        own = [row for row in rows if (row.collection, row.platform) == (collection, platform)]
        yield _counted(f"{collection:<12}{platform:<11}", own)
    if len(kinds) > 1:
        yield _counted(f"{'all':<23}", rows)


def _counted(begin: str, rows: Sequence[Row]) -> str:
    return begin + "".join(f"{number:>9}" for number in counts_of(rows).values())


def slow_runs(rows: Sequence[Row]) -> list[str]:
    """Where the doctor itself took too long, in sentences; empty for nowhere."""
    seconds = [row.seconds for row in rows if row.collection in _DIAGNOSED] or [0.0]
    return [
        f"{what} {took:.1f} s, but at most {limit:.0f} s are allowed"
        for what, took, limit in (
            ("the median is", statistics.median(seconds), MEDIAN_SECONDS),
            ("the slowest takes", max(seconds), MOST_SECONDS),
        )
        if took > limit
    ]
