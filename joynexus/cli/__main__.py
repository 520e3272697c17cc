"""``python -m joynexus.cli``: the same as the console script."""

from joynexus.cli import main

main()
