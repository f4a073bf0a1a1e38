"""Asks the same chat two questions, with a seed, so that each run prints the same answers.

    python examples/chat.py model.gguf

Any GGUF model with a chat template will do.
"""

import sys

from hypocenter import LLM

with LLM(sys.argv[1]) as llm:
    messages = []
    for question in ("What is a mutex?", "And a semaphore?"):
        messages.append({"role": "user", "content": question})
        answer = llm.chat(messages, max_tokens=40, temperature=0.7, seed=1).text
        print(f"> {question}\n{answer}")
        messages.append({"role": "assistant", "content": answer})
