// The view settings, kept in the URL fragment, so that a link shows the same charts.
const DEFAULTS = {
  x: "step",        // step, tokens, time
  logx: "",
  logy: "",
  smooth: "0.8",
  from: "",         // steps
  to: "",
  hide: "",         // runs, by number
  find: "",
  theme: "",        // light, dark; empty follows the system
  lang: "",
  step: "",         // the step whose documents are open, as run:step
};

export const state = { ...DEFAULTS };
const listeners = [];

export function onChange(listener) {
  listeners.push(listener);
}

export function change(changes) {
  Object.assign(state, changes);
  const kept = Object.entries(state).filter(([name, value]) => value !== DEFAULTS[name]);
  history.replaceState(null, "", "#" + new URLSearchParams(kept));
  for (const listener of listeners) listener(Object.keys(changes));
}

export function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const name of Object.keys(DEFAULTS)) state[name] = given.get(name) ?? DEFAULTS[name];
}

export const hiddenRuns = () => new Set(state.hide.split(".").filter(Boolean).map(Number));
