"""Entry point of `python -m autotune`."""

from autotune.cli.main import main

main()
