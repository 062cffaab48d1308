"""Words: the tokenizer, the chat format and the parser of the model's replies."""
