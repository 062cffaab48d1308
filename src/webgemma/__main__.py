"""`python -m webgemma` is `webgemma`."""

from webgemma.cli import main

main()
