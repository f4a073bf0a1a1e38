"""Fields of requests that others document and that are no fields of the bodies here.

From OpenAI's reference, vLLM's `ChatCompletionRequest` and `CompletionRequest`, llama-server's
README, Ollama's page on OpenAI's API and Anthropic's reference of messages, as of November 2026.
`tests/server/documented_fields.py` lists all of theirs, and a test walks that list. What is read
is in `fields.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class RefusedField(NamedTuple):
    """A field that would change the answer: only these values of it change nothing.

    `instead` is what does the same here.
    """

    allowed: tuple[Any, ...] = ()
    instead: str = ""


_FORMS = "structured_outputs or response_format holds an answer to a form"
_THINK = "reasoning_effort, or chat_template_kwargs, says how much a model thinks"
_TOOLS = "offer functions as tools"
_TEXT_ONLY = "models are served that read and write text"

#: By name; the same in all bodies unless a body has it as a field.
REFUSED: Mapping[str, RefusedField] = {
    # -- of OpenAI
    "audio": RefusedField(instead=_TEXT_ONLY),
    "best_of": RefusedField((1,), "n gives several answers"),
    "function_call": RefusedField(("none", "auto"), "tool_choice says what to call"),
    "functions": RefusedField(([],), _TOOLS),
    "modalities": RefusedField((["text"],), _TEXT_ONLY),
    "moderation": RefusedField(),
    "suffix": RefusedField(("",)),
    "web_search_options": RefusedField(),
    # -- of vLLM
    "add_special_tokens": RefusedField(),  # see ALLOWED_IN_ONE
    "chat_template": RefusedField(instead="start the server with --chat-template"),
    "documents": RefusedField(([],), "put them into a message"),
    "echo": RefusedField((False,)),
    "guided_whitespace_pattern": RefusedField(instead=_FORMS),
    "include_reasoning": RefusedField((True,), _THINK),
    "length_penalty": RefusedField((1, 1.0)),
    "logits_processors": RefusedField(([],)),
    "logprob_token_ids": RefusedField(),
    "prompt_embeds": RefusedField(),
    "prompt_logprobs": RefusedField(instead="echo and logprobs of /v1/completions tell them"),
    "repetition_detection": RefusedField(),
    "return_prompt_text": RefusedField((False,), "/apply-template tells the prompt"),
    "return_tokens_as_token_ids": RefusedField((False,)),
    "skip_special_tokens": RefusedField((True,)),
    "thinking_token_budget": RefusedField((-1,), _THINK),
    "use_beam_search": RefusedField((False,)),
    "vllm_xargs": RefusedField(({},)),
    "watermarking": RefusedField((False,)),
    # -- of llama-server
    "adaptive_target": RefusedField((-1, -1.0)),
    "dry_multiplier": RefusedField((0, 0.0)),
    "dynatemp_range": RefusedField((0, 0.0)),
    "image_data": RefusedField(([],), _TEXT_ONLY),
    "input_extra": RefusedField(([],)),
    "input_prefix": RefusedField(("",)),
    "input_suffix": RefusedField(("",)),
    "min_keep": RefusedField((0, 1)),
    "mirostat": RefusedField((0,)),
    "n_cmpl": RefusedField((1,), "n gives several answers"),
    "n_indent": RefusedField((0,)),
    "n_probs": RefusedField((0,), "logprobs tell how likely tokens were"),
    "post_sampling_probs": RefusedField((False,)),
    "reasoning_budget_message": RefusedField(("",)),
    "reasoning_control": RefusedField((False,)),
    "reasoning_format": RefusedField(("auto", "deepseek")),
    "repeat_last_n": RefusedField((-1,)),
    "response_fields": RefusedField(([],)),
    "return_tokens": RefusedField((False,), "/tokenize tells the ids"),
    "samplers": RefusedField(([],)),
    "t_max_predict_ms": RefusedField((0, -1)),
    "thinking_budget_tokens": RefusedField((-1,), _THINK),
    "top_n_sigma": RefusedField((-1, -1.0)),
    "typical_p": RefusedField((1, 1.0)),
    "xtc_probability": RefusedField((0, 0.0)),
    # -- of Ollama, whose own routes have them, and of Anthropic and others
    "format": RefusedField(("",), "response_format holds an answer to a form"),
    "background": RefusedField((False,)),
    "container": RefusedField(),
    "conversation": RefusedField(instead="previous_response_id goes on with a response"),
    "prompt": RefusedField(instead="give the text itself"),
    "top_logprobs": RefusedField((0,), "/v1/chat/completions tells them"),
    "mcp_servers": RefusedField(([],), _TOOLS),
    "max_output_tokens": RefusedField(instead="max_tokens bounds an answer"),
    "options": RefusedField(({},), "give each as a field of the body"),
    "raw": RefusedField((False,), "/v1/completions takes a text as it is"),
    "stop_sequences": RefusedField(([],), "stop has them"),
    "system": RefusedField(("",), "give a message of the role system"),
    "template": RefusedField(("",), "start the server with --chat-template"),
    "think": RefusedField(instead=_THINK),
    "thinking": RefusedField(instead=_THINK),
    # -- of vectors and scores
    "embed_dtype": RefusedField(("float32",)),
    "endianness": RefusedField(("native", "little")),
    "max_chunks_per_doc": RefusedField(instead="cut the documents"),
    "max_tokens_per_doc": RefusedField(instead="cut the documents"),
    "rank_fields": RefusedField((["text"],), "a document is a text"),
    "raw_scores": RefusedField((True,), "scores are the model's own"),
    "return_embeddings": RefusedField((False,)),
    # -- fields of another body
    "parallel_tool_calls": RefusedField((True, False)),
    "reasoning": RefusedField(instead="/v1/chat/completions has it"),
    "reasoning_effort": RefusedField(("none",), "/v1/chat/completions has it"),
    "tool_choice": RefusedField(("none", "auto")),
    "tools": RefusedField(([],), "/v1/chat/completions has them"),
    "continue_final_message": RefusedField((False,), "a completion goes on with its prompt"),
    "add_generation_prompt": RefusedField((True,), "a completion goes on with its prompt"),
    "chat_template_kwargs": RefusedField(({},), "/v1/chat/completions has them"),
}
#: What is allowed in one body only, by its route's last word.
ALLOWED_IN_ONE: Mapping[tuple[str, str], tuple[Any, ...]] = {
    ("add_special_tokens", "chat"): (False,),
    ("add_special_tokens", "completions"): (True,),
}

#: They change no answer: for whoever keeps accounts; how fast or in what pieces it comes; and what
#: another field would need that is refused, or that is off.
HARMLESS = (
    # -- of OpenAI
    "metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "user",
    # -- of vLLM
    "ec_transfer_params", "guided_decoding_backend", "kv_transfer_params", "media_io_kwargs",
    "mm_processor_kwargs", "request_id", "return_assistant_tokens_mask", "return_mm_kwargs",
    "return_token_offsets", "routed_experts_prompt_start", "session_id",
    "spaces_between_special_tokens", "stream_interval", "truncation_side",
    # -- of llama-server
    "adaptive_decay", "cache_prompt", "dry_allowed_length", "dry_base", "dry_penalty_last_n",
    "dry_sequence_breakers", "dynatemp_exponent", "id_slot", "mirostat_eta", "mirostat_tau",
    "n_cache_reuse", "n_discard", "n_keep", "sse_ping_interval", "xtc_threshold",
    # -- of Ollama
    "keep_alive",
    # -- of Anthropic, and of OpenAI's responses; no model here refuses by a policy
    "fallback_credit_token", "fallbacks", "max_tool_calls", "user_profile_id", "workspace_id",
)  # fmt: skip

#: Documented, and passed over all the same; the answer's header names them. Clients send these to
#: every model: they wish for a style that no template here is told of, or for figures on the way.
TOLD = (
    "return_progress",
    "shift",
    "truncate",
    "timings_per_token",
    "verbosity",
    # -- of Anthropic, and of OpenAI's responses
    "access_programs",
    "background_options",
    "cache_control",
    "context_management",
    "diagnostics",
    "image",
    "inference_geo",
    "speed",
)
