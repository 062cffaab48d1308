"""The chat format in Jinja, for other programs that read the file: system, turns, thinking."""

TEMPLATE = """\
{{- bos_token -}}
{%- set talk = messages -%}
{%- set system = '' -%}
{%- if messages and messages[0]['role'] in ['system', 'developer'] -%}
    {%- set system = messages[0]['content'] | trim -%}
    {%- set talk = messages[1:] -%}
{%- endif -%}
{%- if system or enable_thinking -%}
    {{- '<|turn>system\\n' -}}
    {%- if enable_thinking -%}{{- '<|think|>\\n' -}}{%- endif -%}
    {{- system + '<turn|>\\n' -}}
{%- endif -%}
{%- for message in talk -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{- '<|turn>' + role + '\\n' + message['content'] | trim + '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\\n' -}}{%- endif -%}
"""
