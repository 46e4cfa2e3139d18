// Evaluations of checkpoints: a table with the trend of each curve. The curves are charts.
import { element } from "./element.js";
import { number } from "./format.js";
import { say } from "./words.js";

const SIGNIFICANT = 0.05;
const KIND = "probes";

export const isProbe = (name) => name.startsWith(`${KIND}/`);

export function probeTable(runs) {
  const shown = runs.flatMap((run) => run.evals.filter((curve) => curve.kind === KIND).map((curve) => ({ run, curve })));
  if (!shown.length) return null;
  const rising = shown.filter(({ curve }) => trends(curve)).length;
  const tested = shown.filter(({ curve }) => curve.p != null).length;
  const heads = ["probe", "suite", "group", "metric", "first", "last", "expected", "Kendall's τ", "p (Holm)"];
  const sorted = shown.toSorted((a, b) => (a.curve.p ?? 2) - (b.curve.p ?? 2) || (b.curve.tau ?? -2) - (a.curve.tau ?? -2));
  return element("details", {},
    element("summary", {}, say("{} of {} probes trend as expected (p < 0.05)").replace("{}", rising).replace("{}", tested)),
    element("table", {}, element("tr", {}, ...heads.map((head) => element("th", {}, say(head)))), ...sorted.map(({ run, curve }) =>
      element("tr", { class: trends(curve) ? "best" : "" },
        element("td", {}, runs.length > 1 ? `${run.status.name} · ${curve.name}` : curve.name),
        ...[curve.suite, curve.group, say(curve.metric), number(curve.values[0]), number(curve.values.at(-1)),
          curve.better === "higher" ? "↑" : "↓", curve.tau == null ? "–" : curve.tau.toFixed(2), number(curve.p)]
          .map((text) => element("td", {}, text))))));
}

const trends = (curve) => curve.p != null && curve.p < SIGNIFICANT;
