"""`python -m klatsch` is the command `klatsch`."""

from klatsch.cli import main

main()
