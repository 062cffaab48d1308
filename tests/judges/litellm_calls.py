"""Calls LiteLLM as its users do, in its own environment, and prints what came of them as JSON.

python litellm_calls.py URL KEY"""

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks for a list of prices

import litellm

STORY = [{"role": "user", "content": "Tell me a story about a dog."}]
QUESTION = [{"role": "user", "content": "What is 6 times 7?"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Max", "Bella"]}, "tame": {"type": "boolean"}},
    "required": ["name", "tame"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "dog", "schema": SCHEMA, "strict": True}}
TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def main(url: str, key: str) -> dict[str, Any]:
    """Return what each provider's calls gave."""
    litellm.drop_params = False
    litellm.telemetry = False
    bases = {"openai": f"{url}/v1", "hosted_vllm": f"{url}/v1", "anthropic": url}
    bases |= {"ollama_chat": url, "ollama": url}
    found: dict[str, Any] = {}
    for provider, base in bases.items():
        common: Any = {"model": f"{provider}/demo", "api_base": base, "api_key": key}
        common |= {"max_retries": 0, "timeout": 60}

        def ask(messages: Any, common: Any = common, **more: Any) -> Any:
            return litellm.completion(**common | {"temperature": 0, **more}, messages=messages)

        whole = ask(STORY, max_tokens=20)
        chunks = [
            chunk.choices[0].delta.content or ""
            for chunk in ask(STORY, max_tokens=20, stream=True)
            if chunk.choices
        ]
        found[provider] = {
            "text": whole.choices[0].message.content,
            "tokens": whole.usage.completion_tokens,
            "chunks": chunks,
            "errors": [failure(ask, STORY, model=f"{provider}/other")],
        }
        as_json = ask(STORY, response_format=FORMAT, max_tokens=200).choices[0].message
        found[provider]["json"] = json.loads(as_json.content)
        if provider != "ollama":  # it writes tools into the text
            forced: Any = {} if provider == "ollama_chat" else {"tool_choice": "required"}
            made = ask(STORY, tools=[TOOL], max_tokens=200, **forced).choices[0].message
            found[provider]["forced"] = [call.function.name for call in made.tool_calls or ()]
            asked = ask(QUESTION, tools=[TOOL], max_tokens=200).choices[0].message
            calls = asked.tool_calls or []
            found[provider]["calls"] = [
                [call.function.name, json.loads(call.function.arguments)] for call in calls
            ]
            result = {"role": "tool", "tool_call_id": calls[0].id, "content": "42"}
            history = [*QUESTION, asked.model_dump(), result]
            answered = ask(history, tools=[TOOL], max_tokens=200)
            found[provider]["answer"] = answered.choices[0].message.content
    found["wrong key"] = failure(litellm.completion, STORY, **common | {"api_key": "wrong"})
    responses = litellm.responses(
        model="openai/demo",
        input=STORY[0]["content"],
        api_base=bases["openai"],
        api_key=key,
        temperature=0,
        max_output_tokens=20,
    )
    found["responses"] = "".join(
        part.text for item in responses.output for part in getattr(item, "content", None) or ()
    )
    return found


def failure(ask: Any, messages: Any, **options: Any) -> list[str]:
    """Return the kind and the text of the error that a call must end with."""
    try:
        ask(messages=messages, **options)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
