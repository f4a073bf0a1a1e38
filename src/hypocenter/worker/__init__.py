"""The process that runs a served model: requests come in by a Unix socket, pieces go out.

Door: `worker.main`, which the server starts by `python -m hypocenter.worker.worker`; others are
`keeper.main` and `reader.main`. They know nothing of HTTP and never restart themselves: whatever
breaks them is the server's to mend.
"""
