// Which metrics share a chart, the order of the charts, and their titles.
import { isProbe } from "./probes.js";
import { say } from "./words.js";

// Titles of charts, by their ids: see chartOf.
const TITLES = {
  loss: "loss", "loss/*": "loss by source", bpb: "bits per byte", "bpb/*": "bits per byte by source",
  "validation/*": "validation bits per byte", "stories/*": "quality of generated stories", "valid/*": "metrics on the validation set",
  lr: "learning rate", grad_norm: "gradient norm", tokens_per_second: "tokens per second",
  "utilization/*": "utilization of the device (%)", tflops: "TFLOP/s per device", goodput: "goodput",
  memory: "peak memory (bytes)", memory_reserved: "memory held by the CUDA allocator (bytes)",
  data_wait: "waiting for data", checkpoint_stall: "training paused by a checkpoint (s)",
  "time/*": "where the time of a step goes (s)", step_time: "time of a step (s)",
  "time/@": "exposed communication by rank (s)", sync_bytes: "sent by a rank to synchronize a step (bytes)",
  reward: "reward", reward_std: "spread of rewards within a group", groups_without_spread: "prompts whose answers have equal rewards (share)",
  answer_length: "length of answers (tokens)", truncated_answers: "answers cut at max_answer_tokens (share)",
  sampler_gap: "log-probability gap between sampler and trainer", kl: "KL divergence from the reference",
  "rewards/*": "implicit rewards", "logps/*": "log-probabilities of answers", "islands/round": "round of synchronization",
  "islands/present": "islands present", "islands/bytes": "exchanged between islands (bytes)",
  "islands/wait": "waiting for other islands (s)", "islands/delta_norm": "norm of the exchanged change",
  "system/cpu_cores": "CPU cores in use", "system/memory_gib": "memory of the process (GiB)",
  "system/machine_memory_gib": "memory of the machine (GiB)", "system/load": "load",
  "system/other_cpu": "CPU share of other programs", "gpu*/busy_percent": "GPU utilization (%)",
  "gpu*/memory_gib": "GPU memory in use (GiB)", "gpu*/watts": "GPU power (W)", "gpu*/celsius": "GPU temperature (°C)",
};
// Names of lines that are not those of a source, a test set or a probe.
const LABELS = {
  mfu: "MFU", mfu_palm: "MFU, counted as PaLM does", hfu: "HFU", "time/communication": "exposed communication",
  "rewards/accuracies": "accuracy", "rewards/margins": "margin", "valid/loss": "loss", "valid/reward": "reward",
  "valid/rewards/chosen": "reward of chosen answers", "valid/rewards/rejected": "reward of rejected answers",
  "valid/rewards/accuracies": "accuracy", "valid/rewards/margins": "margin",
  "valid/logps/chosen": "log-probability of chosen answers", "valid/logps/rejected": "log-probability of rejected answers",
};
const UTILIZATION = ["mfu", "mfu_palm", "hfu"];
const FIRST = ["loss", "loss/*", "validation/*", "stories/*", "reward", "rewards/*", "bpb", "bpb/*", "lr", "grad_norm",
  "tokens_per_second", "utilization/*", "tflops", "goodput", "time/*", "step_time", "time/@", "sync_bytes",
  "data_wait", "checkpoint_stall", "memory", "memory_reserved"];
// Drawn as they are: smoothing would only delay them.
const EXACT = /^(lr|goodput|memory|memory_reserved|checkpoint_stall|validation\/|valid\/|stories\/|islands\/round|probes\/)/;
// Parts of a step, from the bottom of their stack to its top.
const PARTS = ["data", "forward", "loss", "backward", "communication", "optimizer", "logging", "other"].map((part) => `time/${part}`);
const LAST = /^(system|gpu)/;
const AXES = new Set(["tokens"]);

// The metrics of a run that are drawn. With a single source its loss is the loss.
export function drawnNames(run) {
  const isSourceLoss = (name) => name.startsWith("loss/");
  const single = run.names.includes("loss") && run.names.filter(isSourceLoss).length === 1;
  return single ? run.names.filter((name) => !isSourceLoss(name)) : run.names;
}

// The name of a line in a chart of several.
export function lineLabel(name) {
  const rank = name.match(/@(\d+)$/), gpu = name.match(/^gpu(\d+)\//);
  if (rank) return say("rank {}").replace("{}", rank[1]);
  if (gpu) return `GPU ${gpu[1]}`;
  if (name in LABELS) return say(LABELS[name]);
  const short = name.includes("/") ? name.slice((isProbe(name) ? name.lastIndexOf("/") : name.indexOf("/")) + 1) : name;
  return say(short).replace(/(?<= \()(test set|source)(?=\)$)/, (word) => say(word));
}

// [{ id, title, names, stacked, exact, percent }]; what is stacked adds up.
export function groupNames(names) {
  const groups = new Map();
  for (const name of names) {
    const base = name.replace(/@\d+$/, "");
    if (AXES.has(base) || (base === "tflops" && names.includes("mfu"))) continue;  // TFLOP/s are the MFU in another unit
    const id = name !== base && PARTS.includes(base) ? "time/@" : chartOf(base);
    if (!groups.has(id)) groups.set(id, []);
    groups.get(id).push(name);
  }
  groups.get("time/@")?.unshift("time/communication");  // that of rank 0, which is also in the stack
  groups.get("time/*")?.sort((a, b) => PARTS.indexOf(a) - PARTS.indexOf(b));
  return [...groups].map(([id, members]) => ({
    id, names: members, stacked: id === "time/*", exact: EXACT.test(id), percent: id === "utilization/*",
    title: TITLES[id] ?? (isProbe(id) ? id.slice(id.indexOf("/") + 1) : id),
  }))
    .sort((a, b) => rank(a.id) - rank(b.id) || a.id.localeCompare(b.id));
}

function chartOf(name) {
  if (isProbe(name)) return name.slice(0, name.lastIndexOf("/"));  // a chart for each group of a suite
  if (/^gpu\d+\//.test(name)) return name.replace(/^gpu\d+/, "gpu*");  // the same metric of every GPU
  if (UTILIZATION.includes(name)) return "utilization/*";
  if (/^(system|islands)\//.test(name) || !name.includes("/")) return name;  // metrics with different units
  return name.slice(0, name.indexOf("/")) + "/*";
}

function rank(id) {
  const known = FIRST.indexOf(id);
  if (known >= 0) return known;
  return LAST.test(id) ? FIRST.length + 1 : FIRST.length;
}
