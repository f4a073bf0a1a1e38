"""The process that clients talk to: OpenAI's routes over HTTP, and the supervisor of a worker.

Door: `serve.serve`. A worker process runs the model, and when that dies another one goes on with
every open request (`supervisor.py`). It never loads an engine, and never reads what clients send:
processes of their own do (`reading/`).
"""
