"""Prints the five tokens that the model finds most likely after a text, with their probabilities.

python examples/next_tokens.py                      # the bundled model, after a text of its own
python examples/next_tokens.py 'import '
python examples/next_tokens.py 'import ' model.gguf
"""

import sys

import numpy as np

from hypocenter import LLM

text, *model = sys.argv[1:] or ["import "]
with LLM(*model) as llm:
    logits = llm.logits(text)[-1].astype(np.float64)  # [vocab_size]
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    for token_id in np.argsort(-probabilities)[:5]:
        piece = llm.tokenizer.decode([int(token_id)])
        print(f"{probabilities[token_id]:.3f} {piece!r}")
