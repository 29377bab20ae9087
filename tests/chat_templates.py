"""Chat templates with the structure of well-known families', written for these tests."""

from __future__ import annotations

_GENERATE = "{% if add_generation_prompt %}"

# Content in ChatML frames; tools as JSON in the system message, results within the user's turn.
CHATML = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "# Tools{% for t in tools %}\n{{ t | tojson }}{% endfor %}<|im_end|>\n{% elif messages[0].role == 'system' %}"
    "<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}<|im_start|>{{ m.role }}{% if m.content %}\n"
    "{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "<|im_end|>\n{% endif %}{% endfor %}" + _GENERATE + "<|im_start|>assistant\n{% endif %}"
)

# Headers, trimmed content, one call at a time whose arguments are an object.
HEADERS = (
    "{{ bos_token }}{% if tools %}{% set t = tools %}{% endif %}{% for m in messages %}"
    "{% if not (m.role == 'tool' or 'tool_calls' in m) %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if t is defined and loop.first %}Functions: {{ t | tojson }}\n{% endif %}{{ m.content | trim }}<|eot_id|>"
    "{% elif 'tool_calls' in m %}{% if not m.tool_calls | length == 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    "{{ {'name': m.tool_calls[0].function.name, 'parameters': m.tool_calls[0].function.arguments} | tojson }}"
    "<|eot_id|>{% else %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>{% endif %}"
    "{% endfor %}" + _GENERATE + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

# Ids of nine letters and digits; user and assistant alternate; the system message goes with the last user's.
NINE = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{{ bos_token }}{% set ns = namespace(i=0) %}{% for m in rest %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.i = ns.i + 1 %}{% endif %}{% endfor %}{% for m in rest %}{% if m.role == 'user' %}"
    "{% if tools and m == rest[0] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]"
    "{% if system is defined and loop.last %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.tool_calls is defined %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{% if c.id is not defined or c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    '{{ c.function | tojson }}, "id": "{{ c.id }}"{% endfor %}]{{ eos_token }}{% elif m.role == "tool" %}'
    "{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
    "{{ raise_exception('ids have nine characters') }}{% endif %}[TOOL_RESULTS]{{ m.content }}{{ m.tool_call_id }}"
    "[/TOOL_RESULTS]{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)

# Neither a system message nor tools, turns that alternate.
TURNS = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    + _GENERATE + "<start_of_turn>model\n{% endif %}"
)  # fmt: skip

# A list of parts, of which nothing else is read.
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{% for p in m.content %}{% if p.type == 'text' %} {{ p.text }}"
    "{% elif p.type == 'image' %}<image>{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    + _GENERATE + "<|im_start|>assistant:{% endif %}"
)  # fmt: skip

# Arguments are joined to text.
JOINED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if tools %}\n## Tools{% for t in tools %}\n{{ t.function.name }}: {{ t.function.parameters | tojson }}"
    "{% endfor %}{% endif %}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'assistant' and m.tool_calls %}<|Assistant|>{% for c in m.tool_calls %}"
    "{{ '<|call|>' + c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```' }}{% endfor %}{{ eos_token }}"
    "{% elif m.role == 'assistant' %}<|Assistant|>{{ m.content }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}<|result|>{{ m.content }}{% endif %}{% endfor %}"
    + _GENERATE + "<|Assistant|>{% endif %}"
)  # fmt: skip

# Ids are written out; content is text, or parts.
IDS = (
    "{% if tools %}<|im_system|>tools{{ tools | tojson }}<|im_end|>{% endif %}{% for m in messages %}"
    "<|im_{{ m.role }}|>{% if m.tool_calls %}{% for c in m.tool_calls %}<|call_begin|>{{ c.id }}<|arguments|>"
    "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}"
    "{% endif %}<|call_end|>{% endfor %}{% elif m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{{ m.content }}"
    "{% elif m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    "<|im_end|>{% endfor %}" + _GENERATE + "<|im_assistant|>{% endif %}"
)

# Each argument of a call by itself, results with what a template of this kind asks for; a variable of its own.
ITEMS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.content is string %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
    "\n<arg>{{ k }}</arg>\n<value>{{ v if v is string else v | tojson }}</value>{% endfor %}</tool_call>{% endfor %}"
    "\n{% endfor %}{% if tools %}<|tools|>{{ tools | tojson }}{% endif %}" + _GENERATE + "<|assistant|>\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)

# The system message within the first user's; what is no text is refused.
WRAPPED = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token }}[INST] {% if loop.first and system is defined %}<<SYS>>\n"
    "{{ system }}\n<</SYS>>\n\n{% endif %}{{ m.content.strip() }} [/INST]{% else %} {{ m.content.strip() }}"
    " {{ eos_token }}{% endif %}"
    "{% endfor %}"
)

# Knows two roles and passes the rest over without a word.
TWO_ROLES = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}<|end|>\n"
    "{% elif m.role == 'assistant' %}<|assistant|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    + _GENERATE + "<|assistant|>\n{% endif %}"
)  # fmt: skip

ALL = {
    "chatml": CHATML, "headers": HEADERS, "nine": NINE, "turns": TURNS, "parts": PARTS, "joined": JOINED, "ids": IDS,
    "items": ITEMS, "wrapped": WRAPPED, "two roles": TWO_ROLES,
}  # fmt: skip
SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>",
    "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<|User|>", "<|Assistant|>", "<|end|>",
)  # fmt: skip
