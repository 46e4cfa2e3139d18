// The table and the plot of an experiment.
import uPlot from "uplot";
import { COLOURS } from "./chart.js";
import { element } from "./element.js";
import { compact, duration, number } from "./format.js";
import { say } from "./words.js";

const HEIGHT = 220;
const MAX_LAYERS = 20;  // measurements at one place
const MAX_TICKS = 12;
const SWEEPS = ["sweep", "mixture-search"];
const OPEN_STATES = ["planned", "running", "stopped"];

export const isUnfinished = ({ record }) => !record || record.variants.some((one) => OPEN_STATES.includes(one.state));

export function experimentPanel({ name, record, trouble }) {
  const header = (...more) => element("header", {}, element("h2", {}, `${say("experiment")} ${name}`), ...more);
  if (!record)
    return element("section", { class: "experiment" }, header(),
      element("p", { class: "trouble" }, `${say("cannot be read")}: ${trouble}`));
  const done = record.variants.filter((one) => one.state === "done").length;
  return element("section", { class: "experiment", "data-experiment": name },
    header(element("small", {}, filled("{} of {} runs done", done, record.variants.length)),
      record.budget == null ? null : element("small", {}, `${say("budget")} ${record.budget}`)),
    element("div", {}, groupTable(record), ...verdictLines(record), ...problemLines(record)),
    record.plot ? valuePlot(record.plot) : null,
    record.fit ? element("div", {}, sourceTable(record.fit), element("p", {}, fitText(record.fit))) : null);
}

function groupTable({ groups, kind }) {
  const heads = ["variant", "bits per byte", "best", "seeds", "tok/s", "time"];
  return element("table", {}, element("tr", {}, ...heads.map((head) => element("th", {}, say(head)))),
    ...groups.map((group, place) => element("tr", { class: SWEEPS.includes(kind) && place === 0 && group.bits_per_byte != null ? "best" : "" },
      element("td", {}, group.group), element("td", {}, withSpread(group.bits_per_byte, group.spread)),
      element("td", {}, fixed(group.best_bits_per_byte)), element("td", {}, `${group.seeds.length} / ${group.runs}`),
      element("td", {}, group.tokens_per_second == null ? "–" : compact(group.tokens_per_second)),
      element("td", {}, duration(group.seconds)))));
}

const fixed = (value) => (value == null ? "–" : value.toFixed(4));
const withSpread = (value, spread) => fixed(value) + (spread == null ? "" : ` ± ${fixed(spread)}`);

// What a mixture search says about the sources.
function sourceTable({ sources }) {
  const heads = ["source", "recipe", "suggested", "1% more", "95% interval"];
  return element("table", { "data-table": "sources" }, element("tr", {}, ...heads.map((head) => element("th", {}, say(head)))),
    ...sources.map((one) => element("tr", {}, ...[one.source, one.recipe.toFixed(3), one.suggested == null ? "–" : one.suggested.toFixed(3),
      signed(one.effect), `${signed(one.low)} – ${signed(one.high)}`].map((cell) => element("td", {}, cell)))));
}

const signed = (value) => (value > 0 ? "+" : "") + value.toFixed(4);
const fitText = (fit) => filled("leave-one-out error {} (the mean: {}), rank correlation {}",
  fixed(fit.error), fixed(fit.mean_error), fit.rank_correlation.toFixed(2));

function verdictLines({ verdicts, kind }) {
  const unknown = kind !== "mixture-search" && verdicts.some((one) => one.margin == null);
  return [...verdicts.filter((one) => one.margin != null).map(verdictText), ...(unknown ? [say("the noise between seeds is unknown")] : [])]
    .map((text) => element("p", { class: "verdict" }, text));
}

function verdictText({ reference, other, difference, margin }) {
  const size = Math.abs(difference);
  if (size <= margin)
    return filled("no difference beyond the noise between seeds: {} ({} minus {})", withSpread(difference, margin), other, reference);
  const [better, worse] = difference > 0 ? [reference, other] : [other, reference];
  return filled("{} is better than {} by {}", better, worse, withSpread(size, margin));
}

function problemLines({ variants }) {
  return variants.filter((one) => one.state === "failed")
    .map((one) => element("p", { class: "trouble" }, `${one.group}, ${say("seed")} ${one.seed}: ${say("failed")}: ${one.reason}`));
}

const filled = (words, ...values) => values.reduce((text, value) => text.replace("{}", () => value), say(words));

function valuePlot(plot) {
  const canvas = element("div", { class: "canvas" });
  const legend = element("div", { class: "legend" }, ...plot.curves.filter((curve) => curve.label).map((curve) =>
    element("span", {}, element("i", { style: `background:${colourOf(curve)}` }), curve.label)));
  const root = element("div", { "data-plot": plot.x_label }, element("h2", {}, plot.x_label), legend, canvas);
  const drawn = () => {  // once it is on the page, where it has a width
    if (!canvas.clientWidth) return;
    canvas.replaceChildren();
    new uPlot(options(plot, canvas.clientWidth), columns(plot), canvas);
  };
  new ResizeObserver(drawn).observe(canvas);
  return root;
}

const colourOf = (curve) => COLOURS[curve.colour % COLOURS.length] ?? COLOURS[0];

// A line through the means and the single measurements of each curve, over all their places.
function columns(plot) {
  const tables = plot.curves.flatMap((curve) => [curve.line, ...measurements(curve.points)]).map((pairs) => {
    const sorted = pairs.filter(([x]) => Number.isFinite(x) && (!plot.log_x || x > 0)).sort((a, b) => a[0] - b[0]);
    return [sorted.map(([x]) => x), sorted.map(([, y]) => y)];
  });
  return uPlot.join(tables);
}

// Measurements at the same place go to different columns: a column has one value at each place.
function measurements(points) {
  const layers = [];
  for (const point of points) {
    const layer = layers.find((one) => one.every(([x]) => x !== point[0]));
    if (layer) layer.push(point);
    else if (layers.length < MAX_LAYERS) layers.push([point]);
  }
  return layers;
}

function options(plot, width) {
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--ink-soft").trim(), grid = style.getPropertyValue("--grid").trim();
  const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "11px system-ui" };
  const places = [...new Set(plot.curves.flatMap((curve) => curve.line.map(([x]) => x)))];
  const shown = (x) => (plot.categories.length ? plot.categories[x] ?? "" : number(x));
  const series = plot.curves.flatMap((curve) => [
    { stroke: colourOf(curve), width: 1.6, spanGaps: true, points: { show: false } },
    ...measurements(curve.points).map(() => ({ stroke: colourOf(curve), paths: () => null, points: { show: true, size: 7 } })),
  ]);
  return {
    width, height: HEIGHT, padding: [10, 20, 0, 0],
    series: [{}, ...series],
    scales: { x: { time: false, distr: plot.log_x ? 3 : 1 } },
    axes: [{ ...axis, size: 28, ...(places.length > MAX_TICKS ? {} : { splits: () => places }), values: (_, splits) => splits.map(shown) },
      { ...axis, size: 52, values: (_, splits) => splits.map((value) => number(value)) }],
    legend: { show: false },
    cursor: { show: false },
  };
}
