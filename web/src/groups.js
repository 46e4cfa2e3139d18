// Which metrics share a chart, the order of the charts, and their titles.
import { isProbe } from "./probes.js";

const TITLES = {
  loss: "loss", "loss/*": "loss by source", bpb: "bits per byte", "bpb/*": "bits per byte by source",
  "validation/*": "validation bits per byte", "stories/*": "quality of generated stories", lr: "learning rate",
  grad_norm: "gradient norm",
  tokens_per_second: "tokens per second", mfu: "MFU", mfu_palm: "MFU, counted as PaLM does", hfu: "HFU", tflops: "TFLOP/s of a device",
  goodput: "goodput", memory: "memory (bytes)",
  data_wait: "waiting for data", "time/*": "where the time of a step goes (s)", step_time: "time of a step (s)",
  "time/@": "exposed communication by rank (s)", sync_bytes: "sent by a rank to synchronize a step (bytes)",
  sync_error: "left to send by PowerSGD (share of the gradient)", "system/cpu_cores": "CPU cores in use",
  "system/memory_gib": "memory of the process (GiB)", "system/machine_memory_gib": "memory of the machine (GiB)",
  "system/load": "load", "system/other_cpu": "CPU share of other programs",
};
const FIRST = ["loss", "loss/*", "validation/*", "stories/*", "bpb", "bpb/*", "lr", "grad_norm", "tokens_per_second", "mfu", "mfu_palm", "hfu",
  "tflops",
  "goodput", "time/*", "step_time", "time/@", "sync_bytes", "sync_error", "data_wait", "memory"];
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

// [{ id, title, names, stacked }]; what is stacked adds up.
export function groupNames(names) {
  const groups = new Map();
  for (const name of names) {
    const base = name.replace(/@\d+$/, "");
    if (AXES.has(base)) continue;
    const id = name !== base && PARTS.includes(base) ? "time/@" : chartOf(base);
    if (!groups.has(id)) groups.set(id, []);
    groups.get(id).push(name);
  }
  groups.get("time/@")?.unshift("time/communication");  // that of rank 0, which is also in the stack
  groups.get("time/*")?.sort((a, b) => PARTS.indexOf(a) - PARTS.indexOf(b));
  return [...groups].map(([id, members]) => ({
    id, names: members, stacked: id === "time/*",
    title: TITLES[id] ?? (isProbe(id) ? id.slice(id.indexOf("/") + 1) : id),
  }))
    .sort((a, b) => rank(a.id) - rank(b.id) || a.id.localeCompare(b.id));
}

function chartOf(name) {
  if (isProbe(name)) return name.slice(0, name.lastIndexOf("/"));  // a chart for each group of a suite
  if (/^gpu\d+\//.test(name)) return name.replace(/^gpu\d+/, "gpu*");  // the same metric of every GPU
  if (name.startsWith("system/") || !name.includes("/")) return name;  // metrics with different units
  return name.slice(0, name.indexOf("/")) + "/*";
}

function rank(id) {
  const known = FIRST.indexOf(id);
  if (known >= 0) return known;
  return LAST.test(id) ? FIRST.length + 1 : FIRST.length;
}
