"""The pictures of docs/explain: each is computed by the code that its page explains, in both languages."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from picture_maker.explain_svg import AXIS, GRID, Canvas, Words, themed
from zero2all.base.charts.plot import Axis, Curve, Plot, colour, tint
from zero2all.base.charts.svg import Bar, bar_svg, line_svg
from zero2all.base.machine.gpu_specs import find_gpu
from zero2all.base.units import show_bytes, show_seconds
from zero2all.bench.parity_cases import GRADIENT_TOLERANCE
from zero2all.checkpoint.checkpoint_interval import DAY, FAILURE_RATES, FailureModel
from zero2all.model.cost.flops import flops_per_token, palm_flops_per_token
from zero2all.model.cost.model_size import count_parameters
from zero2all.model.ops.attention import document_starts
from zero2all.planner.cluster import PCIE_BANDWIDTH, Cluster
from zero2all.planner.pipeline import LENGTH, simulate
from zero2all.planner.plan import ZeroPaper, plan_run
from zero2all.planner.plan_svg import FILLS
from zero2all.recipe import ModelConfig, ParallelRecipe, load_recipe_or_preset
from zero2all.tokens.sample_order import SampleOrder

SOURCE = {"zh": 0, "en": 1, "code": 2}
Picture = Callable[[Words], str]


def bits_per_byte(w: Words) -> str:
    """New stories in tokens of three sizes, by a model that knows frequencies only."""
    from picture_maker.explain_runs import unigram_by_unit

    names = {"bytes": w("bytes"), "characters": w("characters"), "words": w("words")}
    bars = []
    for language, name in (("en", w("English")), ("zh", w("Chinese"))):
        for unit, size, nats, bits in unigram_by_unit(language):
            label = w("{language}, {n} {unit}", language=name, n=f"{size:,}", unit=names[unit])
            bars.append(Bar(label, nats, w("{n:.2f} nats per token", n=nats)))
            bars.append(Bar(label, bits, w("{n:.2f} bits per byte", n=bits), 1))
    title = w("The same stories in small and large tokens, by a unigram model")
    return themed(bar_svg(title, bars, (w("loss per token"), "bits-per-byte")))


def packing(w: Words) -> str:
    lengths, names = (7, 10, 7), ("A", "B", "C")
    first = torch.zeros(1, sum(lengths), dtype=torch.bool)
    first[0, [0, 7, 17]] = True
    starts, document = document_starts(first)[0].tolist(), first[0].cumsum(0).tolist()
    canvas, cell = Canvas(720, 446, w("One sequence of 24 tokens holds three documents")), 13
    for place, number in enumerate(document):
        canvas.box(40 + 26.6 * place, 46, 25, 24, colour(number - 1))
        canvas.text(52.5 + 26.6 * place, 63, names[number - 1], "middle", fill="#fff")
    for side, title in enumerate((w("causal mask (default)"), "train.document_mask: true")):
        left = 40 + 345 * side
        canvas.text(left, 98, title, bold=True)
        canvas.box(left, 106, cell * len(starts), cell * len(starts), line=GRID)
        for row, start in enumerate(starts):
            for column in range(start if side else 0, row + 1):
                fill = colour(document[row] - 1) if document[row] == document[column] else AXIS
                canvas.box(left + cell * column, 106 + cell * row, cell - 1, cell - 1, fill)
    note = w("row: the token that reads; column: the token that is read; grey: a different document")
    canvas.text(40, 436, note, size=12)
    return canvas.svg()


def sample_order(w: Words) -> str:
    weights = {"zh": 5.0, "en": 3.0, "code": 1.0}
    order = SampleOrder({"zh": 4000, "en": 3000, "code": 1000}, weights, seed=7)
    batch, steps = 8, 12
    sources, sequences = order.locate(0, batch * steps)
    canvas = Canvas(760, 400, w("Samples of 12 steps: the same table, cut for 1, 2 and 4 ranks"))
    for panel, ranks in enumerate((1, 2, 4)):
        left = 30 + 244 * panel
        canvas.text(left, 62, w("ranks: {n}", n=ranks), bold=True)
        for step in range(steps):
            for place in range(batch):
                at, rank = step * batch + place, place * ranks // batch
                x, y = left + 25 * place + 6 * rank, 74 + 22 * step
                name = order.names[sources[at]]
                canvas.box(x, y, 23, 19, colour(SOURCE[name]), title=f"{name} {sequences[at]}")
                canvas.text(x + 11.5, y + 14, str(sequences[at]), "middle", 9, fill="#fff")
        for step in (0, steps - 1) if not panel else ():
            canvas.text(left - 8, 88 + 22 * step, str(step), "end", 11)
    canvas.legend(30, 366, [(name, colour(number)) for name, number in SOURCE.items()])
    canvas.text(30, 388, w("Number: the sequence in its source. Rows are steps. Seed 7, weights 5 : 3 : 1."), size=12)
    return canvas.svg()


def zero(w: Words) -> str:
    """What four ranks hold: weights, gradients and optimizer state at 2, 2 and 12 bytes per parameter."""
    parts = ((w("weights"), 2, 0), (w("gradients"), 2, 1), (w("optimizer state"), 12, 2))
    canvas = Canvas(760, 376, w("7.5B parameters: what each of 4 ranks holds, and GB per rank on 64"))
    stages = ZeroPaper.of(7_500_000_000, ranks=64).stages
    names = (w("DDP (stage 0)"), "ZeRO-1", "ZeRO-2", "ZeRO-3 / FSDP")
    for stage, name in enumerate(names):
        left = 30 + 182 * stage
        canvas.text(left, 62, name, bold=True)
        canvas.text(left, 82, f"{stages[stage] / 1e9:.1f} GB")
        for rank in range(4):
            x, y = left + 41 * rank, 92.0
            for number, (label, size, paint) in enumerate(parts):
                height = 14 * size
                canvas.box(x, y, 35, height, line=GRID)
                shard = number >= 3 - stage
                top, tall = (y + height * rank / 4, height / 4) if shard else (y, float(height))
                canvas.box(x, top, 35, tall, colour(paint), title=f"rank {rank}: {label}")
                y += height + 4
            canvas.text(x + 17, y + 12, str(rank), "middle", 11)
    canvas.legend(30, 364, [(label, colour(paint)) for label, _, paint in parts])
    return canvas.svg()


def pipelines(w: Words) -> str:
    rows = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")
    canvas = Canvas(760, 60 + 104 * len(rows), w("One step of 8 micro-batches on 4 pipeline ranks"))
    lines = [simulate(ParallelRecipe.model_validate({"pp": 4, "schedule": name}), 8) for name in rows]
    for number, (name, line) in enumerate(zip(rows, lines, strict=True)):
        top = 60 + 104 * number
        scale = 18 / (max(one.done.stage for one in line.passes) // 4 + 1)
        canvas.text(20, top, name, bold=True)
        canvas.text(20, top + 20, w("bubble {share:.1%}", share=line.bubble), size=12)
        for one in line.passes:
            title = f"{one.done.action}, stage {one.done.stage}, micro-batch {one.done.micro_batch}"
            fill = tint(0, 0.6) if one.done.action == "forward" and one.done.stage >= 4 else FILLS[one.done.action]
            canvas.box(130 + scale * one.start, top - 12 + 20 * one.rank, scale * LENGTH[one.done.action] - 1, 18, fill,
                       title=title)  # fmt: skip
    canvas.legend(130, 50 + 104 * len(rows), [
        (w("forward"), FILLS["forward"]), (w("forward, second stage"), tint(0, 0.6)),
        (w("backward"), FILLS["backward"]), (w("weight gradient"), FILLS["weight gradient"]),
    ])  # fmt: skip
    return canvas.svg()


def mfu(w: Words) -> str:
    config = ModelConfig(preset="z2all-1.1b")
    flops, counts = flops_per_token(config, 2048), count_parameters(config)
    peak, rate = find_gpu("a800").flops, 65_536 / 3.23
    rows = (
        (w("causal"), flops.causal, w("without pairs that the mask excludes"), 8),
        (w("zero2all: MFU"), flops.model, w("matrix products of the model"), 0),
        (w("hardware: HFU"), flops.hardware("none"), w("scores recomputed by fused attention"), 2),
        (w("PaLM: MFU"), palm_flops_per_token(config, counts.active, 2048), w("and the embedding"), 1),
        (w("HFU, recomputing"), flops.hardware("full"), w("every block twice"), 2),
    )  # fmt: skip
    bars = [
        Bar(name, count, f"{count / 1e9:.2f} GFLOP = {count * rate / peak:.1%} ({note})", colour=paint)
        for name, count, note, paint in rows
    ]
    title = w("One step, five utilizations: z2all-1.1b, 65,536 tokens in 3.23 s on an A800")
    return themed(bar_svg(title, bars))


def checkpoint_interval(w: Words) -> str:
    rate = FAILURE_RATES["0.27% a card and day"]
    curves = []
    for number, (gpus, stall, recovery) in enumerate(((1024, 1, 60), (16384, 1, 60), (16384, 30, 60), (16384, 1, 600))):
        model = FailureModel(DAY / rate / gpus, stall, recovery)
        best = model.young_interval
        places = [best * 10 ** (step / 20) for step in range(-30, 31)]
        line = [(at, 100 * model.goodput(at)) for at in places if 5 <= at <= 4000 and model.goodput(at) > 0.5]
        label = w("{n:,} GPUs, stall {stall} s, recovery {recovery} s; best {best}", n=gpus, stall=stall,
                  recovery=recovery, best=show_seconds(best))  # fmt: skip
        curves.append(Curve(label, line, [(best, 100 * model.goodput(best))], number))
    title = w("Goodput by checkpoint interval; the dot is Young's interval")
    plot = Plot(title, w("seconds between checkpoints"), "goodput (%)", curves, log_x=True)
    return themed(line_svg(plot)).replace("(log scale)", w("(log scale)"))


def parity(w: Words) -> str:
    """Gradient of one layer by one process, against ranks that add up, and ranks that average their means."""
    torch.manual_seed(0)
    inputs, targets, weight = torch.randn(4096, 64), torch.randn(4096, 8), torch.randn(64, 8) / 8
    valid = (torch.arange(4096) % 64 < torch.arange(4096) // 128 + 16).float()  # documents end at different places

    def gradient(rows: slice, divisor: float) -> torch.Tensor:
        error = (inputs[rows] @ weight - targets[rows]) * valid[rows, None]
        return inputs[rows].T @ error / divisor

    whole = gradient(slice(None), float(valid.sum()))
    bars = []
    for ranks in (2, 4, 8):
        rows = [slice(rank * 4096 // ranks, (rank + 1) * 4096 // ranks) for rank in range(ranks)]
        added = sum((gradient(one, float(valid.sum())) for one in rows), torch.zeros_like(whole))
        means = sum((gradient(one, float(valid[one].sum())) / ranks for one in rows), torch.zeros_like(whole))
        for name, found, paint in ((w("summed, divided once"), added, 2), (w("mean of means"), means, 3)):
            share = float((found - whole).norm() / whole.norm())
            label = w("{n} ranks, {way}", n=ranks, way=name)
            bars.append(Bar(label, math.log10(share) + 8, f"{share:.1e}", colour=paint))
    title = w("Difference of a gradient from one process (log scale; dashed: tolerance 1e-5)")
    return themed(bar_svg(title, bars, limit=math.log10(GRADIENT_TOLERANCE) + 8))


def threat_model(w: Words) -> str:
    rows = (
        (w("raw text, archives, PDF"), w("limits; parsers in a child process"), w("your files")),
        (w("text with <|im_end|>"), w("encoded as plain text"), w("chat roles")),
        (w("a checkpoint"), w("checksums; pickle allow-list"), w("your account")),
        (w("a model or chat template"), w("safetensors only; sandboxed Jinja"), w("your account")),
        (w("code that a model writes"), w("sandbox: no network, no files"), w("the machine")),
        (w("a node that wants to join"), w("HMAC with the job secret"), w("the job")),
        (w("a web page on your laptop"), w("127.0.0.1, host check, key"), w("runs and model")),
        (w("other ranks' traffic"), w("none: private network"), w("weights")),
    )  # fmt: skip
    canvas = Canvas(760, 90 + 40 * len(rows), w("What comes in, what stops it, what it would reach"))
    for number, (source, guard, reached) in enumerate(rows):
        y, is_open = 50 + 40 * number, number == len(rows) - 1
        for x, width, words, paint in ((20, 215, source, 1), (275, 255, guard, 2 + is_open), (570, 170, reached, 0)):
            canvas.box(x, y, width, 30, line=colour(paint), radius=5)
            canvas.text(x + width / 2, y + 20, words, "middle")
        canvas.arrow(235, y + 15, 275)
        canvas.path([(530, y + 15), (570, y + 15)], AXIS, dash="" if is_open else "3")
    canvas.legend(20, 76 + 40 * len(rows), [
        (w("untrusted"), colour(1)), (w("guard"), colour(2)), (w("no guard"), colour(3)),
        (w("worth protecting"), colour(0)),
    ])  # fmt: skip
    return canvas.svg()


def story_world(w: Words) -> str:
    from picture_maker.explain_runs import story_bits

    bars = []
    for language, label, unigram, model in (("en", w("English"), 2.069, 0.143), ("zh", w("Chinese"), 1.458, 0.139)):
        bits, size = story_bits(language)
        bars.append(Bar(label, unigram, w("{n:.3f} unigram model", n=unigram), 1))
        bars.append(Bar(label, model, w("{n:.3f} the quickstart's model", n=model), 0))
        text = "{n:.3f} choices of the grammar: {bits:.0f} bits in {size:.0f} bytes"
        choices = w(text, n=bits / size, bits=bits, size=size)
        bars.append(Bar(label, bits / size, choices, 2))
    title = w("Bits per byte of a story: what the model needs, and what the grammar decided")
    return themed(bar_svg(title, bars))


def gpu_links(w: Words) -> str:
    bars = []
    for name in ("h100", "a100-80g", "l40s"):
        gpu = find_gpu(name)
        links = ((w("its own memory"), gpu.memory_bandwidth, 2), (gpu.link, gpu.link_bandwidth, 0),
                 (w("network card"), gpu.network_bandwidth, 1))  # fmt: skip
        for link, speed, paint in links:
            bars.append(Bar(gpu.name, math.log10(speed) - 8, _rate(w, speed), paint, link))
    bars.append(Bar(w("any"), math.log10(PCIE_BANDWIDTH) - 8, _rate(w, PCIE_BANDWIDTH), 3))
    title = w("One direction, from data sheets (log scale)")
    series = (w("GPU to GPU in a node"), w("GPU to another node"), w("GPU to its memory"), w("GPU to the host"))
    return themed(bar_svg(title, bars, series))


def _rate(w: Words, speed: float) -> str:
    return w("{rate}/s: 1 GB in {ms} ms", rate=show_bytes(speed), ms=f"{1e12 / speed:.3g}")


def fused_kernels(w: Words) -> str:
    """Published for the reference shape on one A800, torch 1.12.1."""
    rows = (("naive", 9.85, 71.32), ("all fused", 3.23, 27.87), ("no flash-attn", 8.69, 65.43),
            ("no rotary_emb", 3.51, 27.90), ("no xentropy", 3.37, 29.83), ("no apex RMSNorm", 3.78, 30.68),
            ("no xformers SwiGLU", 3.60, 29.79))  # fmt: skip
    bars = []
    for name, seconds, memory in rows:
        bars.append(Bar(w(name), seconds, f"{seconds:.2f} s"))
        bars.append(Bar(w(name), memory / 10, f"{memory:.1f} GB", 1))
    title = w("65,536 tokens of a 1.1B model on one A800 in 2023 (published, not ours)")
    return themed(bar_svg(title, bars, (w("seconds per step"), w("memory, GB / 10"))))


def three_walls(w: Words) -> str:
    parameters, tokens, replicas, gpu = 175e9, 300e9, 128, find_gpu("h100")
    work, weights = 6 * parameters * tokens, 4 * parameters
    years = w("{n} years at full speed", n=f"{work / gpu.flops / DAY / 365:.1f}")
    cards = w("{n} cards for the weights alone", n=f"{weights / 80e9:.1f}")
    minutes = w("{n} minutes for each step", n=f"{replicas * weights / gpu.network_bandwidth / 60:.0f}")
    one = w("one H100")
    rows = (
        (w("compute"), work / gpu.flops, f"{work / 1e21:.0f} ZFLOP", f"{one}: {gpu.flops / 1e12:.0f} TFLOP/s", years),
        (w("memory"), weights / 80e9, show_bytes(weights), f"{one}: 80 GB", cards),
        (w("communication"), replicas * weights / gpu.network_bandwidth, f"{replicas * weights / 1e12:.1f} TB",
         w("one network card") + f": {show_bytes(gpu.network_bandwidth)}/s", minutes),
    )  # fmt: skip
    canvas = Canvas(760, 286, w("GPT-3 (175B parameters, 300B tokens): need against one card, log scale"))
    axis = Axis(1, 1e10, log=True)
    for number, (name, ratio, needed, has, meaning) in enumerate(rows):
        y = 58 + 78 * number
        canvas.text(20, y + 22, name, bold=True)
        canvas.box(150, y, 560 * axis.share(ratio), 18, colour(3))
        canvas.box(150, y + 22, 4, 18, colour(0))
        canvas.text(158 + 560 * axis.share(ratio), y + 14, needed)
        canvas.text(162, y + 36, f"{has}, {meaning}")
    return canvas.svg()


def loss_normal(w: Words) -> str:
    from picture_maker.explain_runs import loss_records

    canvas = Canvas(980, 712, w("Six runs of the same small model; planted at step 80 (dashed)"))
    names = {"good": w("good"), "lr": w("learning rate × 30"), "shuffled": w("shuffled targets"),
             "garbage": w("garbage for 3 steps"), "repeated": w("repeated batch"),
             "dead": w("a source without data")}  # fmt: skip
    for number, (name, curves, finding) in enumerate(loss_records(w.language)):
        x, y = 20 + 320 * (number % 3), 60 + 312 * (number // 3)
        canvas.text(x + 34, y, names[name], bold=True)
        canvas.panel(Plot("", "", "", curves), x, y + 10, 290, 200, 80 if name != "good" else None)
        for row, part in enumerate(finding):
            canvas.text(
                x + 4, y + 234 + 17 * row, part, size=12, fill=colour(3) if name not in ("good", "garbage") else ""
            )
    canvas.legend(54, 700, [("loss", colour(8)), ("en", colour(0)), ("zh", colour(1))])
    return canvas.svg()


def memory_anatomy(w: Words) -> str:
    """Llama 2 7B on eight A100, as planned."""
    bars = []
    series = ("shard: weights, gradients, optimizer", "gathered weights, gradients on their way",
              "activations and logits", "CUDA, NCCL, margin")  # fmt: skip
    for recompute in ("none", "selective", "full"):
        batch = ["train.batch_tokens=1048576", "train.micro_batch_tokens=8192"]
        recipe = load_recipe_or_preset("7b", [*batch, f"parallel.activation_checkpointing={recompute}"])
        parts = plan_run(recipe, Cluster.of(find_gpu("a100-80g"), 8)).memory.parts
        groups = [0, 0, 0, 0]
        for part in parts:
            group = (0 if part.name.startswith(("weights (stored)", "gradients", "optimizer")) else
                     1 if part.name.startswith(("weights in", "unsharded")) else
                     3 if part.name.startswith(("CUDA", "communic", "fragment")) else 2)  # fmt: skip
            groups[group] += part.bytes
        for number, size in enumerate(groups):
            bars.append(Bar(w("recomputing: {how}", how=recompute), size, show_bytes(size), number))
    title = w("7B on 8 × A100 80 GB with FSDP: memory of a rank, planned")
    return themed(bar_svg(title, bars, [w(name) for name in series]))


def torchrun(w: Words) -> str:
    rate, curves = FAILURE_RATES["0.27% a card and day"], []
    counts = [int(256 * 2 ** (step / 4)) for step in range(25)]
    for number, (stall, recovery, name) in enumerate((
        (60, 900, w("waits for a person, checkpoints on disk")),
        (60, 300, w("restarts itself, checkpoints on disk")),
        (1, 60, w("restarts itself, checkpoints in memory")),
    )):  # fmt: skip
        models = [(gpus, FailureModel(DAY / rate / gpus, stall, recovery)) for gpus in counts]
        line = [(float(gpus), 100 * (1 - one.goodput(one.daly_interval))) for gpus, one in models]
        label = w("{way}: stall {stall} s, recovery {recovery} s", way=name, stall=stall, recovery=recovery)
        curves.append(Curve(label, [point for point in line if point[1] < 60], colour=number))
    title = w("Time lost to failures and checkpoints, at the best interval")
    plot = Plot(title, w("GPUs, 0.27% failures per card and day"), w("% of the time"), curves, log_x=True)
    return themed(line_svg(plot)).replace("(log scale)", w("(log scale)"))


DRAWN = (
    bits_per_byte, packing, sample_order, zero, pipelines, mfu, checkpoint_interval, parity, threat_model, story_world,
    gpu_links, fused_kernels, three_walls, loss_normal, memory_anatomy, torchrun,
)  # fmt: skip
PAGES: dict[str, Picture] = {draw.__name__.replace("_", "-"): draw for draw in DRAWN}


def explain_svg(name: str) -> str:
    """The picture ``zero.svg``, or ``zero.zh-CN.svg`` with Chinese texts."""
    page, _, rest = name.partition(".")
    return PAGES[page](Words("zh" if rest.startswith("zh-CN") else "en"))
