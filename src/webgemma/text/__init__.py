"""Text: the tokenizer, the chat template, the reply parser and tool calls."""
