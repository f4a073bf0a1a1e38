"""What the tests of the clients need of hypocenter, run by its own Python: `ours.py WHAT ARGUMENT`.

The clients live in another environment, where hypocenter is not. `model PATH` writes a model that
chats, small and with a short context. `vectors FOLDER` writes one that embeds and one that scores,
and `adapter PATH` an adapter of the first. `operations` writes the routes of the server's table.
`numbers MODEL` reads questions from stdin and writes what the Python API says to them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gguf import GGUFValueType

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from models.adapter_gguf import random_pairs, write_adapter
from models.demo_variants import CHAT_TEMPLATE, demo_with
from models.encoder_gguf import make_encoder
from repository import DEMO

from hypocenter import LLM
from hypocenter.server.app import TABLE


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


def write_vectors(folder: Path) -> None:
    """`vectors.gguf` embeds and `scores.gguf` scores; both are random."""
    for made, name in (("bert", "vectors"), ("bert-scores", "scores")):
        make_encoder(made, folder).path.rename(folder / f"{name}.gguf")


def write_operations() -> None:
    """Method and path of each route, as the document writes them."""
    for method, path in sorted({(entry.method, entry.documented_path) for entry in TABLE}):
        print(method, path)


if __name__ == "__main__":
    what, given = sys.argv[1], Path(sys.argv[2])
    match what:
        case "model":
            write_model(given)
        case "vectors":
            write_vectors(given)
        case "adapter":
            write_adapter(given, DEMO, random_pairs(DEMO, 4, seed=1, size=0.1))
        case "operations":
            write_operations()
        case _:
            print(json.dumps(numbers(str(given), json.load(sys.stdin))))
