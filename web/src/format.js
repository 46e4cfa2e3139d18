export function number(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e5 || (size < 1e-3 && size > 0)) return compact(value);
  return String(+value.toPrecision(size >= 1000 ? 5 : 4));
}

export function compact(value) {
  const size = Math.abs(value);
  for (const [suffix, factor] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["K", 1e3]])
    if (size >= factor) return +(value / factor).toPrecision(3) + suffix;
  return size && size < 1e-3 ? value.toExponential(1).replace(".0e", "e") : String(+value.toPrecision(3));
}

export function duration(seconds) {
  if (seconds == null || !Number.isFinite(seconds)) return "–";
  if (seconds < 60) return `${+seconds.toPrecision(2)}s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes}m${pad(seconds % 60)}s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours}h${pad(minutes % 60)}m` : `${Math.floor(hours / 24)}d${pad(hours % 24)}h`;
}

const pad = (value) => String(Math.floor(value)).padStart(2, "0");
