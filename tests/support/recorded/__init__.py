"""Bundles, launches and core dumps as a run would have left them, and what is asked of them."""
