"""The page in the browser, and the server on the loopback address that brings it there."""
