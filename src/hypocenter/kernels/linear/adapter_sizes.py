"""How much of an adapter kernels take at once."""

from __future__ import annotations

#: Ranks that belong to one adapter, and are multiplied together.
RANKS = 8
#: Outputs of an item.
OUTPUTS = 64
