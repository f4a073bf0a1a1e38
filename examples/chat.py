"""Asks the same chat two questions, with a seed, so that each run prints the same answers.

    python examples/chat.py model.gguf
    python examples/chat.py                # the bundled model, which was made to continue code

Any GGUF model with a chat template will do; the bundled one has none, and gets chatml.
"""

import sys

from hypocenter import LLM

model = sys.argv[1:2]
with LLM(*model, chat_template=None if model else "chatml") as llm:
    messages = []
    for question in ("What is a mutex?", "And a semaphore?"):
        messages.append({"role": "user", "content": question})
        answer = llm.chat(messages, max_tokens=40, temperature=0.7, seed=1).text
        print(f"> {question}\n{answer}")
        messages.append({"role": "assistant", "content": answer})
