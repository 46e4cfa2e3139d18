// Data from the server, or, in a standalone report, from the page itself.
const embedded = document.getElementById("data");
const report = embedded ? JSON.parse(embedded.textContent) : null;
const key = new URLSearchParams(location.search).get("key") ?? "";

export const isReport = report !== null;

async function get(path, parameters = []) {
  const response = await fetch(`api/${path}?${new URLSearchParams([...parameters, ["key", key]])}`);
  if (!response.ok) throw new Error(`${response.status}: ${await response.text()}`);
  return response.json();
}

export async function listRuns() {
  return report ? report.runs : get("runs");
}

export async function listExperiments() {
  return report ? report.experiments : get("experiments");
}

export async function getSeries(run, names, from, to, points) {
  if (report) return report.series[run].map((block) => sliceBlock(block, names, from, to)).filter((block) => block !== null);
  const range = [["from", from], ["to", to]].filter(([, value]) => value !== "");
  return get(`runs/${run}/series`, [...names.map((name) => ["name", name]), ...range, ["points", points]]);
}

export async function getText(run, kind, name, step) {
  if (report) return report.texts.find((t) => t.run === run && t.kind === kind && t.name === name && t.step === step).line;
  return get(`runs/${run}/text`, [["kind", kind], ["name", name], ["step", step]]);
}

export async function getFacts(run) {
  return report ? report.facts[run] : get(`runs/${run}/facts`);
}

// What was planned of a run beside what it measured: only in a report.
export const planOf = (run) => report?.plans?.[run] ?? null;

export async function getDocuments(run, step, losses) {
  if (!report) return get(`runs/${run}/documents`, [["step", step], ["losses", losses ? "1" : "0"]]);
  const event = report.runs[run].events.findLast((one) => one.step === step && one.documents);
  return event ? { documents: event.documents, layer_norms: event.layer_norms } : { elsewhere: `z2a blame RUN --step ${step}` };
}

// onUpdate(value) for each message; onState(connected) when the connection changes. The browser reconnects automatically.
export function follow(onUpdate, onState) {
  if (report) return;
  const source = new EventSource(`api/stream?${new URLSearchParams([["key", key]])}`);
  source.onmessage = (message) => onUpdate(JSON.parse(message.data));
  source.onopen = () => onState(true);
  source.onerror = () => onState(false);
}

function sliceBlock(block, names, from, to) {
  const own = names.filter((name) => name in block.mean);
  if (!own.length) return null;
  const rows = block.steps.map((_, row) => row)
    .filter((row) => (from === "" || block.steps[row] >= from) && (to === "" || block.steps[row] <= to));
  const take = (column) => column && rows.map((row) => column[row]);
  const pick = (columns) => columns && Object.fromEntries(own.map((name) => [name, take(columns[name])]));
  return {
    steps: take(block.steps), times: take(block.times), tokens: take(block.tokens),
    mean: pick(block.mean), low: pick(block.low), high: pick(block.high),
  };
}
