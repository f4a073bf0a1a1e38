"""The process that runs a served model: requests come in by a Unix socket, pieces go out.

Door: `worker.main`, which the server starts by `python -m hypocenter.worker.worker`. It knows
nothing of HTTP and never restarts itself: whatever breaks it is the server's to mend.
"""
