"""The command `hypo`: a file for each verb.

Door: `app.main`. What verbs share is in `output.py`, `options.py`, `progress.py`, `bundles.py` and
`answer.py`; no verb imports another.
Never computes: it asks, waits, prints and leaves with an exit code.
"""
