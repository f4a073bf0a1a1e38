"""The report as one page to look at, and as a timeline for a trace viewer.

Doors: `page.report_html` and `trace_events.trace_json`. What is drawn is worked out first, as plain
records (`timeline.py`, `address_space.py`, `address_life.py`); the other modules draw. A page holds
no script, loads nothing, and no text of a bundle is markup in it.
"""
