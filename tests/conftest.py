"""The environment that tests run in; the watchdog is `faulthandler_timeout` in pyproject.toml."""

from __future__ import annotations

import os

# The settings of whoever runs the tests must not change what they see, and nothing is downloaded.
for _name in [name for name in os.environ if name.startswith("HYPO_")]:
    if _name != "HYPO_CACHE_DIR":
        del os.environ[_name]
os.environ["HF_HUB_OFFLINE"] = "1"
