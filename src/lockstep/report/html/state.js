// What is shown, and the same in the address after "#", so that a link or a reload leads to it.

const DEFAULTS = {
  view: "answers", // "curves", "health"
  step: null, // null: the last one, also when the page is written anew
  prompt: null, // a prompt's key
  base: "previous", // "first", "other" (the other run), or a step
  mode: "text", // "difference", "logprobs"
  q: "",
  filter: "all",
  sort: "order",
  metric: null,
  curve: "",
};
const VIEWS = ["answers", "curves", ...(hasHealth ? ["health"] : [])];
const CHOICES = { view: VIEWS, mode: ["text", "difference", "logprobs"] };

const byKey = new Map(prompts.map((prompt, place) => [prompt.key, place]));
const ordinary = columns.filter((name) => name !== "num_tokens" && name !== "mean_logprob");
const defaultMetric = ordinary.find((name) => name === "reward") ?? ordinary[0] ?? columns.at(-1) ?? null;

let state = { ...DEFAULTS };
let render = () => {};
let drawing = false;
let writing = 0;
let readHash = ""; // the address that the state is from or was written to

/** Change what is shown. The address follows a moment later, since browsers limit how often it may change. */
function show(changes) {
  state = { ...state, ...changes };
  clearTimeout(writing);
  writing = setTimeout(writeAddress, 150);
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    render();
  });
}

/** The address of what is shown, after "#". */
function address() {
  const parts = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    if (value !== DEFAULTS[name] && value !== null) parts.set(name, value);
  }
  return parts.toString();
}

function writeAddress() {
  clearTimeout(writing);
  // Another address than was read last is that of a link, which is about to be read.
  if (address() === location.hash.slice(1) || location.hash !== readHash) return;
  history.replaceState(null, "", `#${address()}`);
  readHash = location.hash;
}

/** Take what the address says; what it cannot mean in this report is as if it were not there. */
function readAddress() {
  readHash = location.hash;
  const parts = new URLSearchParams(location.hash.slice(1));
  const found = { ...DEFAULTS };
  for (const name of Object.keys(DEFAULTS)) if (parts.has(name)) found[name] = parts.get(name);
  for (const [name, known] of Object.entries(CHOICES)) if (!known.includes(found[name])) found[name] = DEFAULTS[name];
  found.step = wholeNumber(found.step);
  if (!["previous", "first", "other"].includes(found.base)) found.base = wholeNumber(found.base) ?? "previous";
  if (found.base === "other" && runs.length < 2) found.base = "previous";
  if (!byKey.has(found.prompt)) found.prompt = null;
  if (!columns.includes(found.metric)) found.metric = null;
  if (found.mode === "logprobs" && !hasLogprobs) found.mode = "text";
  state = found;
}

function wholeNumber(text) {
  return text !== null && /^\d{1,16}$/.test(text) ? Number(text) : null;
}

/** The place in `steps` of the step that is shown. */
function stepPlace() {
  return state.step === null ? steps.length - 1 : Math.max(0, lastUpTo(steps, state.step));
}

function currentStep() {
  return steps[stepPlace()];
}

/** Show the step at a place of `steps`; the last one is the newest, whichever that is. */
function showStepAt(place) {
  const inside = Math.min(steps.length - 1, Math.max(0, place));
  show({ step: inside === steps.length - 1 ? null : steps[inside] });
}

function currentMetric() {
  return state.metric ?? defaultMetric;
}

/** What "since" means for a reader. */
function baseText() {
  if (state.base === "previous") return `last ${data.axis}`;
  if (state.base === "first") return `the first ${data.axis}`;
  if (state.base === "other") return runs[0].name;
  return `${data.axis} ${state.base}`;
}
