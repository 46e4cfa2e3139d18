"""``python -m zero2all.cli``: what launched ranks run, with the interpreter that launched them."""

from zero2all.cli.main import main

main()
