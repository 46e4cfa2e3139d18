import { state } from "./state.js";

const ZH = {
  __proto__: null,  // names from a record are looked up too
  "light or dark": "切换浅色/深色", "steps": "步数", "tokens": "token 数", "time": "时间", "x axis": "横轴",
  "log x": "对数横轴", "log y": "对数纵轴", "smoothing": "平滑", "everything": "全部", "last half": "后一半",
  "last tenth": "最后 10%", "find a chart": "查找图表", "runs": "训练", "step": "步数", "step {}": "第 {} 步", "loss": "损失",
  "loss by source": "各数据源损失", "bits per byte": "每字节比特数", "bits per byte by source": "各数据源每字节比特数",
  "learning rate": "学习率", "gradient norm": "梯度范数", "tokens per second": "每秒 token 数",
  "validation bits per byte": "验证集每字节比特数", "quality of generated stories": "生成故事的质量",
  "MFU": "MFU（模型算力利用率）", "HFU": "HFU（硬件算力利用率）",
  "MFU, counted as PaLM does": "MFU（按 PaLM 口径）", "TFLOP/s of a device": "单卡 TFLOP/s",
  "memory (bytes)": "显存/内存峰值（字节）", "waiting for data": "数据等待时间占比", "evaluation": "验证",
  "goodput": "有效训练时间占比", "where the time of a step goes (s)": "单步时间花在哪里（秒）",
  "time of a step (s)": "单步耗时（秒）", "exposed communication by rank (s)": "各 rank 未重叠的通信时间（秒）",
  "sent by a rank to synchronize a step (bytes)": "单个 rank 每步同步发送量（字节）",
  "left to send by PowerSGD (share of the gradient)": "PowerSGD 尚未发送的部分（相对梯度）",
  "data": "数据", "forward": "前向", "backward": "反向", "exposed communication": "未重叠的通信", "optimizer": "优化器",
  "logging": "日志", "other": "其他",
  "CPU cores in use": "占用 CPU 核数", "memory of the process (GiB)": "进程内存（GiB）",
  "memory of the machine (GiB)": "整机已用内存（GiB）", "load": "系统负载",
  "CPU share of other programs": "其他程序的 CPU 占比", "left": "剩余", "ended": "已结束",
  "samples": "生成样例", "prompt": "提示词", "histograms": "直方图", "gradient norm by layer": "各层梯度范数",
  "planned against measured": "预测与实测对比", "{}: planned for {} ranks of {}": "{}：按 {} 个 rank、{} 预测",
  "predicted": "预测", "measured": "实测", "measured / predicted": "实测 / 预测", "note": "备注",
  "step time": "每步时间", "peak memory": "内存峰值",
  "run details": "训练详情", "recipe": "配方", "environment": "环境",
  "events": "事件", "is it normal?": "正常吗？", "no problems found": "没有异常", "documents of step {}": "第 {} 步的文档",
  "compute the loss of each": "计算每篇文档的损失", "document": "文档", "source": "数据源", "part of the document": "片段",
  "loading…": "正在加载……", "computing…": "正在计算……",
  "the documents are on the machine of the run; run there: ": "文档在训练所在的机器上，请到那台机器上执行：",
  "connected": "已连接", "not connected": "连接中断", "cannot be read": "暂时无法读取", "close": "关闭",
  "zoomed; double-click shows everything": "已放大，双击还原", "copy link": "复制链接", "copied": "已复制",
  "click a step to see its documents; drag to zoom": "点击某一步查看该步的文档，框选可放大",
  "checkpoint": "checkpoint", "resume": "断点续训", "start": "开始", "done": "完成", "stopped": "已停止", "spike": "损失尖峰",
  "rollback": "回滚", "failure": "故障", "stage": "进入新阶段", "overflow": "fp16 溢出", "not finite": "出现 NaN/Inf",
  "initial loss": "初始损失", "reference": "参考曲线", "divergence": "发散", "plateau": "停滞",
  "sudden drop": "损失骤降", "dead source": "数据源失效", "throughput drop": "吞吐下降", "silence": "长时间无记录", "damaged files": "文件损坏",
  "check failed": "检查失败",
  "experiment": "实验", "budget": "预算", "variant": "变体", "seeds": "种子数", "best": "最好", "tok/s": "tok/s",
  "{} of {} runs done": "已完成 {} / {} 次训练", "seed": "种子", "planned": "未开始", "running": "训练中", "failed": "失败",
  "{} is better than {} by {}": "{} 优于 {}，相差 {}",
  "no difference beyond the noise between seeds: {} ({} minus {})": "差异没有超出种子之间的波动：{}（{} 减 {}）",
  "the noise between seeds is unknown": "种子之间的波动未知",
  "suggested": "建议", "1 % more": "多占 1 %", "95 % interval": "95 % 区间",
  "leave-one-out error {} (the mean: {}), rank correlation {}": "留一误差 {}（用均值预测：{}），秩相关系数 {}",
  "probes": "探针", "probe": "探针", "suite": "探针集", "group": "分组", "metric": "指标", "first": "首个", "last": "最新",
  "expected": "预期方向", "Kendall's τ": "Kendall τ", "p (Holm)": "p 值（Holm 校正）", "probability": "概率",
  "bits per byte apart": "每字节比特数之差",
  "{} of {} probes trend as expected (p < 0.05)": "{} / {} 个探针按预期变化（p < 0.05）",
  "no documents": "没有文档", "the highest between two points": "两点之间数值最高的一步", "values": "数值",
};

export const language = () => state.lang || (navigator.language.startsWith("zh") ? "zh" : "en");
export const say = (text) => (language() === "zh" && ZH[text]) || text;

// The name of a sample or histogram.
export const sayName = (name) => say(name).replace(/^prompt(?= \d+$)/, (word) => say(word));
