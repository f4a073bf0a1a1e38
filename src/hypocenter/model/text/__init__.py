"""Text to token ids and back, and chat templates.

Doors: `tokenizer.load_tokenizer`, `chat.ChatTemplate`. Templates are programs of strangers: they
run in a helper process (`chat_worker.py`).
Never renders a template in this process.
"""
