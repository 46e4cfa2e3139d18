// Everything on the page but the charts.
import { getDocuments, getFacts, getText, planOf } from "./api.js";
import { COLOURS } from "./chart.js";
import { element } from "./element.js";
import { compact, duration, number } from "./format.js";
import { change, hiddenRuns, state } from "./state.js";
import { language, say, sayName } from "./words.js";

const LEVELS = ["bad", "note", "good"];
const FIRST_WORDS = 60;  // characters that stand for the name of a document without one

export function runCard(run) {
  const { status } = run, hidden = hiddenRuns();
  const { loss, tokens_per_second: speed, mfu } = status.latest;
  const toggle = () => {
    hidden.has(run.id) ? hidden.delete(run.id) : hidden.add(run.id);
    change({ hide: [...hidden].join(".") });
  };
  const share = status.steps ? Math.min(1, (status.step + 1) / status.steps) : null;
  const level = (finding) => LEVELS.indexOf(finding.level), findings = [...run.verdicts].sort((a, b) => level(a) - level(b));
  const alarm = findings.some((finding) => finding.level === "bad");
  return element("article", { class: "run" + (hidden.has(run.id) ? " hidden" : "") + (alarm ? " alarm" : "") },
    element("button", { class: "name", onclick: toggle, title: run.directory ?? "" },
      element("i", { style: `background:${COLOURS[run.id % COLOURS.length]}` }), status.name),
    element("div", { class: "metrics" },
      metric(say("step"), status.step == null ? "–" : status.step + 1 + (status.steps ? ` / ${status.steps}` : "")),
      metric(say("loss"), number(loss)),
      speed == null ? null : metric("tok/s", compact(speed)),
      mfu == null || mfu > 1 ? null : metric("MFU", `${(100 * mfu).toFixed(1)}%`),
      status.goodput == null ? null : metric(say("goodput"), `${(100 * status.goodput).toFixed(0)}%`),
      status.ended ? metric(say("ended"), say(status.ended)) : metric(say("left"), duration(status.seconds_left))),
    share == null ? null : element("div", { class: "bar" }, element("div", { style: `width:${100 * share}%` })),
    status.trouble ? element("p", { class: "trouble" }, `${say("cannot be read")}: ${status.trouble}`) : null,
    element("ul", { class: "findings" }, ...findings.map((finding) => element("li", { class: finding.level, role: finding.level === "bad" ? "alert" : null },
      element("b", {}, say(finding.rule)), " ", language() === "zh" ? finding.text_zh : finding.text))));
}

const metric = (label, value) => element("div", {}, element("small", {}, label), element("strong", {}, value));

// Samples and histograms, by name and step.
export function textPanel(runs, kind, show) {
  const entries = runs.flatMap((run) => Object.entries(run[kind + "s"]).map(([name, steps]) => ({ run, name, steps })));
  if (!entries.length) return null;
  return element("section", { class: "texts" }, element("h2", {}, say(kind + "s")), ...entries.map(({ run, name, steps }) => {
    const body = element("div", { class: "body" }), label = element("small");
    const slider = element("input", { type: "range", min: 0, max: steps.length - 1, "aria-label": say("step") });
    slider.value = steps.length - 1;
    const open = async () => {
      const step = steps[slider.value];
      label.textContent = say("step {}").replace("{}", step);
      body.replaceChildren(show(await getText(run.id, kind, name, step)));
    };
    slider.addEventListener("input", open);
    open();
    const title = runs.length > 1 ? `${run.status.name} · ${sayName(name)}` : sayName(name);
    return element("article", {}, element("header", {}, element("b", {}, title), slider, label), body);
  }));
}

export const sampleText = (line) => element("pre", {}, line.text);

export function histogramBars({ counts, edges }) {
  const most = Math.max(...counts) || 1;
  return element("div", {}, element("div", { class: "bars" }, ...counts.map((count, bin) =>
    element("div", { style: `height:${(100 * count) / most}%`, title: `${number(edges[bin])} … ${number(edges[bin + 1])}: ${number(count)}` }))),
    element("div", { class: "ends" }, element("small", {}, number(edges[0])), element("small", {}, number(edges.at(-1)))));
}

