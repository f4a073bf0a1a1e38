"""Names of other engines, and what is said to whoever types one here; accepts none of them.

Other names of a setting stand in its declaration.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

#: Names in vLLM, transformers, llama-cpp-python, Ollama or OpenAI's API, to ours for the same.
_OURS = {
    "SamplingParams": {
        "best_of": "LLM.sample",
        "n": "LLM.sample",
        "num_return_sequences": "LLM.sample",
    },
    "EngineConfig": {
        "model": "path, the first argument of LLM",
        "model_path": "path, the first argument of LLM",
    },
    "LLM": {
        "create_chat_completion": "chat",
        "create_completion": "generate",
        "decode": "tokenizer.decode",
        "detokenize": "tokenizer.decode",
        "get_tokenizer": "tokenizer",
        "tokenize": "tokenizer.encode",
    },
}
_FORMAT = "json_schema, json_object=True, grammar, regex or choice holds an answer to a form"
_TOOLS = "LLM.chat takes tools and tool_choice"
_ASYNC = "AsyncLLM has generate, stream, chat and stream_chat for asyncio"
#: What is asked for, to why it is not there and what is.
_WAYS_OUT = {
    "SamplingParams": {
        "do_sample": "a temperature above 0 samples, and 0 takes the most likely token",
        "guided_decoding": _FORMAT,
        "response_format": _FORMAT,
        "structured_outputs": _FORMAT,
        "functions": _TOOLS,
        "tool_choice": _TOOLS,
        "tools": _TOOLS,
        "stream": "LLM.stream and LLM.stream_chat give an answer in pieces",
    },
    "EngineConfig": {
        "dtype": "weights keep the type that they have in the file",
        "quantization": "weights keep the type that they have in the file",
        "torch_dtype": "weights keep the type that they have in the file",
        "n_gpu_layers": 'device="cuda" runs all layers on the GPU',
        "seed": "it belongs to SamplingParams",
    },
    "LLM": {
        "create_embedding": "LLM.embed gives the vector of a text",
        "agenerate": _ASYNC,
        "generate_async": _ASYNC,
        "chat_async": _ASYNC,
        "stream_async": _ASYNC,
        "score": "generate(text, max_tokens=0, prompt_logprobs=0) tells how likely a text is",
    },
}


def explain_unknown(
    owner: str, name: str, known: Iterable[str], ours: Mapping[str, str] | None = None
) -> str:
    """One sentence on a name that `owner` (SamplingParams, EngineConfig, LLM, AsyncLLM) lacks.

    `ours` are names of others to those among `known`, beside those here. The sentence ends with
    what was probably meant: the same thing's name here, why there is none, the name among `known`
    that is spelled alike, or all of them.
    """
    known = list(known)
    of = owner.removeprefix("Async")
    if name in _WAYS_OUT[of]:
        way_out = _WAYS_OUT[of][name]
    elif name in (called := {**(ours or {}), **_OURS[of]}):
        way_out = f"here it is called {called[name]}"
    elif near := difflib.get_close_matches(name, known, 1):
        way_out = f"did you mean {near[0]}?"
    else:
        way_out = f"it has {', '.join(known)}"
    return f"{owner} has no {name!r}; {way_out}"
