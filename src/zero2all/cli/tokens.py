"""z2a tokens build | inspect"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from zero2all.base.errors import UsageError
from zero2all.cli.conventions import (
    Json,
    Overrides,
    Ray,
    RecipePath,
    Result,
    VerifyOutput,
    command,
    resumable_command,
    task_engine,
)

app = typer.Typer(help="Tokenize documents; show which tokens are learned.", no_args_is_help=True)


@app.command()
@resumable_command
def build(
    recipe: RecipePath, overrides: Overrides = None, ray: Ray = None, verify: VerifyOutput = False, json: Json = False
) -> Result:
    """Tokenize documents into a Megatron-compatible store.

    Example: z2a tokens build my.yaml
    """
    from zero2all.base.units import show_count
    from zero2all.recipe import load_recipe
    from zero2all.tokens import build_tokens

    loaded = load_recipe(recipe, overrides)
    where = task_engine(1, ray)  # a single process already uses all cores

    def before_replace() -> None:
        from zero2all.train.data_in_use import commands_beside, refuse_store_change

        remedy = commands_beside("tokens", loaded, recipe, overrides or [])
        refuse_store_change(loaded.tokens_dir, loaded.out, remedy)

    built = build_tokens(
        loaded.tokens,
        loaded.documents_dir,
        loaded.tokenizer_dir,
        loaded.tokens_dir,
        where,
        before_replace,
        verify=verify,
    )
    text = f"{show_count(built.tokens)} tokens in {loaded.tokens_dir}"
    return Result(
        {"out": str(loaded.tokens_dir), "kind": "tokens", **asdict(built)},
        text + (" (unchanged)" if built.reused else ""),
    )


@app.command()
@command
def inspect(
    recipe: RecipePath,
    overrides: Overrides = None,
    count: Annotated[int, typer.Option("--count", min=1, help="Number of conversations.")] = 3,
    json: Json = False,
) -> Result:
    """Show in colour which tokens of conversations are learned.

    The tokens must have been built. Without a terminal, what is learned is between ⟦ and ⟧.

    Example: z2a tokens inspect sft.yaml --count 5
    """
    from zero2all.recipe import load_recipe
    from zero2all.tokenizer import Tokenizer
    from zero2all.tokens import TokenStore
    from zero2all.tokens.inspect import inspect_conversations, render_conversations
    from zero2all.train.plan import Plan

    loaded = load_recipe(recipe, overrides)
    if loaded.train.objective.name == "pretrain":
        raise UsageError("train.objective.name is pretrain, which learns every token: set it to sft")
    store = TokenStore(loaded.tokens_dir, "train")
    store.require_kinds(loaded.train.objective, loaded.train.mixture_names)
    dataset = Plan(loaded, store).stages[0].dataset
    found = inspect_conversations(dataset, Tokenizer(loaded.tokenizer_dir), count)
    return Result({"conversations": found}, render_conversations(found, colour=sys.stdout.isatty()))
