"""Where things of the repository lie that tests read: the one place that counts folders upwards."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_DIR = ROOT / "src" / "hypocenter"
SUPPORT = ROOT / "tests" / "support"
#: The model that comes with the package.
DEMO = PACKAGE_DIR / "assets" / "demo-q8_0.gguf"
