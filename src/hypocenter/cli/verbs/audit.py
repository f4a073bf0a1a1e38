"""`hypo audit`: prints what `audit/audit.py` found, and leaves with what that is worth."""

from __future__ import annotations

from hypocenter.audit.audit import LONG, SHORT
from hypocenter.audit.audit import audit as audit_model
from hypocenter.cli.outcomes import OutcomeWords, tell
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.settings.config import EngineConfig

_WORDS = OutcomeWords("hypo audit", "not audited", "NOT AUDITED", "gates")


def audit(
    path: str, config: EngineConfig, *, is_long: bool, page: str | None, as_json: bool, quiet: bool
) -> None:
    """Print the table, and leave as `tell` does."""
    with ProgressDisplay(quiet=quiet or as_json) as progress:
        outcome = audit_model(path, config, LONG if is_long else SHORT, progress)
    tell(outcome, page, _WORDS, as_json=as_json)