export function planPanel(runs) {
  const planned = runs.filter((run) => planOf(run.id));
  if (!planned.length) return null;
  return element("section", { class: "plans" }, element("h2", {}, say("planned against measured")), ...planned.map((run) => {
    const { hardware, ranks, checks } = planOf(run.id);
    return element("article", {},
      element("p", {}, say("{}: planned for {} ranks of {}").replace("{}", () => run.status.name)
        .replace("{}", ranks).replace("{}", () => hardware)),
      element("table", {}, element("tr", {}, ...["metric", "predicted", "measured", "measured / predicted", "note"]
        .map((name) => element("th", {}, say(name)))), ...checks.map((one) => element("tr", {},
        element("td", {}, say(one.name)), element("td", {}, `${number(one.planned)} ${one.unit}`),
        element("td", {}, `${number(one.measured)} ${one.unit}`),
        element("td", {}, one.ratio == null ? "–" : `${one.ratio.toFixed(2)}x`), element("td", {}, one.note)))));
  }));
}

export function factsPanel(runs) {
  return element("section", { class: "facts" }, element("h2", {}, say("run details")), ...runs.map((run) => {
    const body = element("div");
    const open = async () => {
      const facts = await getFacts(run.id);
      body.replaceChildren(
        element("h3", {}, say("recipe")), element("pre", {}, facts.recipe),
        element("h3", {}, say("environment")), element("pre", {}, JSON.stringify(facts.environment, null, 2)),
        element("h3", {}, say("events")), element("pre", {}, run.events.slice(-200).map((event) =>
          `${new Date(1000 * event.time).toLocaleString()}  ${say(event.event)}  ${event.step ?? ""}`).join("\n")));
    };
    return element("details", { ontoggle: open }, element("summary", {}, run.status.name), body);
  }));
}

// The documents of a batch, worst first where their losses are known.
export async function openDocuments(run, step, highest) {
  document.querySelector("dialog")?.remove();
  const body = element("div", {}, say("loading…"));
  const dialog = element("dialog", { onclose: () => { change({ step: "" }); dialog.remove(); } },
    element("header", {}, element("b", {}, say("documents of step {}").replace("{}", step)),
      highest ? element("small", {}, say("the highest between two points")) : null,
      element("button", { onclick: () => dialog.close() }, say("close"))),
    body);
  document.body.append(dialog);
  dialog.showModal();
  change({ step: `${run.id}:${step}` });
  // Names and text come at once. Losses follow where they take about a second, and else when they are asked for.
  const load = async (losses) => {
    if (!losses) body.replaceChildren(say("loading…"));
    else body.querySelector("button")?.replaceWith(element("small", {}, say("computing…")));
    try {
      const found = await getDocuments(run.id, step, losses);
      const failed = losses && found.error;
      if (failed) return void body.prepend(element("p", {}, found.error));
      body.replaceChildren(documentTable(found, load));
      if (found.quick && !losses) await load(true);
    } catch (error) {
      body.replaceChildren(String(error));
    }
  };
  await load(false);
}

function documentTable(found, load) {
  if (found.error) return element("p", {}, found.error);
  if (found.elsewhere)
    return element("p", {}, say("the documents are on the machine of the run; run there: "), element("code", {}, found.elsewhere));
  const known = found.documents.some((one) => one.loss != null);
  const rows = [...found.documents].sort((a, b) => (b.loss ?? 0) - (a.loss ?? 0));
  // Without names, the text stands for the document.
  const named = rows.some((one) => one.title || !one.text);
  const columns = ["loss", "source", ...(named ? ["document"] : []), "tokens", named ? "part of the document" : "document"];
  return element("div", {},
    found.layer_norms?.length ? element("section", {}, element("h3", {}, say("gradient norm by layer")),
      histogramBars({ counts: found.layer_norms.map((norm) => norm ?? 0), edges: found.layer_norms.map((_, layer) => layer).concat(found.layer_norms.length) })) : null,
    known ? null : element("button", { onclick: () => load(true) }, say("compute the loss of each")),
    rows.length ? element("table", {}, element("tr", {}, ...columns.map((head) => element("th", {}, say(head)))),
      ...rows.map((one) => element("tr", { title: one.gid ?? "" },
        element("td", {}, number(one.loss)), element("td", {}, one.source ?? ""),
        named ? element("td", { class: "document" }, one.title || firstWords(one.text) || one.gid || "") : null,
        element("td", {}, String(one.tokens ?? "")),
        element("td", { class: named ? "text" : "text document" }, one.text ?? "")))) : say("no documents"));
}

function firstWords(text) {
  const words = (text ?? "").replace(/\s+/g, " ").trim();
  return words.length > FIRST_WORDS ? `${words.slice(0, FIRST_WORDS)}…` : words;
}
