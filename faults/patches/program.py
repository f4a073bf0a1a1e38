"""What a user runs when the engine misbehaves: a small model, some prompts, a few tokens.

`python program.py RUN MODELS` generates as `RUNS` says, with the model of that name in the
folder MODELS, and prints the token ids as JSON, and what was made of them. It knows of no fault.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypocenter import LLM, EngineConfig, SamplingParams

GPU = "sim:h200"
_SHORT = ((72, 105, 300),)
_PAIR = ((72, 105, 300), (301, 90))
_BEGINNING = tuple(range(40, 80))


@dataclass(frozen=True, slots=True)
class Run:
    """Batches of prompts, one after the other; `sampling` of each prompt in turn."""

    batches: tuple[tuple[tuple[int, ...], ...], ...] = (_SHORT,)
    model: str = "lab-f32"
    device: str = GPU
    num_tokens: int = 3
    sampling: tuple[dict[str, Any], ...] = ({},)
    config: dict[str, Any] = field(default_factory=dict)
    #: Conversations in place of prompts, and the tools that are offered.
    chats: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


_DRAWN = {"temperature": 0.9, "top_k": 12, "repeat_penalty": 1.4, "frequency_penalty": 0.3}
_BIASED = {"logit_bias": {0: 90.0, 97: -100.0}}


def _biases(start: int, stop: int) -> tuple[dict[str, Any], ...]:
    """Of two prompts, for as many tokens each."""
    one = {"logit_bias": {token: 60.0 + token / 16 for token in range(start, stop)}}
    return one, one


_ON_CPU: dict[str, Any] = {"device": "cpu"}

_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "Call as <tool_call>"
    '{{ \'{"name": ..., "arguments": ...}\' }}</tool_call>\n'
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
)
_GET = {
    "type": "function",
    "function": {
        "name": "get",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer"}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
}
_FORM = {"type": "object", "properties": {"a": {"enum": ["x", "yz", "~"]}}, "required": ["a"]}
_MANY = tuple(
    tuple(range(start, start + size))
    for start, size in zip(range(40, 46), (60, 4, 30, 5, 6, 8), strict=True)
)

RUNS = {
    "short": Run(),
    "pair": Run((_PAIR,)),
    "codes": Run(model="lab-q8_0"),
    "drawn": Run((_PAIR,), sampling=(_DRAWN | {"seed": 7}, _DRAWN | {"seed": 8})),
    "biased": Run(num_tokens=2, sampling=(_BIASED,)),
    "longer lists": Run(
        (_PAIR, _PAIR), num_tokens=2, sampling=(*_biases(100, 200), *_biases(200, 400))
    ),
    "allowed": Run(sampling=({"allowed_token_ids": tuple(range(67, 400, 5)), "min_tokens": 2},)),
    "experts": Run((_PAIR,), model="qwen3moe", num_tokens=2),
    "window": Run(
        (((5, 6, 7, 8, 9) * 6,),), model="gpt-oss", num_tokens=2, config={"max_batch_tokens": 32}
    ),
    "states": Run((_SHORT, ((301, 90, 7, 8),)), model="qwen35", num_tokens=2),
    "states longer": Run(model="qwen35", num_tokens=4),
    "states pair": Run((_PAIR,), model="qwen35", num_tokens=2),
    "full": Run(
        ((tuple(range(40, 70)),),), num_tokens=3, config={"kv_tokens": 32, "max_batch_tokens": 16}
    ),
    "cpu latents": Run((_PAIR,), model="deepseek2-lite", num_tokens=2, **_ON_CPU),
    "cpu form": Run(
        num_tokens=24, sampling=({"json_schema": _FORM, "ignore_eos": False},), **_ON_CPU
    ),
    "ranks": Run(model="lab-f32", num_tokens=2, config={"tensor_parallel": 2}),
    "cpu states": Run(
        ((_BEGINNING,), ((*_BEGINNING, 5), (*_BEGINNING[:16], 9)), ((*_BEGINNING, 5, 6),)),
        model="qwen35",
        num_tokens=2,
        config={"max_batch_tokens": 32},
        **_ON_CPU,
    ),
    "long texts": Run(
        ((_BEGINNING[:20],), (_BEGINNING,)),
        model="phi3-longrope-long",
        num_tokens=2,
        config={"max_batch_tokens": 32},
    ),
    "shared expert": Run((_PAIR,), model="qwen2moe", num_tokens=2),
    "cpu biased experts": Run((_PAIR,), model="deepseek2-v3", num_tokens=2, **_ON_CPU),
    "latents": Run((_PAIR,), model="deepseek2-lite", num_tokens=2),
    "cpu mamba": Run(
        ((_BEGINNING,), ((*_BEGINNING[:32], 5), (*_BEGINNING[:32], 9, 8))),
        model="granitehybrid",
        num_tokens=4,
        config={"max_batch_tokens": 64},
        **_ON_CPU,
    ),
    "cpu states pair": Run(
        ((_BEGINNING, _BEGINNING[::-1]),),
        model="qwen35",
        num_tokens=2,
        config={"max_batch_tokens": 96},
        **_ON_CPU,
    ),
    "cpu forms": Run(
        (_PAIR,),
        num_tokens=24,
        sampling=({"json_schema": _FORM, "ignore_eos": False},),
        **_ON_CPU,
    ),
    "cpu form and list": Run(
        num_tokens=24,
        sampling=(
            {
                "json_schema": _FORM,
                "ignore_eos": False,
                "logit_bias": {120: -math.inf},
            },
        ),
        **_ON_CPU,
    ),
    "cpu whole blocks": Run(
        ((_BEGINNING[:32],), (_BEGINNING[:32],)), config={"max_batch_tokens": 64}, **_ON_CPU
    ),
    "cpu crowded again": Run(
        (
            (_BEGINNING,),
            ((*_BEGINNING, 5), (300, *_BEGINNING[::-1]), (301, *_BEGINNING)),
        ),
        num_tokens=40,
        config={"max_batch_tokens": 64, "kv_tokens": 160, "max_batch_requests": 4},
        **_ON_CPU,
    ),
    "cpu twins": Run(
        (
            (
                (*_BEGINNING[:32], 5),
                (*_BEGINNING[:32], 6),
                (300, *_BEGINNING[:20]),
                (301, *_BEGINNING[::-1]),
            ),
        ),
        num_tokens=40,
        config={"max_batch_tokens": 160, "kv_tokens": 320, "max_batch_requests": 4},
        **_ON_CPU,
    ),
    "ranks pair": Run((_PAIR,), num_tokens=2, config={"tensor_parallel": 2}),
    "ranks with biases": Run(model="gpt-oss", num_tokens=2, config={"tensor_parallel": 2}),
    "ranks with experts": Run(model="qwen3moe", num_tokens=2, config={"tensor_parallel": 2}),
    "cpu yarn": Run((_PAIR,), model="qwen2-yarn", **_ON_CPU),
    "cpu many": Run((_MANY,), num_tokens=2, config={"max_batch_tokens": 8}, **_ON_CPU),
    "cpu stop": Run((_PAIR,), num_tokens=6, sampling=({"stop": ["dlX", "TMTMTM"]},), **_ON_CPU),
    "cpu call": Run(
        chats=("ab",),
        tools=(_GET,),
        num_tokens=80,
        config={"context_length": 512, "max_batch_tokens": 64, "chat_template": _TEMPLATE},
        **_ON_CPU,
    ),
    "cpu": Run((_PAIR,), **_ON_CPU),
    "cpu experts": Run((_PAIR,), model="qwen3moe", **_ON_CPU),
    "cpu drawn": Run((_PAIR,), sampling=(_DRAWN | {"seed": 7}, _DRAWN | {"seed": 8}), **_ON_CPU),
    "cpu long": Run(
        ((_BEGINNING, (9, *_BEGINNING[::-1])),), config={"max_batch_tokens": 14}, **_ON_CPU
    ),
    "cpu turns": Run(
        (
            (_BEGINNING,),
            ((*_BEGINNING[::-1], *_BEGINNING),),
            ((*_BEGINNING[:16], *_BEGINNING[::-1][16:32], 99, 98, 97), (*_BEGINNING, 7)),
        ),
        num_tokens=8,
        config={"max_batch_tokens": 64},
        **_ON_CPU,
    ),
    "cpu shared": Run(
        (
            (_BEGINNING,),
            ((*_BEGINNING, 5), (*_BEGINNING, 6), (300, *_BEGINNING[::-1])),
        ),
        sampling=({}, {"max_tokens": 2}, {"max_tokens": 40}, {"max_tokens": 60}),
        config={"max_batch_tokens": 64, "kv_tokens": 144, "max_batch_requests": 4},
        **_ON_CPU,
    ),
    "cpu crowded": Run(
        ((_BEGINNING, (*_BEGINNING, 5), (300, *_BEGINNING), (301, *_BEGINNING)),),
        num_tokens=40,
        config={"max_batch_tokens": 32, "kv_tokens": 176, "max_batch_requests": 4},
        **_ON_CPU,
    ),
}


def generate(run: Run, models: Path) -> tuple[list[list[int]], list[str]]:
    """The token ids of each prompt of each batch, and all that was said with them."""
    config: dict[str, Any] = {"context_length": 128, "max_batch_tokens": 4, "max_batch_requests": 2}
    config |= run.config
    with LLM(models / f"{run.model}.gguf", EngineConfig(device=run.device, **config)) as llm:
        found: list[list[int]] = []
        said: list[str] = []
        sampling = itertools.cycle(run.sampling)
        for text in run.chats:
            params = SamplingParams(max_tokens=run.num_tokens)
            done = [
                llm.chat(
                    [{"role": "user", "content": text}],
                    params,
                    tools=list(run.tools),
                    tool_choice="required",
                )
            ]
            found += [list(one.token_ids) for one in done]
            said += [repr((one.text, one.reasoning, one.tool_calls)) for one in done]
        for prompts in run.batches if not run.chats else ():
            given = [
                SamplingParams(
                    **{"max_tokens": run.num_tokens, "ignore_eos": True, **next(sampling)}
                )
                for _ in prompts
            ]
            done = llm.generate([list(prompt) for prompt in prompts], given)
            found += [list(one.token_ids) for one in done]
            said += [repr((one.text, one.reasoning, one.tool_calls)) for one in done]
    return found, said


if __name__ == "__main__":
    token_ids, said = generate(RUNS[sys.argv[1]], Path(sys.argv[2]))
    print(json.dumps({"token_ids": token_ids, "said": said}))
