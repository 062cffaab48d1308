"""A server for programs that speak OpenAI's, Ollama's or Anthropic's API."""
