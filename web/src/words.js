import { state } from "./state.js";

const ZH = {
  "light or dark": "浅色或深色", "steps": "步数", "tokens": "token 数", "time": "时间", "x axis": "横轴",
  "log x": "对数横轴", "log y": "对数纵轴", "smoothing": "平滑", "everything": "全部", "last half": "后一半",
  "last tenth": "最后十分之一", "find a chart": "查找图表", "runs": "运行", "step": "步", "loss": "损失",
  "loss by source": "各数据源损失", "bits per byte": "每字节比特数", "bits per byte by source": "各数据源每字节比特数",
  "learning rate": "学习率", "gradient norm": "梯度范数", "tokens per second": "每秒 token 数",
  "validation bits per byte": "验证集每字节比特数", "MFU": "算力利用率 (MFU)", "HFU": "硬件利用率 (HFU)",
  "memory (bytes)": "内存（字节）", "waiting for data": "等待数据的时间占比", "evaluation": "评测", "goodput": "有效训练时间占比", "time of a step by part (s)": "每步各部分耗时（秒）",
  "CPU cores in use": "占用 CPU 核数", "memory of the process (GiB)": "进程内存（GiB）",
  "memory of the machine (GiB)": "整机已用内存（GiB）", "load": "系统负载", "left": "剩余", "ended": "已结束",
  "samples": "生成样本", "histograms": "直方图", "run details": "运行信息", "recipe": "配方", "environment": "环境",
  "events": "事件", "is it normal?": "正常吗？", "no problems found": "没有异常", "documents of step": "该步的文档：第",
  "compute the loss of each": "计算每篇文档的损失", "document": "文档", "source": "数据源", "part of the document": "片段",
  "loading…": "正在加载……", "computing…": "正在计算……",
  "the documents are on the machine of the run; run there: ": "文档在运行所在的机器上，请在那里执行：",
  "connected": "已连接", "not connected": "连接中断", "cannot be read": "暂时无法读取", "close": "关闭",
  "zoomed; double-click shows everything": "已放大；双击恢复全部", "copy link": "复制链接", "copied": "已复制",
  "click a step to see its documents; drag to zoom": "点击一步查看其文档；拖动可放大",
  "checkpoint": "检查点", "resume": "恢复", "start": "开始", "done": "完成", "stopped": "已停止", "spike": "loss 突刺",
  "rollback": "回滚", "failure": "故障", "stage": "阶段", "not finite": "非有限数",
  "initial loss": "初始损失", "reference": "参考曲线", "divergence": "发散", "plateau": "停滞",
  "sudden drop": "突降", "dead source": "失效数据源", "throughput drop": "吞吐下降", "silence": "无新记录", "damaged files": "文件损坏",
  "check failed": "检查失败",
  "no documents": "没有文档", "the highest between two points": "两点之间损失最高的一步", "values": "数值",
};

export const language = () => state.lang || (navigator.language.startsWith("zh") ? "zh" : "en");
export const say = (text) => (language() === "zh" && ZH[text]) || text;
