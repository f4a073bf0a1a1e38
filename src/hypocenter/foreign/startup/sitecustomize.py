"""Runs first in every Python below `hypo doctor -- COMMAND`; holds nothing that is recorded.

Its folder leads PYTHONPATH there, and any Python may load it, 2.7 as well: hence no annotation and
no function. `hypocenter_waiting.py` beside it is for those Pythons that torch and Triton run in.
"""

import os
import sys

if __name__ == "sitecustomize":
    _here = os.path.dirname(os.path.abspath(__file__))
    if sys.version_info >= (3, 7) and os.environ.get("HYPO_RECORD", "1").lower() not in (
        "0",
        "false",
    ):
        import hypocenter_waiting  # type: ignore[import-not-found]

        hypocenter_waiting.begin()
    sys.path[:] = [path for path in sys.path if not path or os.path.abspath(path) != _here]
    # The one that this file hides runs as it would have; where there is none, all stays as it is.
    _this = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]
    except ImportError:
        if getattr(sys.exc_info()[1], "name", "sitecustomize") != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = _this
