"""The process that clients talk to: OpenAI's routes over HTTP, and the supervisor of a worker.

Enter by `serve.serve`. It loads no engine: a worker process runs the model, and when that dies
another one goes on with every open request (`supervisor.py`). Prompts are encoded over there, too.
"""
