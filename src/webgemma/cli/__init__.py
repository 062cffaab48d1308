"""The command line: `webgemma run`, `list`, `show`, `check`, `bench` and others.

Importing this imports nothing else of webgemma, so that `main` can answer Ctrl-C from the start."""

import sys

from webgemma.cli.interrupts import EXIT_CODE, end_on_interrupt


def main() -> None:
    """Run the `webgemma` command."""
    end_on_interrupt()
    try:
        from webgemma.cli.program import run_command  # half a second of imports

        code = run_command()
    except KeyboardInterrupt:
        code = EXIT_CODE
    sys.exit(code)
