"""What the tests of the clients need of hypocenter, run by its own Python: `ours.py WHAT ARGUMENT`.

The clients live in another environment, where hypocenter is not. `model PATH` writes a model that
chats, small and with a short context. `numbers MODEL` reads questions from stdin and writes what
the Python API says to them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gguf import GGUFValueType

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from models.demo_variants import CHAT_TEMPLATE, demo_with

from hypocenter import LLM


def write_model(path: Path) -> None:
    demo_with(path, {"tokenizer.chat_template": (CHAT_TEMPLATE, GGUFValueType.STRING)})


def numbers(model: str, questions: dict[str, Any]) -> dict[str, Any]:
    """Of `pairs` of a context and what follows: the sum of logprobs, and whether it is likeliest.

    Of `prompts`: the texts that follow greedily, up to `stop` or `max_tokens`.
    """
    with LLM(model) as llm:
        pairs = [_loglikelihood(llm, context, rest) for context, rest in questions["pairs"]]
        texts = [
            llm.generate(prompt, max_tokens=questions["max_tokens"], stop=questions["stop"]).text
            for prompt in questions["prompts"]
        ]
    return {"pairs": pairs, "texts": texts}


def _loglikelihood(llm: LLM, context: str, rest: str) -> tuple[float, bool]:
    # Without BOS, as lm-eval's remote tokenizer has it.
    whole, begin = (
        llm.tokenizer.encode(text, add_special=False) for text in (context + rest, context)
    )
    # What it asks for where the border of the two is within a token.
    ids = begin + whole[len(begin) :]
    read = llm.generate(ids, max_tokens=0, prompt_logprobs=1).prompt_logprobs
    assert read is not None
    follow = [token for token in read[len(begin) :] if token is not None]
    is_greedy = all(token.logprob == token.top[0].logprob for token in follow)
    return sum(token.logprob for token in follow), is_greedy


if __name__ == "__main__":
    if sys.argv[1] == "model":
        write_model(Path(sys.argv[2]))
    else:
        print(json.dumps(numbers(sys.argv[2], json.load(sys.stdin))))
