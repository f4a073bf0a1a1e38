"""Prints the five tokens that the model finds most likely after a text, with their probabilities.

python examples/next_tokens.py 'import '            # the bundled model
python examples/next_tokens.py 'import ' model.gguf
"""

import sys

import numpy as np

from hypocenter import LLM

with LLM(*sys.argv[2:3]) as llm:
    logits = llm.logits(sys.argv[1])[-1].astype(np.float64)  # [vocab_size]
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    for token_id in np.argsort(-probabilities)[:5]:
        text = llm.tokenizer.decode([int(token_id)])
        print(f"{probabilities[token_id]:.3f} {text!r}")
