"""The request fields that others document for completions, chats, messages, responses, vectors,
scores and Ollama's own routes.

Names only, as they were in November 2026. Sources:

- OpenAI: https://platform.openai.com/docs/api-reference/chat/create, /completions/create and
  /responses/create
- Anthropic: https://docs.anthropic.com/en/api/messages, and its package of Python
- vLLM: its protocols of chats and of completions, and
  https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html; its older `guided_*`
- llama-server: the README of its server at https://github.com/ggml-org/llama.cpp; OpenAI's
  routes take there what its `/completion` takes
- Ollama: https://docs.ollama.com/api/openai-compatibility, https://docs.ollama.com/api and
  https://docs.ollama.com/modelfile
- Jina: https://api.jina.ai/redoc, rerank; Cohere: https://docs.cohere.com/reference/rerank
- text-embeddings-inference: https://huggingface.github.io/text-embeddings-inference, /rerank
"""

from __future__ import annotations

_OF_BOTH = {
    "OpenAI": "model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop "
    "stream stream_options temperature top_p user",
    "vLLM": "model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop "
    "stream stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty "
    "watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens "
    "skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side "
    "allowed_token_ids prompt_logprobs logprob_token_ids bad_words add_special_tokens "
    "response_format structured_outputs priority request_id session_id return_tokens_as_token_ids "
    "return_token_ids routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt "
    "kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget "
    "stream_interval echo logits_processors guided_json guided_regex guided_choice guided_grammar "
    "guided_decoding_backend guided_whitespace_pattern",
    "llama-server": "model temperature dynatemp_range dynatemp_exponent top_k top_p min_p "
    "n_predict n_indent n_keep n_cmpl n_cache_reuse stream stop typical_p repeat_penalty "
    "repeat_last_n "
    "presence_penalty frequency_penalty dry_multiplier dry_base dry_allowed_length "
    "dry_penalty_last_n dry_sequence_breakers xtc_probability xtc_threshold mirostat mirostat_tau "
    "mirostat_eta grammar json_schema seed ignore_eos logit_bias n_probs min_keep t_max_predict_ms "
    "id_slot cache_prompt return_tokens samplers timings_per_token return_progress "
    "sse_ping_interval post_sampling_probs response_fields lora top_n_sigma n_discard "
    "adaptive_target adaptive_decay max_tokens n logprobs response_format",
    "Ollama": "model frequency_penalty presence_penalty seed stop stream stream_options "
    "temperature top_p max_tokens logit_bias user n",
}
_OF_CHATS = {
    "OpenAI": "messages audio max_completion_tokens metadata modalities parallel_tool_calls "
    "prediction prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort "
    "response_format safety_identifier service_tier store tool_choice tools top_logprobs verbosity "
    "web_search_options function_call functions moderation",
    "vLLM": "messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort "
    "include_reasoning parallel_tool_calls add_generation_prompt continue_final_message documents "
    "chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text "
    "return_assistant_tokens_mask",
    "llama-server": "messages tools tool_choice chat_template_kwargs reasoning_effort "
    "reasoning_format reasoning_control parallel_tool_calls thinking_budget_tokens "
    "reasoning_budget_message",
    "Ollama": "messages response_format tools tool_choice reasoning_effort reasoning",
}
_OF_COMPLETIONS = {
    "OpenAI": "prompt best_of echo suffix",
    "vLLM": "prompt suffix prompt_embeds",
    "llama-server": "prompt input_prefix input_suffix input_extra",
    "Ollama": "prompt suffix echo",
}
#: Of other routes of theirs; clients send them to these all the same.
_FROM_ELSEWHERE = {
    "Ollama": "format options system template raw think keep_alive",
    "Anthropic": "stop_sequences thinking",
    "OpenAI": "max_output_tokens",
}


_OF_MESSAGES = {
    "Anthropic": "model messages max_tokens system stop_sequences stream temperature top_k top_p "
    "tools tool_choice thinking output_config output_format metadata container context_management "
    "mcp_servers service_tier cache_control diagnostics inference_geo speed user_profile_id "
    "workspace_id fallbacks fallback_credit_token",
}
_OF_RESPONSES = {
    "OpenAI": "model input instructions previous_response_id max_output_tokens max_tool_calls "
    "tools tool_choice parallel_tool_calls reasoning text include store metadata truncation stream "
    "stream_options temperature top_p top_logprobs access_programs background background_options "
    "context_management conversation image moderation prompt prompt_cache_key prompt_cache_options "
    "prompt_cache_retention safety_identifier service_tier user",
}
_OF_EMBEDDINGS = {
    "OpenAI": "input model dimensions encoding_format user",
    "vLLM": "input model dimensions encoding_format user truncate_prompt_tokens truncation_side "
    "add_special_tokens priority request_id normalize use_activation embed_dtype endianness "
    "mm_processor_kwargs",
    "llama-server": "input content model encoding_format embd_normalize",
    "Ollama": "input model dimensions encoding_format user",
}
_OF_RERANK = {
    "Jina": "model query documents top_n return_documents return_embeddings",
    "Cohere": "model query documents top_n max_tokens_per_doc priority rank_fields "
    "return_documents max_chunks_per_doc",
    "vLLM": "model query documents top_n truncate_prompt_tokens user mm_processor_kwargs priority "
    "use_activation max_tokens_per_doc",
    "llama-server": "model query documents texts top_n return_text",
    "text-embeddings-inference": "query texts raw_scores return_text",
}
_OF_OLLAMAS_CHATS = {
    "Ollama": "model messages tools format options stream keep_alive think logprobs top_logprobs "
    "truncate shift",
}
_OF_OLLAMAS_PROMPTS = {
    "Ollama": "model prompt suffix images format options system template stream raw keep_alive "
    "context think logprobs top_logprobs truncate shift",
}
_OF_OLLAMAS_TEXTS = {"Ollama": "model input truncate options keep_alive dimensions"}
#: Ollama's page of the parameters of a model file, which `options` may hold, and its type Options.
OPTIONS_OF_OLLAMA = [
    *("num_keep", "seed", "num_predict", "top_k", "top_p", "min_p", "typical_p", "repeat_last_n"),
    *("temperature", "repeat_penalty", "presence_penalty", "frequency_penalty"),
    *("penalize_newline", "stop", "numa", "num_ctx", "num_batch", "num_gpu", "main_gpu"),
    *("use_mmap", "num_thread", "mirostat", "mirostat_eta", "mirostat_tau", "tfs_z"),
    *("draft_num_predict", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mlock"),
]
_TABLES = {
    "embeddings": (_OF_EMBEDDINGS,),
    "rerank": (_OF_RERANK,),
    "ollama-chat": (_OF_OLLAMAS_CHATS,),
    "ollama-generate": (_OF_OLLAMAS_PROMPTS,),
    "ollama-embed": (_OF_OLLAMAS_TEXTS,),
    "chat": (_OF_BOTH, _OF_CHATS, _FROM_ELSEWHERE),
    "completions": (_OF_BOTH, _OF_COMPLETIONS, _FROM_ELSEWHERE),
    "messages": (_OF_MESSAGES,),
    "responses": (_OF_RESPONSES,),
}


def documented(route: str) -> list[tuple[str, str]]:
    """(whose, name) of each field that a body of this route may bring."""
    return [
        (whose, name)
        for table in _TABLES[route]
        for whose, names in table.items()
        for name in names.split()
    ]
