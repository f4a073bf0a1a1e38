"""Attacks on `hypo serve` and what stands around it; `scripts/test-attack` runs them."""
