"""Chat template in Jinja, for other programs that read the file: system, turns, thinking.

Run as a script, it compares the template with webgemma's own (needs Jinja2)."""

import argparse

import settings  # noqa: F401  (puts src on the path)

from webgemma.text.chat import Chat

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


def main() -> None:
    """Render some chats with both templates."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    from jinja2 import Template

    turns = [("system", " Be brief. "), ("user", "Hello "), ("assistant", "Hi!"), ("user", "Who?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    for chat in (messages, messages[1:], messages[1:2]):
        for think in (False, True):
            names = {"bos_token": "<bos>", "enable_thinking": think, "add_generation_prompt": True}
            rendered = Template(TEMPLATE).render(messages=chat, **names)
            assert rendered == Chat("small").render(chat, think=think), rendered
    print("both templates render the same text")


if __name__ == "__main__":
    main()
