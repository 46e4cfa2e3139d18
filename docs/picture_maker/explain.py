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

    names = {"bytes": w("bytes", "字节"), "characters": w("characters", "字符"), "words": w("words", "词")}
    bars = []
    for language, name in (("en", w("English", "英文")), ("zh", w("Chinese", "中文"))):
        for unit, size, nats, bits in unigram_by_unit(language):
            label = w(f"{name}, {size:,} {names[unit]}", f"{name}，{size:,} 个{names[unit]}")
            bars.append(Bar(label, nats, w(f"{nats:.2f} nats per token", f"每 token {nats:.2f} nat")))
            bars.append(Bar(label, bits, w(f"{bits:.2f} bits per byte", f"每字节 {bits:.2f} bit"), 1))
    title = w("The same stories in small and large tokens, by a unigram model", "同样的故事，token 从小到大，unigram 模型")
    return themed(bar_svg(title, bars, (w("loss per token", "每 token 的 loss"), "bits-per-byte")))


def packing(w: Words) -> str:
    lengths, names = (7, 10, 7), ("A", "B", "C")
    first = torch.zeros(1, sum(lengths), dtype=torch.bool)
    first[0, [0, 7, 17]] = True
    starts, document = document_starts(first)[0].tolist(), first[0].cumsum(0).tolist()
    canvas, cell = Canvas(720, 446, w("One sequence of 24 tokens holds three documents", "一条 24 token 的序列里有三篇文档")), 13
    for place, number in enumerate(document):
        canvas.box(40 + 26.6 * place, 46, 25, 24, colour(number - 1))
        canvas.text(52.5 + 26.6 * place, 63, names[number - 1], "middle", fill="#fff")
    titles = (
        w("causal mask (default)", "因果掩码（默认）"),
        w("train.document_mask: true", "train.document_mask: true"),
    )
    for side, title in enumerate(titles):
        left = 40 + 345 * side
        canvas.text(left, 98, title, bold=True)
        canvas.box(left, 106, cell * len(starts), cell * len(starts), line=GRID)
        for row, start in enumerate(starts):
            for column in range(start if side else 0, row + 1):
                fill = colour(document[row] - 1) if document[row] == document[column] else AXIS
                canvas.box(left + cell * column, 106 + cell * row, cell - 1, cell - 1, fill)
    canvas.text(40, 436, w("row: the token that reads; column: the token that is read; grey: a different document",
                           "行：读取的 token；列：被读取的 token；灰色：来自别的文档"), size=12)  # fmt: skip
    return canvas.svg()


def sample_order(w: Words) -> str:
    weights = {"zh": 5.0, "en": 3.0, "code": 1.0}
    order = SampleOrder({"zh": 4000, "en": 3000, "code": 1000}, weights, seed=7)
    batch, steps = 8, 12
    sources, sequences = order.locate(0, batch * steps)
    canvas = Canvas(760, 400, w("Samples of 12 steps: the same table, cut for 1, 2 and 4 ranks",
                                "12 步的样本：同一张表，按 1、2、4 个 rank 切开"))  # fmt: skip
    for panel, ranks in enumerate((1, 2, 4)):
        left = 30 + 244 * panel
        canvas.text(left, 62, w(f"{ranks} rank" + "s" * (ranks > 1), f"{ranks} 个 rank"), bold=True)
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
    canvas.text(30, 388, w("Number: the sequence in its source. Rows are steps. Seed 7, weights 5 : 3 : 1.",
                           "格中数字：来源内的序列编号。每行是一步。种子 7，权重 5 : 3 : 1。"), size=12)  # fmt: skip
    return canvas.svg()


