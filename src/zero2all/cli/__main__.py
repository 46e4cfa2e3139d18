"""``python -m zero2all.cli``: what launched ranks run, with the interpreter that launched them."""

from zero2all.resilience.beat import has_agent

if has_agent():  # before anything else that may take long or fail
    from zero2all.resilience.rank import attend

    attend()

from zero2all.cli.main import main

main()
