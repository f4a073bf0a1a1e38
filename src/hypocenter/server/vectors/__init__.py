"""What models are asked for that write nothing: vectors of texts, and scores of documents.

Doors: the functions of `routes.py`. Their bodies become orders as those of answers do, so that
queues, limits and workers that die are the same for both. Never asks a worker itself.
"""
