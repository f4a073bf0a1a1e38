"""What differs from a good run beside launches: answers, the engine's own Python, and their claims.

Door: `host_text.host_texts`. It never says which difference between launches is the cause.
"""
