"""The place in the documentation for the messages that users meet most.

A code is chosen by hand and never changes: it is the heading of the message in docs/reference/errors.md. The pattern
finds the message, so that no error has to carry a code. tests/cli/test_error_pages.py compares the patterns with the
messages in the source.
"""

from __future__ import annotations

import re
from typing import NamedTuple

REFERENCE = "docs/reference/errors.md"


class ErrorPage(NamedTuple):
    pattern: str
    """A regular expression that is searched for in the message."""
    page: str
    """The page below docs/ that says what to do, without its ending."""


_MEMORY = "how-to/troubleshooting/memory"
_LOSS = "how-to/troubleshooting/loss"
_HANG = "how-to/troubleshooting/hang"
_NETWORK = "how-to/troubleshooting/network"
_DISK = "how-to/troubleshooting/disk-and-checkpoints"
_DATA = "how-to/troubleshooting/data-and-tokenizer"
_PLATFORM = "how-to/troubleshooting/platform"
_FETCH = "how-to/data/fetch"
_RECIPE = "reference/recipe"
_RESUME = "how-to/train/resume"
_SECURITY = "how-to/survive/job-security"
_EXPORT = "how-to/use/export"

ERROR_PAGES = {
    "bad-yaml": ErrorPage(r"is not plain YAML", _RECIPE),
    "certificate": ErrorPage(r"the certificate of .* is not trusted", _FETCH),
    "chat-template": ErrorPage(r"holds conversations, but the tokenizer|has no chat template", "how-to/post-train/sft"),
    "checkpoint-damaged": ErrorPage(r"use another checkpoint \('z2a ckpt ls'|choose another step: 'z2a ckpt", _DISK),
    "checkpoint-not-written": ErrorPage(r"the last checkpoint could not be written", _DISK),
    "checkpoint-unreadable": ErrorPage(r"^checkpoint .* cannot be read", _DISK),
    "damaged-output": ErrorPage(r"is damaged; remove it and run '", _DATA),
    "damaged-tokens": ErrorPage(r"run 'z2a tokens build RECIPE --verify'", _DATA),
    "different-recipe": ErrorPage(r"Set the recipe as it was, train a", _RESUME),
    "directory-in-use": ErrorPage(r"^another .* works in ", _DISK),
    "directory-not-empty": ErrorPage(r"contains something else, not ", _DISK),
    "disk-full": ErrorPage(r"free some there or choose another place", _DISK),
    "download-changed": ErrorPage(r"has changed on the server", _FETCH),
    "download-incomplete": ErrorPage(r"What has arrived is kept: run the same command again", _FETCH),
    "download-size": ErrorPage(r"raise --max-size", _FETCH),
    "export-differs": ErrorPage(r"^nothing was written: ", _EXPORT),
    "float8": ErrorPage(r"^train\.float8", "how-to/train/precision-and-speed"),
    "islands": ErrorPage(r"no rendezvous of the islands", "how-to/scale/diloco"),
    "job-secret-missing": ErrorPage(r"^no job secret in |the ranks of a job need it", _SECURITY),
    "job-secret-wrong": ErrorPage(r"wrong job secret", _SECURITY),
    "kernel-unavailable": ErrorPage(r"^model\.ops\..* cannot be used", "how-to/model/configure"),
    "layout-and-ranks": ErrorPage(r"^parallel: .* ranks, but there are", "how-to/scale/parallelism"),
    "linux-only": ErrorPage(r"runs on Linux only", _PLATFORM),
    "loopback-address": ErrorPage(r"resolves to .* where no other node can reach it", _NETWORK),
    "max-epochs": ErrorPage(r"max_epochs=.* allows no more than", "how-to/train/run"),
    "micro-batch-too-large": ErrorPage(r"^a micro-batch of .* does not fit into memory", _MEMORY),
    "missing-extra": ErrorPage(r"^this needs .*: pip install", "start/install"),
    "missing-stage": ErrorPage(r"^no .* in .*: make (?:them|one) with ", _DATA),
    "nan-logits": ErrorPage(r"the model's logits are NaN", _LOSS),
    "nan-loss": ErrorPage(r"^step .*: loss .*, gradient norm ", _LOSS),
    "no-benchmark-files": ErrorPage(r"has no files of ", "how-to/evaluate/benchmarks"),
    "no-checkpoint": ErrorPage(r"no (?:valid )?checkpoint\S* .*; steps there|has no checkpoint yet", _DISK),
    "no-gpu": ErrorPage(r"but torch sees no GPU", _PLATFORM),
    "no-layout-fits": ErrorPage(r"^no layout fits", "how-to/scale/fit-memory"),
    "no-model": ErrorPage(r"^no Hugging Face model in ", "how-to/train/continue-pretraining"),
    "no-recipe": ErrorPage(r"^no recipe at |is no recipe and no preset", _RECIPE),
    "no-run": ErrorPage(r"^no run in ", "how-to/train/several-runs"),
    "no-sandbox": ErrorPage(r"^code of a model runs only in a sandbox", "how-to/evaluate/code"),
    "no-standard-architecture": ErrorPage(r"^no standard architecture computes what this model does", _EXPORT),
    "no-text": ErrorPage(r"^the recipe names no text|^no document is left of ", _DATA),
    "not-an-override": ErrorPage(r"is not an override: write section\.key=value", _RECIPE),
    "not-in-gguf": ErrorPage(r"^llama\.cpp (?:does not compute|has no tensor)", "how-to/use/gguf"),
    "nothing-selected": ErrorPage(r"no file is selected by --include and --exclude", _FETCH),
    "other-tokenizer": ErrorPage(r"was made with another tokenizer", _DATA),
    "other-version-answers": ErrorPage(r"something else than a rendezvous of this version", _NETWORK),
    "out-of-memory": ErrorPage(r"^out of memory: ", _MEMORY),
    "outlier-steps": ErrorPage(r" outlier steps in a row", "how-to/survive/spike"),
    "past-the-end": ErrorPage(r"^the run in .* is at step .* already", _RESUME),
    "peer-lost": ErrorPage(r"a peer was lost|^lost the connection to another rank", _HANG),
    "pickle-weights": ErrorPage(r"has its weights only as a pickle file", "how-to/train/continue-pretraining"),
    "plugin-not-loaded": ErrorPage(r" cannot be loaded \(", "how-to/extend/plugins"),
    "port-in-use": ErrorPage(r"cannot be bound|cannot listen on", _NETWORK),
    "readable-secret": ErrorPage(r"can be read by every user of this machine", _SECURITY),
    "recipe-mistakes": ErrorPage(r"\A.*: (?:1 mistake|\d+ mistakes)\n", _RECIPE),
    "rendezvous-missing": ErrorPage(r" nodes need a rendezvous", "how-to/scale/multi-node"),
    "rendezvous-unreachable": ErrorPage(r"^no route to ", _NETWORK),
    "repository-not-found": ErrorPage(r"has no such repository and revision", _FETCH),
    "schedule-changed": ErrorPage(r"Choose how it continues|add --extend as-planned|so its schedule cannot", _RESUME),
    "sequence-too-long": ErrorPage(r"^no source has a full sequence|validation split has no full sequence", _DATA),
    "server-silent": ErrorPage(r" times in a row$|the server asks to wait", _FETCH),
    "source-kind": ErrorPage(r" trains on sources of kind ", "how-to/data/conversations"),
    "source-not-found": ErrorPage(r"^corpus source .*: (?:nothing at|no files in|empty path)", _DATA),
    "ssh": ErrorPage(r"ssh cannot be started|is not ssh://", "how-to/watch/ssh"),
    "store-access": ErrorPage(
        r"^the store refuses access|^no keys for|^no store answers", "how-to/data/object-storage"
    ),
    "tokenizer-in-use": ErrorPage(r"is the tokenizer of .* and is not replaced", _DATA),
    "unfinished-stage": ErrorPage(r" are not finished: run '", _DATA),
    "vocabulary-size": ErrorPage(r"^model\.vocab_size is .*, but the tokenizer has", _DATA),
    "weights-do-not-match": ErrorPage(r"^train\.init: ", "how-to/train/continue-pretraining"),
    "worker-killed": ErrorPage(r"^a worker process was killed again and again", _MEMORY),
}


def help_anchor(message: str) -> str | None:
    """Where the documentation explains a message, such as ``docs/reference/errors.md#disk-full``."""
    found = next((code for code, one in ERROR_PAGES.items() if re.search(one.pattern, message)), None)
    return found and f"{REFERENCE}#{found}"
