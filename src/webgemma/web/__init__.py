"""The chat page that runs in a browser, and the loopback server that serves it."""
