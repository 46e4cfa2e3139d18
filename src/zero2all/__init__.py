"""zero2all: train language models from raw text, end to end.

Each package is a stage that can be run alone, from Python or with the ``z2a`` command::

    from zero2all.recipe import load_recipe
    from zero2all.train import train

    train(load_recipe("recipes/quickstart.yaml", ["train.steps=200"]))
"""

__version__ = "0.3.0.dev0"