def zero(w: Words) -> str:
    """What four ranks hold: weights, gradients and optimizer state at 2, 2 and 12 bytes per parameter."""
    parts = ((w("weights", "权重"), 2, 0), (w("gradients", "梯度"), 2, 1), (w("optimizer state", "优化器状态"), 12, 2))
    canvas = Canvas(760, 376, w("7.5B parameters: what each of 4 ranks holds, and GB per rank on 64",
                                "75 亿参数：4 个 rank 各存什么，以及 64 个 rank 时每个 rank 的 GB 数"))  # fmt: skip
    stages = ZeroPaper.of(7_500_000_000, ranks=64).stages
    names = (w("DDP (stage 0)", "DDP（0 级）"), "ZeRO-1", "ZeRO-2", "ZeRO-3 / FSDP")
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
    canvas = Canvas(760, 60 + 104 * len(rows), w("One step of 8 micro-batches on 4 pipeline ranks",
                                                   "一步 8 个 micro-batch，4 个流水线 rank"))  # fmt: skip
    lines = [simulate(ParallelRecipe.model_validate({"pp": 4, "schedule": name}), 8) for name in rows]
    for number, (name, line) in enumerate(zip(rows, lines, strict=True)):
        top = 60 + 104 * number
        scale = 18 / (max(one.done.stage for one in line.passes) // 4 + 1)
        canvas.text(20, top, name, bold=True)
        canvas.text(20, top + 20, w(f"bubble {line.bubble:.1%}", f"气泡 {line.bubble:.1%}"), size=12)
        for one in line.passes:
            title = f"{one.done.action}, stage {one.done.stage}, micro-batch {one.done.micro_batch}"
            fill = tint(0, 0.6) if one.done.action == "forward" and one.done.stage >= 4 else FILLS[one.done.action]
            canvas.box(130 + scale * one.start, top - 12 + 20 * one.rank, scale * LENGTH[one.done.action] - 1, 18, fill,
                       title=title)  # fmt: skip
    canvas.legend(130, 50 + 104 * len(rows), [
        (w("forward", "前向"), FILLS["forward"]), (w("forward, second stage", "前向（第二个 stage）"), tint(0, 0.6)),
        (w("backward", "反向"), FILLS["backward"]), (w("weight gradient", "权重梯度"), FILLS["weight gradient"]),
    ])  # fmt: skip
    return canvas.svg()


def mfu(w: Words) -> str:
    config = ModelConfig(preset="z2all-1.1b")
    flops, counts = flops_per_token(config, 2048), count_parameters(config)
    peak, rate = find_gpu("a800").flops, 65_536 / 3.23
    rows = (
        (w("causal", "因果"), flops.causal, w("without pairs that the mask excludes", "不算被掩码排除的 token 对"), 8),
        (w("zero2all: MFU", "zero2all：MFU"), flops.model, w("matrix products of the model", "模型的矩阵乘法"), 0),
        (w("hardware: HFU", "硬件：HFU"), flops.hardware("none"), w("scores recomputed by fused attention", "融合注意力重算分数"), 2),
        (w("PaLM: MFU", "PaLM：MFU"), palm_flops_per_token(config, counts.active, 2048), w("and the embedding", "多算了词嵌入"), 1),
        (w("HFU, recomputing", "HFU（重算）"), flops.hardware("full"), w("every block twice", "每层前向两遍"), 2),
    )  # fmt: skip
    bars = [
        Bar(name, count, f"{count / 1e9:.2f} GFLOP = {count * rate / peak:.1%} ({note})", colour=paint)
        for name, count, note, paint in rows
    ]
    title = w("One step, five utilizations: z2all-1.1b, 65,536 tokens in 3.23 s on an A800",
              "同一步，五种利用率：z2all-1.1b，A800 上 3.23 s 处理 65,536 个 token")  # fmt: skip
    return themed(bar_svg(title, bars))


def checkpoint_interval(w: Words) -> str:
    rate = FAILURE_RATES["0.27% a card and day"]
    curves = []
    for number, (gpus, stall, recovery) in enumerate(((1024, 1, 60), (16384, 1, 60), (16384, 30, 60), (16384, 1, 600))):
        model = FailureModel(DAY / rate / gpus, stall, recovery)
        best = model.young_interval
        places = [best * 10 ** (step / 20) for step in range(-30, 31)]
        line = [(at, 100 * model.goodput(at)) for at in places if 5 <= at <= 4000 and model.goodput(at) > 0.5]
        label = w(f"{gpus:,} GPUs, stall {stall} s, recovery {recovery} s; best {show_seconds(best)}",
                  f"{gpus:,} 张 GPU，停顿 {stall} s，恢复 {recovery} s；最优 {show_seconds(best)}")  # fmt: skip
        curves.append(Curve(label, line, [(best, 100 * model.goodput(best))], number))
    title = w("Goodput by checkpoint interval; the dot is Young's interval", "不同 checkpoint 间隔的 goodput；圆点是 Young 间隔")
    plot = Plot(title, w("seconds between checkpoints", "checkpoint 间隔（秒）"), "goodput (%)", curves, log_x=True)
    return themed(line_svg(plot)).replace("(log scale)", w("(log scale)", "（对数坐标）"))


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
        for name, found, paint in ((w("summed, divided once", "求和，只除一次"), added, 2), (w("mean of means", "均值的均值"), means, 3)):
            share = float((found - whole).norm() / whole.norm())
            label = w(f"{ranks} ranks, {name}", f"{ranks} 个 rank，{name}")
            bars.append(Bar(label, math.log10(share) + 8, f"{share:.1e}", colour=paint))
    title = w("Difference of a gradient from one process (log scale; dashed: tolerance 1e-5)",
              "梯度与单进程的差（对数坐标；虚线：容差 1e-5）")  # fmt: skip
    return themed(bar_svg(title, bars, limit=math.log10(GRADIENT_TOLERANCE) + 8))


def threat_model(w: Words) -> str:
    rows = (
        (w("raw text, archives, PDF", "原始文本、压缩包、PDF"), w("limits; parsers in a child process", "限额；解析器在子进程中"), w("your files", "你的文件")),
        (w("text with <|im_end|>", "含 <|im_end|> 的文本"), w("encoded as plain text", "按普通文本编码"), w("chat roles", "对话角色")),
        (w("a checkpoint", "checkpoint"), w("checksums; pickle allow-list", "校验和；pickle 白名单"), w("your account", "你的账户")),
        (w("a model or chat template", "模型、对话模板"), w("safetensors only; sandboxed Jinja", "只读 safetensors；Jinja 沙箱"), w("your account", "你的账户")),
        (w("code that a model writes", "模型写的代码"), w("sandbox: no network, no files", "沙箱：无网络、无文件"), w("the machine", "整台机器")),
        (w("a node that wants to join", "想加入的节点"), w("HMAC with the job secret", "用作业密钥做 HMAC"), w("the job", "作业")),
        (w("a web page on your laptop", "你浏览器里的网页"), w("127.0.0.1, host check, key", "127.0.0.1、检查 Host、密钥"), w("runs and model", "运行与模型")),
        (w("other ranks' traffic", "rank 之间的流量"), w("none: private network", "没有：用专用网络"), w("weights", "权重")),
    )  # fmt: skip
    canvas = Canvas(760, 90 + 40 * len(rows), w("What comes in, what stops it, what it would reach", "什么进来、被什么拦住、本来能碰到什么"))
    for number, (source, guard, reached) in enumerate(rows):
        y, is_open = 50 + 40 * number, number == len(rows) - 1
        for x, width, words, paint in ((20, 215, source, 1), (275, 255, guard, 3 if is_open else 2), (570, 170, reached, 0)):
            canvas.box(x, y, width, 30, line=colour(paint), radius=5)
            canvas.text(x + width / 2, y + 20, words, "middle")
        canvas.arrow(235, y + 15, 275)
        canvas.path([(530, y + 15), (570, y + 15)], AXIS, dash="" if is_open else "3")
    canvas.legend(20, 76 + 40 * len(rows), [
        (w("untrusted", "不可信"), colour(1)), (w("guard", "防护"), colour(2)), (w("no guard", "无防护"), colour(3)),
        (w("worth protecting", "要保护的"), colour(0)),
    ])  # fmt: skip
    return canvas.svg()


def story_world(w: Words) -> str:
    from picture_maker.explain_runs import story_bits

    bars = []
    for language, label, unigram, model in (("en", w("English", "英文"), 2.069, 0.143), ("zh", w("Chinese", "中文"), 1.458, 0.139)):
        bits, size = story_bits(language)
        bars.append(Bar(label, unigram, w(f"{unigram:.3f} unigram model", f"{unigram:.3f} unigram 模型"), 1))
        bars.append(Bar(label, model, w(f"{model:.3f} the quickstart's model", f"{model:.3f} quickstart 的模型"), 0))
        bars.append(Bar(label, bits / size, w(f"{bits / size:.3f} choices of the grammar: {bits:.0f} bits in {size:.0f} bytes",
                                              f"{bits / size:.3f} 文法的选择：{size:.0f} 字节里 {bits:.0f} bit"), 2))  # fmt: skip
    title = w("Bits per byte of a story: what the model needs, and what the grammar decided",
              "每字节的 bit 数：模型需要多少，文法实际决定了多少")  # fmt: skip
    return themed(bar_svg(title, bars))


def gpu_links(w: Words) -> str:
    size, bars = 1e9, []
    for name in ("h100", "a100-80g", "l40s"):
        gpu = find_gpu(name)
        links = ((w("its own memory", "自己的显存"), gpu.memory_bandwidth, 2), (gpu.link, gpu.link_bandwidth, 0),
                 (w("network card", "网卡"), gpu.network_bandwidth, 1))  # fmt: skip
        for link, speed, paint in links:
            text = w(f"{show_bytes(speed)}/s: 1 GB in {1e3 * size / speed:.3g} ms", f"{show_bytes(speed)}/s：1 GB 用 {1e3 * size / speed:.3g} ms")
            bars.append(Bar(gpu.name, math.log10(speed) - 8, text, paint, link))
    bars.append(Bar(w("any", "任意"), math.log10(PCIE_BANDWIDTH) - 8, w(f"{show_bytes(PCIE_BANDWIDTH)}/s to the host, PCIe 4: 1 GB in {1e12 / PCIE_BANDWIDTH:.3g} ms", f"{show_bytes(PCIE_BANDWIDTH)}/s 到主机内存，PCIe 4：1 GB 用 {1e12 / PCIE_BANDWIDTH:.3g} ms"), 3))  # fmt: skip
    title = w("One direction, from data sheets (log scale)", "单向带宽，来自数据手册（对数坐标）")
    series = (w("GPU to GPU in a node", "节点内 GPU 之间"), w("GPU to another node", "GPU 到别的节点"), w("GPU to its memory", "GPU 到自己的显存"), w("GPU to the host", "GPU 到主机"))  # fmt: skip
    return themed(bar_svg(title, bars, series))


def fused_kernels(w: Words) -> str:
    """Published for the reference shape on one A800, torch 1.12.1."""
    rows = (("naive", 9.85, 71.32), ("all fused", 3.23, 27.87), ("no flash-attn", 8.69, 65.43), ("no rotary_emb", 3.51, 27.90),
            ("no xentropy", 3.37, 29.83), ("no apex RMSNorm", 3.78, 30.68), ("no xformers SwiGLU", 3.60, 29.79))  # fmt: skip
    chinese = ("朴素实现", "全部融合", "不用 flash-attn", "不用 rotary_emb", "不用 xentropy", "不用 apex RMSNorm", "不用 xformers SwiGLU")
    bars = []
    for (name, seconds, memory), zh in zip(rows, chinese, strict=True):
        bars.append(Bar(w(name, zh), seconds, f"{seconds:.2f} s"))
        bars.append(Bar(w(name, zh), memory / 10, f"{memory:.1f} GB", 1))
    title = w("65,536 tokens of a 1.1B model on one A800 in 2023 (published, not ours)",
              "2023 年，一张 A800 上 1.1B 模型的 65,536 个 token（他人公布的数据）")  # fmt: skip
    return themed(bar_svg(title, bars, (w("seconds per step", "每步秒数"), w("memory, GB / 10", "显存，GB / 10"))))


def three_walls(w: Words) -> str:
    parameters, tokens, replicas, gpu = 175e9, 300e9, 128, find_gpu("h100")
    work, weights = 6 * parameters * tokens, 4 * parameters
    years = w(f"{work / gpu.flops / DAY / 365:.1f} years at full speed", f"全速也要 {work / gpu.flops / DAY / 365:.1f} 年")
    cards = w(f"{weights / 80e9:.1f} cards for the weights alone", f"光权重就要 {weights / 80e9:.1f} 张")
    minutes = w(f"{replicas * weights / gpu.network_bandwidth / 60:.0f} minutes for each step", f"每步 {replicas * weights / gpu.network_bandwidth / 60:.0f} 分钟")
    one = w("one H100", "一张 H100")
    rows = (
        (w("compute", "计算墙"), work / gpu.flops, f"{work / 1e21:.0f} ZFLOP", f"{one}: {gpu.flops / 1e12:.0f} TFLOP/s", years),
        (w("memory", "显存墙"), weights / 80e9, show_bytes(weights), f"{one}: 80 GB", cards),
        (w("communication", "通信墙"), replicas * weights / gpu.network_bandwidth, f"{replicas * weights / 1e12:.1f} TB",
         w("one network card", "一块网卡") + f": {show_bytes(gpu.network_bandwidth)}/s", minutes),
    )  # fmt: skip
    canvas = Canvas(760, 286, w("GPT-3 (175B parameters, 300B tokens): need against one card, log scale",
                                "GPT-3（1750 亿参数，3000 亿 token）：需求与单卡之比，对数坐标"))  # fmt: skip
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

    canvas = Canvas(980, 690, w("Six runs of the same small model; planted at step 80 (dashed)",
                                "同一个小模型的六次训练；第 80 步（虚线）起植入问题"))  # fmt: skip
    names = {"good": w("good", "正常"), "lr": w("learning rate × 30", "学习率 × 30"), "shuffled": w("shuffled targets", "目标被打乱"),
             "garbage": w("garbage for 3 steps", "3 步乱码"), "repeated": w("repeated batch", "重复同一批数据"),
             "dead": w("a source without data", "一个来源断了")}  # fmt: skip
    for number, (name, curves, finding) in enumerate(loss_records(w.language)):
        x, y = 20 + 320 * (number % 3), 60 + 312 * (number // 3)
        canvas.text(x + 34, y, names[name], bold=True)
        canvas.panel(Plot("", "", "", curves), x, y + 10, 290, 200, 80 if name != "good" else None)
        for row, part in enumerate(finding):
            canvas.text(x + 4, y + 234 + 17 * row, part, size=12, fill=colour(3) if name not in ("good", "garbage") else "")
    canvas.legend(54, 680, [(w("loss", "loss"), colour(8)), ("en", colour(0)), ("zh", colour(1))])
    return canvas.svg()


def memory_anatomy(w: Words) -> str:
    """Llama 2 7B on eight A100, as planned."""
    bars = []
    chinese = ("分片：权重、梯度、优化器", "聚合的权重、未归约的梯度", "激活和 logits", "CUDA、NCCL、碎片余量")
    english = ("shard: weights, gradients, optimizer", "gathered weights, gradients on their way", "activations and logits", "CUDA, NCCL, margin")
    for recompute in ("none", "selective", "full"):
        recipe = load_recipe_or_preset("7b", ["train.batch_tokens=1048576", "train.micro_batch_tokens=8192", f"parallel.activation_checkpointing={recompute}"])
        parts = plan_run(recipe, Cluster.of(find_gpu("a100-80g"), 8)).memory.parts
        groups = [0, 0, 0, 0]
        for part in parts:
            group = (0 if part.name.startswith(("weights (stored)", "gradients", "optimizer")) else
                     1 if part.name.startswith(("weights in", "unsharded")) else
                     3 if part.name.startswith(("CUDA", "communic", "fragment")) else 2)  # fmt: skip
            groups[group] += part.bytes
        for number, size in enumerate(groups):
            bars.append(Bar(w(f"recomputing: {recompute}", f"重算：{recompute}"), size, show_bytes(size), number))
    title = w("7B on 8 × A100 80 GB with FSDP: memory of a rank, planned", "7B，8 张 A100 80 GB，FSDP：每个 rank 的显存（估算）")
    return themed(bar_svg(title, bars, [w(*pair) for pair in zip(english, chinese, strict=True)]))


def torchrun(w: Words) -> str:
    rate, curves = FAILURE_RATES["0.27% a card and day"], []
    counts = [int(256 * 2 ** (step / 4)) for step in range(25)]
    for number, (stall, recovery, name) in enumerate((
        (60, 900, w("waits for a person, checkpoints on disk", "等人来重启，checkpoint 在磁盘")),
        (60, 300, w("restarts itself, checkpoints on disk", "自动重启，checkpoint 在磁盘")),
        (1, 60, w("restarts itself, checkpoints in memory", "自动重启，checkpoint 在内存")),
    )):  # fmt: skip
        models = [(gpus, FailureModel(DAY / rate / gpus, stall, recovery)) for gpus in counts]
        line = [(float(gpus), 100 * (1 - one.goodput(one.daly_interval))) for gpus, one in models]
        label = w(f"{name}: stall {stall} s, recovery {recovery} s", f"{name}：停顿 {stall} s，恢复 {recovery} s")
        curves.append(Curve(label, [point for point in line if point[1] < 60], colour=number))
    title = w("Time lost to failures and checkpoints, at the best interval", "故障和 checkpoint 损失的时间（取最优间隔）")
    plot = Plot(title, w("GPUs, 0.27% failures per card and day", "GPU 张数，每卡每天 0.27% 故障"), w("% of the time", "占时间的 %"), curves, log_x=True)
    return themed(line_svg(plot)).replace("(log scale)", w("(log scale)", "（对数坐标）"))


PAGES: dict[str, Picture] = {
    "bits-per-byte": bits_per_byte, "packing": packing, "sample-order": sample_order, "zero": zero, "pipelines": pipelines,
    "mfu": mfu, "checkpoint-interval": checkpoint_interval, "parity": parity, "threat-model": threat_model,
    "story-world": story_world, "gpu-links": gpu_links, "fused-kernels": fused_kernels, "three-walls": three_walls,
    "loss-normal": loss_normal, "memory-anatomy": memory_anatomy, "torchrun": torchrun,
}  # fmt: skip


def explain_svg(name: str) -> str:
    """The picture ``zero.svg``, or ``zero.zh-CN.svg`` with Chinese texts."""
    page, _, rest = name.partition(".")
    return PAGES[page](Words("zh" if rest.startswith("zh-CN") else "en"))
