"""Small chat templates in the manner of well-known model families, with their control tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """`control_texts` are the tokens that a message must not be able to write."""

    name: str
    source: str
    control_texts: tuple[str, ...]
    bos_token: str = ""
    eos_token: str = ""


CHATML = Family(
    "chatml",
    """{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    eos_token="<|im_end|>",
)

# Looks for markup in earlier answers and drops what the model thought.
THINKING = Family(
    "thinking",
    """{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    CHATML.control_texts,
    eos_token="<|im_end|>",
)

LLAMA3 = Family(
    "llama-3",
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
    ),
    "<|begin_of_text|>",
    "<|eot_id|>",
)

MISTRAL = Family(
    "mistral",
    """{{ bos_token }}{% set ns = namespace(system='') %}
{% for message in messages %}
{% if message.role == 'system' %}
{% set ns.system = message.content + '\n\n' %}
{% elif message.role == 'user' %}
{{ '[INST] ' + ns.system + message.content + '[/INST]' }}
{%- set ns.system = '' %}
{% elif message.role == 'assistant' %}
{% generation %}
{{ ' ' + message.content | trim + eos_token }}
{%- endgeneration %}
{% else %}
{{ raise_exception('Only system, user and assistant roles are supported!') }}
{% endif %}
{% endfor %}
""",
    ("<s>", "</s>", "<unk>", "[INST]", "[/INST]"),
    "<s>",
    "</s>",
)

GEMMA = Family(
    "gemma",
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}",
    ("<bos>", "<eos>", "<pad>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
    "<bos>",
    "<eos>",
)

PHI3 = Family(
    "phi-3",
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% if message['role'] == 'stop' %}{% break %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
    eos_token="<|endoftext|>",
)

ZEPHYR = Family(
    "zephyr",
    """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
""",
    ("<s>", "</s>", "<unk>"),
    "<s>",
    "</s>",
)

JSON = Family(
    "json",
    """<s>{% for m in messages %}
    {# a comment #}
    {% if m.role == 'skipped' %}{% continue %}{% endif %}
{{ m | tojson }} {{ m.content | tojson(indent=2) }} {{ dict(role=m.role) | tojson }}
{% endfor %}
{{ tools is none }} {{ documents is defined }} {{ messages | length }} {{ strftime_now('%%') }}
""",
    ("<s>", "</s>"),
)

FAMILIES = (CHATML, THINKING, LLAMA3, MISTRAL, GEMMA, PHI3, ZEPHYR, JSON)
