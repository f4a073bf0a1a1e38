"""Small chat templates in the manner of well-known model families, with their control tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hypocenter.model.text.chat import ChatTemplate


@dataclass(frozen=True)
class Family:
    """`control_texts` are the tokens that a message must not be able to write."""

    name: str
    source: str
    control_texts: tuple[str, ...]
    bos_token: str = ""
    eos_token: str = ""


Open = Callable[[Family], ChatTemplate]


@contextmanager
def opening() -> Iterator[Open]:
    """What opens the template of a family, once."""
    templates: dict[str, ChatTemplate] = {}

    def open_family(family: Family) -> ChatTemplate:
        if family.name not in templates:
            templates[family.name] = ChatTemplate(
                family.source,
                bos_token=family.bos_token,
                eos_token=family.eos_token,
                control_texts=family.control_texts,
            )
        return templates[family.name]

    try:
        yield open_family
    finally:
        for template in templates.values():
            template.close()


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

#: Calls of functions as JSON between marks that are ordinary text. Not in FAMILIES: its own tests.
HERMES = Family(
    "hermes",
    """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments if tool_call.arguments is string
                else tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""",
    CHATML.control_texts,
    eos_token="<|im_end|>",
)

#: Describes tools in words of its own, and takes the name of the last call for the one answered.
HARMONY = Family(
    "harmony",
    """{%- macro render_type(spec) %}
    {%- if spec.type == 'array' %}{{- render_type(spec['items']) + '[]' }}
    {%- elif spec.type == 'integer' %}{{- 'number' }}
    {%- else %}{{- spec.type }}{%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\\n\\nnamespace functions {\\n' }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- '// ' + tool.description + '\\ntype ' + tool.name + ' = (_: {\\n' }}
        {%- for name, spec in tool.parameters.properties.items() %}
            {{- name + ('' if name in tool.parameters.required else '?') + ': ' }}
            {{- render_type(spec) + ',\\n' }}
        {%- endfor %}
        {{- '}) => any;\\n' }}
    {%- endfor %}
    {{- '}<|end|>' }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' + call.name }}
        {{- '<|channel|>commentary json<|message|>' + call.arguments | tojson + '<|call|>' }}
        {%- set last.name = call.name %}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + (last.name or message.name) }}
        {{- ' to=assistant<|channel|>commentary<|message|>' + message.content | tojson }}
        {{- '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
""",
    ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
    eos_token="<|return|>",
)

FAMILIES = (CHATML, THINKING, LLAMA3, MISTRAL, GEMMA, PHI3, ZEPHYR, JSON)
