"""The report as one page to look at, and as a timeline for a trace viewer.

Doors: `page.report_html` and `trace_events.trace_json`. What is drawn is worked out first, as plain
records (`timeline.py`, `address_space.py`, `address_life.py`); the other modules draw. A page holds
no script and loads nothing. Never takes a text of a bundle for markup.
"""
