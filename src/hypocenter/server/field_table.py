"""Fields of requests that others document and that are no fields of the bodies here.

From OpenAI's reference, vLLM's `ChatCompletionRequest` and `CompletionRequest`, llama-server's
README and Ollama's page on OpenAI's API, as they were in November 2026.
`tests/server/documented_fields.py` lists all of theirs, and a test walks that list. What is read
is in `fields.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Refused(NamedTuple):
    """A field that would change the answer: only these values of it change nothing.

    `instead` is what does the same here.
    """

    allowed: tuple[Any, ...] = ()
    instead: str = ""


_FORMS = "structured_outputs or response_format holds an answer to a form"
_THINK = "reasoning_effort, or chat_template_kwargs, says how much a model thinks"
_TOOLS = "offer functions as tools"
_TEXT_ONLY = "models are served that read and write text"

#: By name; the same in both bodies unless a body has it as a field.
REFUSED: Mapping[str, Refused] = {
    # -- of OpenAI
    "audio": Refused(instead=_TEXT_ONLY),
    "best_of": Refused((1,), "n gives several answers"),
    "function_call": Refused(("none", "auto"), "tool_choice says what to call"),
    "functions": Refused(([],), _TOOLS),
    "modalities": Refused((["text"],), _TEXT_ONLY),
    "moderation": Refused(),
    "suffix": Refused(("",)),
    "web_search_options": Refused(),
    # -- of vLLM
    "add_special_tokens": Refused(),  # see ALLOWED_IN_ONE
    "chat_template": Refused(instead="start the server with --chat-template"),
    "documents": Refused(([],), "put them into a message"),
    "echo": Refused((False,)),
    "guided_whitespace_pattern": Refused(instead=_FORMS),
    "include_reasoning": Refused((True,), _THINK),
    "length_penalty": Refused((1, 1.0)),
    "logits_processors": Refused(([],)),
    "logprob_token_ids": Refused(),
    "prompt_embeds": Refused(),
    "prompt_logprobs": Refused(instead="echo and logprobs of /v1/completions tell them"),
    "repetition_detection": Refused(),
    "return_prompt_text": Refused((False,), "/apply-template tells the prompt"),
    "return_token_ids": Refused((False,), "/tokenize tells the ids"),
    "return_tokens_as_token_ids": Refused((False,)),
    "skip_special_tokens": Refused((True,)),
    "thinking_token_budget": Refused((-1,), _THINK),
    "truncate_prompt_tokens": Refused(instead="shorten the prompt"),
    "use_beam_search": Refused((False,)),
    "vllm_xargs": Refused(({},)),
    "watermarking": Refused((False,)),
    # -- of llama-server
    "adaptive_target": Refused((-1, -1.0)),
    "dry_multiplier": Refused((0, 0.0)),
    "dynatemp_range": Refused((0, 0.0)),
    "image_data": Refused(([],), _TEXT_ONLY),
    "input_extra": Refused(([],)),
    "input_prefix": Refused(("",)),
    "input_suffix": Refused(("",)),
    "lora": Refused(([],)),
    "min_keep": Refused((0, 1)),
    "mirostat": Refused((0,)),
    "n_cmpl": Refused((1,), "n gives several answers"),
    "n_indent": Refused((0,)),
    "n_probs": Refused((0,), "logprobs tell how likely tokens were"),
    "post_sampling_probs": Refused((False,)),
    "reasoning_budget_message": Refused(("",)),
    "reasoning_control": Refused((False,)),
    "reasoning_format": Refused(("auto", "deepseek")),
    "repeat_last_n": Refused((-1,)),
    "response_fields": Refused(([],)),
    "return_tokens": Refused((False,), "/tokenize tells the ids"),
    "samplers": Refused(([],)),
    "t_max_predict_ms": Refused((0, -1)),
    "thinking_budget_tokens": Refused((-1,), _THINK),
    "top_n_sigma": Refused((-1, -1.0)),
    "typical_p": Refused((1, 1.0)),
    "xtc_probability": Refused((0, 0.0)),
    # -- of Ollama, whose own routes have them, and of Anthropic and others
    "format": Refused(("",), "response_format holds an answer to a form"),
    "max_output_tokens": Refused(instead="max_tokens bounds an answer"),
    "options": Refused(({},), "give each as a field of the body"),
    "raw": Refused((False,), "/v1/completions takes a text as it is"),
    "stop_sequences": Refused(([],), "stop has them"),
    "system": Refused(("",), "give a message of the role system"),
    "template": Refused(("",), "start the server with --chat-template"),
    "think": Refused(instead=_THINK),
    "thinking": Refused(instead=_THINK),
    # -- fields of the other body
    "parallel_tool_calls": Refused((True, False)),
    "reasoning": Refused(instead="/v1/chat/completions has it"),
    "reasoning_effort": Refused(("none",), "/v1/chat/completions has it"),
    "tool_choice": Refused(("none", "auto")),
    "tools": Refused(([],), "/v1/chat/completions has them"),
    "continue_final_message": Refused((False,), "a completion goes on with its prompt"),
    "add_generation_prompt": Refused((True,), "a completion goes on with its prompt"),
    "chat_template_kwargs": Refused(({},), "/v1/chat/completions has them"),
}  # fmt: skip
#: What is allowed in one body only, by its route's last word.
ALLOWED_IN_ONE: Mapping[tuple[str, str], tuple[Any, ...]] = {
    ("add_special_tokens", "chat"): (False,),
    ("add_special_tokens", "completions"): (True,),
}

#: They change no answer: for whoever keeps accounts; how fast or in what pieces it comes; and what
#: another field would need that is refused, or that is off.
HARMLESS = frozenset({
    # -- of OpenAI
    "metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "user",
    # -- of vLLM
    "ec_transfer_params", "guided_decoding_backend", "kv_transfer_params", "media_io_kwargs",
    "mm_processor_kwargs", "priority", "request_id", "return_mm_kwargs", "return_token_offsets",
    "routed_experts_prompt_start", "session_id", "spaces_between_special_tokens",
    "stream_interval", "truncation_side",
    # -- of llama-server
    "adaptive_decay", "cache_prompt", "dry_allowed_length", "dry_base", "dry_penalty_last_n",
    "dry_sequence_breakers", "dynatemp_exponent", "id_slot", "mirostat_eta", "mirostat_tau",
    "n_cache_reuse", "n_discard", "n_keep", "sse_ping_interval", "xtc_threshold",
    # -- of Ollama
    "keep_alive",
})  # fmt: skip

#: Documented, and passed over all the same; the answer's header names them. Clients send these to
#: every model: they wish for a style that no template here is told of, or for figures on the way.
TOLD = frozenset({"return_progress", "timings_per_token", "verbosity"})
