"""``python -m alasso`` is ``alasso``."""

from alasso.cli import main

main()
