"""The command `hypo`.

Door: `app.main`. What each verb does is in `verbs/`. What verbs share is in `output.py`,
`options.py`, `progress.py`, `bundles.py` and `answer.py`.
Never computes: it asks, waits, prints and leaves with an exit code.
"""
