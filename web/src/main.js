import "uplot/dist/uPlot.min.css";
import "./style.css";
import { follow, isReport, listExperiments, listRuns } from "./api.js";
import { Chart } from "./chart.js";
import { element } from "./element.js";
import { experimentPanel, isUnfinished } from "./experiments.js";
import { drawnNames, groupNames } from "./groups.js";
import { factsPanel, histogramBars, openDocuments, planPanel, runCard, sampleText, textPanel } from "./panels.js";
import { isProbe, probeTable } from "./probes.js";
import { change, hiddenRuns, onChange, readAddress, state } from "./state.js";
import { language, say } from "./words.js";

let runs = [];
let experiments = [];
let charts = [];
let connected = true;
let ranksReadAt = 0;
const RANKS_REFRESH_MS = 5000;
const EXPERIMENTS_REFRESH_MS = 3000;
const page = document.getElementById("page");
const experimentBox = element("div", { class: "experiments" });
const cards = element("div", { class: "cards" });
const grid = element("main", { class: "grid" });
const probes = element("section", { class: "probes" });
const probeGrid = element("div", { class: "grid" });
const below = element("div", { class: "below" });
const light = element("span", { class: "light" });

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) charts.find((chart) => chart.root === entry.target)?.show();
}, { rootMargin: "200px" });

async function begin() {
  readAddress();
  applyTheme();
  [runs, experiments] = [(await listRuns()).map(prepared), await listExperiments().catch(() => [])];
  build();
  if (!isReport) setInterval(refreshExperiments, EXPERIMENTS_REFRESH_MS);
  follow(applyUpdate, (there) => {
    if (there && !connected) reloadRuns();
    connected = there;
    showLight();
  });
  if (state.step) {
    const [run, step] = state.step.split(":").map(Number);
    openDocuments(runs[run], step);
  }
}

function prepared(run, id) {
  return { ...run, id, begun: run.events.find((event) => event.event === "start")?.time ?? run.events[0]?.time ?? 0 };
}

async function reloadRuns() {
  [runs, experiments] = [(await listRuns()).map(prepared), await listExperiments().catch(() => experiments)];
  build();
}

// Its record is a file that the runner replaces: there are no lines to follow.
async function refreshExperiments() {
  if (!experiments.some(isUnfinished)) return;
  const found = await listExperiments().catch(() => experiments);  // keep what is shown while the server is away
  if (JSON.stringify(found) === JSON.stringify(experiments)) return;
  experiments = found;
  drawExperiments();
}

function drawExperiments() {
  experimentBox.replaceChildren(...experiments.map(experimentPanel));
}

function applyTheme() {
  document.documentElement.lang = language() === "zh" ? "zh-CN" : "en";
  document.documentElement.dataset.theme = state.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

function build() {
  applyTheme();
  page.replaceChildren(header(), experimentBox, cards, grid, probes, below);
  drawExperiments();
  drawCards();
  buildCharts();
  buildBelow();
}

// The table is drawn again with the charts: its section is empty without both.
function buildProbes() {
  const table = probeTable(visible());
  probes.replaceChildren(...(table ? [element("h2", {}, say("probes")), probeGrid, table] : []));
}

function buildBelow() {
  below.replaceChildren(...[textPanel(visible(), "sample", sampleText), textPanel(visible(), "histogram", histogramBars),
    planPanel(visible()), factsPanel(visible())].filter(Boolean));
}

const visible = () => runs.filter((run) => !hiddenRuns().has(run.id));

function header() {
  const choose = (name, options) => element("select", { "aria-label": say("x axis"), onchange: (event) => change({ [name]: event.target.value }) },
    ...options.map(([value, label]) => element("option", { value, selected: state[name] === value }, say(label))));
  const tick = (name) => element("label", {}, element("input", { type: "checkbox", checked: Boolean(state[name]),
    onchange: (event) => change({ [name]: event.target.checked ? "1" : "" }) }), say(name === "logx" ? "log x" : "log y"));
  const smooth = element("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: state.smooth,
    oninput: (event) => change({ smooth: event.target.value }) });
  return element("header", { class: "top" },
    element("h1", {}, "zero2all", isReport ? null : light),
    element("div", { class: "controls" },
      choose("x", [["step", "steps"], ["tokens", "tokens"], ["time", "time"]]), tick("logx"), tick("logy"),
      element("label", {}, say("smoothing"), smooth),
      element("span", { class: "buttons" },
        element("button", { onclick: () => change({ from: "", to: "" }) }, say("everything")),
        element("button", { onclick: () => lastShare(0.5) }, say("last half")),
        element("button", { onclick: () => lastShare(0.1) }, say("last tenth"))),
      element("input", { type: "search", placeholder: say("find a chart"), value: state.find,
        oninput: (event) => change({ find: event.target.value }) }),
      element("span", { class: "buttons" },
        element("button", { title: say("light or dark"), "aria-label": say("light or dark"),
          onclick: () => change({ theme: document.documentElement.dataset.theme === "dark" ? "light" : "dark" }) }, "◐"),
        element("button", { onclick: () => change({ lang: language() === "zh" ? "en" : "zh" }) }, language() === "zh" ? "EN" : "中文"))),
    element("p", { class: "hint" }, say(state.from || state.to ? "zoomed; double-click shows everything"
      : "click a step to see its documents; drag to zoom")));
}

