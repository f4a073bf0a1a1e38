"""The bundled model in three types, prompt and decode, as machine code of each target."""

from __future__ import annotations

from pathlib import Path

import pytest
from models.k_quants import demo_of_type

from hypocenter import LLM

TARGETS = ("mi300x", "mi355x", "rx7900xtx", "rx9070xt")
#: More tokens than a tile of a matrix product has rows.
PROMPT = "import os\n\ndef join(folder, name):\n    return os.path.join(folder, name)\n\ndef read("
NUM_TOKENS = 3
#: How far a log probability may be from the CPU's. Seen on all targets: 0.004, 0.059 and 0.14; why
#: they differ was not looked into.
BOUNDS = {"F16": 0.01, "Q8_0": 0.1, "Q4_K_M": 0.25}


def _answer(model: Path, device: str) -> tuple[list[int], list[float]]:
    """Tokens, and log probabilities of the prompt's tokens and of these."""
    with LLM(model, device=device, context_length=128) as llm:
        said = llm.generate(
            PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0
        )
    assert said.logprobs is not None
    assert said.prompt_logprobs is not None
    each_token = (*said.prompt_logprobs[1:], *said.logprobs)
    scores = [one.logprob for one in each_token if one is not None]
    assert len(scores) == len(each_token)
    return list(said.token_ids), scores


@pytest.mark.tier("amd")
@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("target", TARGETS)
def test_the_model_says_what_it_says_on_the_cpu(target: str, kind: str, tmp_path: Path) -> None:
    model = demo_of_type(tmp_path / "demo.gguf", kind)
    tokens, wanted = _answer(model, "cpu")
    found_tokens, found = _answer(model, f"emu:{target}")
    assert len(wanted) > 16 + NUM_TOKENS
    assert found_tokens == tokens
    apart = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
    assert apart <= BOUNDS[kind]
