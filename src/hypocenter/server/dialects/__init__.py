"""What agents speak beside OpenAI's chats: their bodies made chats, their answers made of blocks.

Doors: the functions of `messages_routes.py`. Each body becomes a `ChatBody`, so there is one way
to an answer. Never asks a worker itself.
"""
