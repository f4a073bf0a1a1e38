"""`python -m hypocenter` is the command `hypo`."""

from hypocenter.cli import main

main()
