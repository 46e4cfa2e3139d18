// From blocks of columns, as the server gives them, to what uPlot draws.
import uPlot from "uplot";

export function xOf(block, axis, begun) {
  if (axis === "tokens" && block.tokens) return block.tokens;
  if (axis === "time") return block.times.map((time) => time - begun);
  return block.steps;
}

// Where a step lies on the axis, between the rows around it.
export function positionOf(step, block, x) {
  const steps = block.steps;
  if (!steps.length) return null;
  if (step <= steps[0]) return x[0];
  for (let row = 1; row < steps.length; row++)
    if (steps[row] >= step) {
      const share = (step - steps[row - 1]) / (steps[row] - steps[row - 1] || 1);
      return x[row - 1] + share * (x[row] - x[row - 1]);
    }
  return x[x.length - 1];
}

export function stepAt(place, block, x) {
  return Math.round(positionOf(place, { steps: x }, block.steps));
}

// An exponential moving average with bias correction.
export function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value == null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

const positive = (values) => values.map((value) => (value > 0 ? value : null));

// lines: [{ label, run, colour, dash, block, name }] -> { data, series, bands } for uPlot. A line is its mean, smoothed;
// behind it, faint, the band from min to max where the rows are downsampled, or else the raw values.
export function plotted(lines, options) {
  const tables = [], series = [{}], bands = [];
  for (const line of lines) {
    const x = xOf(line.block, options.axis, line.begun);
    const scaled = (values) => (options.scale === 1 ? values : values.map((value) => (value == null ? null : options.scale * value)));
    const fit = (values) => scaled(options.logy ? positive(values) : values);
    const mean = line.block.mean[line.name];
    const columns = [fit(smoothed(mean, options.smooth))];
    series.push({ line, stroke: line.colour, width: 1.6, dash: line.dash, spanGaps: true, points: { show: lonely(mean) } });
    if (line.block.low) {
      columns.push(fit(line.block.high[line.name]), fit(line.block.low[line.name]));
      const hidden = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
      bands.push({ series: [series.length, series.length + 1], fill: line.colour + "2e" });
      series.push(hidden, { ...hidden });
    } else if (options.smooth) {
      columns.push(fit(mean));
      series.push({ raw: true, stroke: line.colour + "45", width: 1, spanGaps: true, points: { show: false } });
    }
    tables.push(options.logx ? dropNonPositive([x, ...columns]) : [x, ...columns]);
  }
  return { data: tables.length ? uPlot.join(tables) : [[]], series, bands };
}

// As plotted, for lines of one block that add up: each column is the sum of its line and those below it. Series keep
// the values of their own lines.
export function stacked(lines, options) {
  const [{ block, begun }] = lines, own = lines.map((line) => smoothed(block.mean[line.name], options.smooth));
  const sums = [];
  for (const values of own)
    sums.push(values.map((value, row) => (value == null ? null : value + (sums.at(-1)?.[row] ?? 0))));
  const table = [xOf(block, options.axis, begun), ...sums, ...own];
  const data = options.logx ? dropNonPositive(table) : table;
  const series = lines.map((line, at) => ({
    line, own: data[1 + lines.length + at], stroke: line.colour, width: 1, spanGaps: true, points: { show: false },
    fill: at === 0 ? line.colour + "b0" : undefined,
  }));
  const bands = lines.slice(1).map((line, at) => ({ series: [at + 2, at + 1], fill: line.colour + "b0" }));
  return { data: data.slice(0, 1 + lines.length), series: [{}, ...series], bands };
}

// A log axis has no zero.
function dropNonPositive(table) {
  const keep = table[0].map((x, row) => (x > 0 ? row : -1)).filter((row) => row >= 0);
  return table.map((column) => keep.map((row) => column[row]));
}

const lonely = (values) => values.filter((value) => value != null).length < 60;

// A row that was just written, into a block that a chart holds.
export function append(block, row, tokens) {
  const last = block.steps.at(-1);
  if (row.step < last) return;  // already in the response that the block came from
  const again = row.step === last;
  if (!again) {
    block.steps.push(row.step);
    block.times.push(row.time);
    block.tokens?.push(tokens);
  }
  for (const columns of [block.mean, block.low, block.high].filter(Boolean))
    for (const name of Object.keys(columns)) {
      const value = row[name] ?? null;
      if (!again) columns[name].push(value);
      else if (value !== null) columns[name][columns[name].length - 1] = value;
    }
}
