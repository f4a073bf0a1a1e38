"""The project's GPU kernels as specimens, which take seconds to plan: once for all test files."""

from __future__ import annotations

from hypocenter.model.offline.specimens import project_specimens

SPECIMENS = project_specimens()
