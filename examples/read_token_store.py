"""Read a token store: its documents and tokens, and the batch of any training step with the documents in it.

    python examples/read_token_store.py --out runs/examples/tokens --step 3

The sample order depends only on seed, mixture and token store, so the batch of any step is known without training. For
a run, with its stages and batch ramp, use ``zero2all.train.trace_step`` or ``z2a blame --no-loss``.
"""

from __future__ import annotations

from tiny_run import argument_parser, prepare
from zero2all.recipe import Recipe, load_recipe
from zero2all.tokenizer import Tokenizer
from zero2all.tokens import PackedDataset, TokenStore, verify_store


def show_store(store: TokenStore, tokenizer: Tokenizer) -> None:
    """Sources with their documents and tokens, and the text of the first document."""
    for name, shards in store.sources.items():
        documents = sum(len(shard.document_offsets) - 1 for shard in shards)
        print(f"source {name}: {documents} documents, {sum(store.shard_tokens[name])} tokens, {len(shards)} shard(s)")
    shard = next(iter(store.sources.values()))[0]
    start, stop = shard.document_offsets[:2]
    ids = shard.read(start, stop)
    assert ids[-1] == tokenizer.eos_token_id  # a document ends with <|endoftext|>
    info = shard.document_info(0)
    print(f"first document: {info.title!r} ({info.gid}), {len(ids)} tokens")
    print(f"  {tokenizer.decode(ids[:-1])}")


def show_step(recipe: Recipe, store: TokenStore, tokenizer: Tokenizer, step: int) -> None:
    """The batch of a step (counted from 0), and the documents that its tokens come from."""
    options = recipe.train
    dataset = PackedDataset(store, options.seq_len, recipe.seed, mixture=options.mixture)
    batch_size = options.batch_samples
    start, stop = step * batch_size, (step + 1) * batch_size
    samples = dataset.read(start, stop)
    tokens, sources = samples.tokens, samples.sources  # inputs are tokens[:, :-1], targets are tokens[:, 1:]
    print(
        f"step {step}: samples {start} to {stop - 1} of {dataset.samples_per_epoch} in an epoch, tokens {tokens.shape}"
    )
    offset = 0
    for span in dataset.documents(start, stop):
        sample = span.sample - start
        text = tokenizer.decode(tokens[sample, offset : offset + span.tokens])
        print(
            f"  sample {span.sample} {sources[sample]} {span.gid} {span.title!r}: {span.tokens} tokens, {text[:40]!r}"
        )
        offset = (offset + span.tokens) % tokens.shape[1]  # 0 where the next sample begins


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--step", type=int, default=0, help="the training step, counted from 0")
    arguments = parser.parse_args()
    recipe = load_recipe(prepare(arguments.out))
    store, tokenizer = TokenStore(recipe.tokens_dir, "train"), Tokenizer(recipe.tokenizer_dir)
    verify_store(store)
    show_store(store, tokenizer)
    show_step(recipe, store, tokenizer, arguments.step)


if __name__ == "__main__":
    main()