function lastShare(share) {
  const last = Math.max(...visible().map((run) => run.status.step ?? 0));
  change({ from: String(Math.floor(last * (1 - share))), to: "" });
}

function drawCards() {
  cards.replaceChildren(...runs.map(runCard));
  showLight();
}

function showLight() {
  light.className = "light" + (connected ? "" : " off");
  light.title = say(connected ? "connected" : "not connected");
}

function buildCharts() {
  for (const chart of charts) {
    seen.unobserve(chart.root);
    chart.remove();
  }
  const names = new Set(visible().flatMap(drawnNames));
  const wanted = state.find.toLowerCase();
  const groups = groupNames([...names])
    .filter((group) => !wanted || [group.id, say(group.title), ...group.names].join(" ").toLowerCase().includes(wanted));
  charts = groups.map((group) => new Chart(group, runs, openDocuments));
  const ofProbes = (chart) => isProbe(chart.group.id);
  grid.replaceChildren(...charts.filter((chart) => !ofProbes(chart)).map((chart) => chart.root));
  probeGrid.replaceChildren(...charts.filter(ofProbes).map((chart) => chart.root));
  buildProbes();
  for (const chart of charts) seen.observe(chart.root);
}

// An update of a run: lines that were just written. Or the number of runs, when others have begun.
function applyUpdate(update) {
  if (update.found) return reloadRuns();
  const run = runs[update.id];
  const newNames = update.names.some((name) => !run.names.includes(name));
  Object.assign(run, { names: update.names, status: update.status, verdicts: update.verdicts, evals: update.evals ?? run.evals });
  if (update.reload) return reloadRuns();
  const rows = update.lines.filter((line) => "step" in line && !("event" in line || "sample" in line || "histogram" in line));
  const events = update.lines.filter((line) => "event" in line), evaluated = events.some((event) => event.event === "evaluation");
  run.events.push(...events);
  let texts = false;
  for (const line of update.lines)
    for (const kind of ["sample", "histogram"])
      if (kind in line) {
        const steps = (run[kind + "s"][line[kind]] ??= []);
        if (!steps.includes(line.step)) steps.push(line.step);
        texts = true;
      }
  drawCards();
  if (texts) buildBelow();
  if (newNames) buildCharts();
  else for (const chart of charts) {
    if (isProbe(chart.group.id)) update.evals && chart.reload();
    else if (chart.group.id === "validation/*") evaluated && chart.reload();
    else chart.add(run, rows);
  }
  if (update.evals) buildProbes();
  if (update.ranks && Date.now() - ranksReadAt > RANKS_REFRESH_MS) {
    ranksReadAt = Date.now();
    for (const chart of charts) if (chart.ofRanks) chart.reload();
  }
}

onChange((names) => {
  if (names.every((name) => name === "step")) return;
  if (names.includes("smooth") && names.length === 1) {
    for (const chart of charts) if (chart.visible) chart.update();
  } else if (names.includes("find")) {
    buildCharts();
  } else if (names.includes("from")) {
    page.querySelector("header.top").replaceWith(header());
    for (const chart of charts) chart.reload();
  } else {
    build();
  }
});
addEventListener("hashchange", () => { readAddress(); build(); });

begin().catch((error) => page.replaceChildren(element("p", { class: "hint" }, error.message)));
