"""What health checks say, in English and Chinese, by level, rule and, after a colon, case."""

from __future__ import annotations

from typing import cast

from zero2all.findings import Finding, Level

ENGLISH = {
    "bad initial loss": "starts far above ln V ({details}): initial weights are too large, or targets are shifted",
    "note initial loss": "starts far below ln V ({details}): it starts from trained weights, or the targets leak",
    "good initial loss": "matches an untrained model ({details})",
    "bad reference": "{percent:.0f}% above the reference: {loss:.3f} after {tokens} tokens, not {expected:.3f}",
    "good reference: below": "{percent:.0f}% below the reference: {loss:.3f} after {tokens} tokens, not {expected:.3f}",
    "good reference": "on the reference curve ({loss:.3f} after {tokens} tokens, reference {expected:.3f})",
    "bad not finite": "the loss or gradient was not finite at step {step}",
    "bad divergence": "{source}rises: {before:.3f} around step {step}, {now:.3f} now",
    "note plateau": "almost flat since step {step}: {before:.3f} before, {now:.3f} since",
    "note spike": "{count} step(s) far above their neighbours, the worst {height:.3f} at step {step}",
    "bad sudden drop": "{source}falls from {before:.3f} to {now:.3f} at step {step}: do data repeat, or targets leak?",
    "bad dead source: missing": "{name}: no value since step {step}",
    "bad dead source: constant": "{name}: constant at {value:g} since step {step}",
    "note throughput drop": "slower since step {step}: {now} tokens/s, {before} before",
    "note busy machine": "other programs used {percent:.0f}% of the CPU: tokens/s, MFU and the time left suffer",
    "bad silence": "nothing written for {long}; a step takes {pace:.2g} s: killed, or hung",
    "note damaged files": "{damage}",
    "good first loss": "{first:.3f} is {named}: expected at the first step, as the model is the reference",
    "bad first loss": "{first:.3f} at the first step, not {named}: model and reference differ already",
    "bad chosen falls": "log p(chosen) is falling together with log p(rejected) ({chosen:.1f}, {rejected:.1f} nats)",
    "bad truncated answers": "{late:.0%} of the answers are cut at max_answer_tokens, and not learned from",
    "note groups without spread": "{late:.0%} of the prompts have answers with equal rewards, which teach nothing",
    "bad sampler gap": "{late:.3f} is the mean difference of log-probabilities between sampler and trainer",
}
REMEDIES = {
    "bad divergence": "try a lower learning rate, or roll back to an earlier checkpoint",
    "note spike": "'z2a blame RUN --step {step}' shows its documents",
    "bad sudden drop": "'z2a blame RUN --step {step} --lowest' shows the text that it knows",
    "bad chosen falls": "add the SFT term, or raise its weight (train.objective.dpo.sft_weight)",
    "note groups without spread": "choose prompts that are neither solved nor too hard",
}
CHINESE = {
    "bad initial loss": "初始损失远高于 ln V（{details}）：初始权重过大，或目标错位",
    "note initial loss": "初始损失远低于 ln V（{details}）：从已训练的权重开始，或模型看到了目标",
    "good initial loss": "初始损失正常（{details}）",
    "bad reference": "比参考曲线高 {percent:.0f}%（{tokens} 个 token 后为 {loss:.3f}，参考 {expected:.3f}）",
    "good reference: below": "比参考曲线低 {percent:.0f}%（{tokens} 个 token 后为 {loss:.3f}，参考 {expected:.3f}）",
    "good reference": "与参考曲线一致（{tokens} 个 token 后为 {loss:.3f}，参考曲线 {expected:.3f}）",
    "bad not finite": "第 {step} 步损失或梯度不是有限数",
    "bad divergence": "{source}损失回升：第 {step} 步附近 {before:.3f}，现在 {now:.3f}；请降低学习率或回到较早的检查点",
    "note plateau": "第 {step} 步以来几乎不变：之前 {before:.3f}，之后 {now:.3f}",
    "note spike": "{count} 步远高于邻近各步，最高是第 {step} 步 {height:.3f}；z2a blame RUN --step {step} 显示其文档",
    "bad sudden drop": (
        "{source}第 {step} 步附近由 {before:.3f} 突降到 {now:.3f}：数据是否重复，或目标是否泄漏？用 z2a blame "
        "RUN --step {step} --lowest 查看模型已经熟悉的文本"
    ),
    "bad dead source: missing": "{name}：第 {step} 步以来没有值",
    "bad dead source: constant": "{name}：第 {step} 步以来恒为 {value:g}",
    "note throughput drop": "第 {step} 步以来变慢：每秒 {now} 个 token，之前为 {before}",
    "note busy machine": "其他程序占用了 {percent:.0f}% 的 CPU：每秒 token 数、MFU 和剩余时间都受其影响",
    "bad silence": "已有 {long} 没有新记录，每步通常 {pace:.2g} 秒：进程被杀或卡住",
    "note damaged files": "文件损坏，已跳过：{damage}",
    "good first loss": "{first:.3f} 就是 {named}：第一步模型与参考模型相同，本应如此",
    "bad first loss": "第一步为 {first:.3f}，而不是 {named}：模型与参考模型一开始就不一致",
    "bad chosen falls": (
        "log p(chosen) 随 log p(rejected) 一起下降，分别下降 {chosen:.1f} 和 {rejected:.1f}："
        "请加上 SFT 项或提高其权重（train.objective.dpo.sft_weight）"
    ),
    "bad truncated answers": "{late:.0%} 的回答在 max_answer_tokens 处被截断，没有参与学习",
    "note groups without spread": "{late:.0%} 的提示下所有回答得分相同，学不到东西：请换难度适中的提示",
    "bad sampler gap": "{late:.3f} 是采样器与训练器对数概率的平均差：两者不一致",
}


def health_finding(key: str, step: int | None = None, **values: object) -> Finding:
    """``step`` is also a value of the texts."""
    values["step"] = step
    level, _, rule = key.partition(":")[0].partition(" ")
    why, remedy, chinese = (texts.get(key, "").format(**values) for texts in (ENGLISH, REMEDIES, CHINESE))
    return Finding(cast(Level, level), rule, why, remedy, step, chinese)
