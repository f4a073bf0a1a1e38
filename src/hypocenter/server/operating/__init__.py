"""What an operator has to do with: where the server listens, its log, and what signals renew.

Doors: `log.logging_to`, `listening.bind`, `signals.Renewal`, `access.AccessLog`. It never answers a
request; `serve.py` puts the parts together.
"""
