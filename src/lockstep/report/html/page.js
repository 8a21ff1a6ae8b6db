// The page: its bars, its keys, and what happens when something is chosen.

const KEYS = [
  ["← →", `the ${data.axis} before, after`],
  ["Home, End", `the first, the last ${data.axis}`],
  ["↑ ↓ or k j", "the prompt before, after"],
  ["/", "search"],
  ["t, d, l", "text, difference, log-probability"],
  ["c", "only what changed, or all"],
  ["v", "the next view: answers, curves, health"],
  ["Esc", "leave the search, or go back to the list"],
  ["?", "this help"],
];

let listed = [];
const list = new VirtualList(byId("list"), ITEM_HEIGHT, (prompt, place) => listItem(prompt, place, chosenPrompt(), listed.length));

/** The prompt that is open: the one of the address, else the first of the list. */
function chosenPrompt() {
  if (state.prompt !== null) return byKey.get(state.prompt);
  return listed.length ? listed[0] : null;
}

function openPrompt(prompt) {
  show({ prompt: prompts[prompt].key });
  showPane("detail");
}

function movePrompt(by) {
  const place = listed.indexOf(chosenPrompt());
  const next = listed[place < 0 ? 0 : Math.min(listed.length - 1, Math.max(0, place + by))];
  if (next !== undefined) show({ prompt: prompts[next].key });
}

/** On a narrow screen, list and prompt take turns. */
function showPane(name) {
  document.body.dataset.pane = name;
  if (name === "list") list.draw();
}

// --- drawing ---

let drawnChoice = null;

render = () => {
  const answersShown = state.view === "answers";
  for (const button of byId("views").children) button.setAttribute("aria-current", String(button.dataset.view === state.view));
  byId("answers").hidden = !answersShown;
  byId("curves").hidden = state.view !== "curves";
  byId("health").hidden = state.view !== "health";
  drawTimeline();
  if (!answersShown) {
    if (state.view === "curves") drawCurves();
    else drawHealth();
    return;
  }
  drawFilters();
  listed = chosenPrompts();
  const chosen = chosenPrompt();
  const narrowed = listed.length < prompts.length;
  byId("count").textContent = narrowed ? `${listed.length.toLocaleString("en")} of ${count(prompts.length, "prompt")}` : count(prompts.length, "prompt");
  list.setItems(listed);
  const place = listed.indexOf(chosen);
  byId("list").setAttribute("aria-activedescendant", place < 0 ? "" : `item-${place}`);
  if (place >= 0 && chosen !== drawnChoice) list.reveal(place);
  drawnChoice = chosen;
  drawDetail(chosen, listed);
};

/** Steps, what they are compared with, and the metric. */
function drawTimeline() {
  const place = stepPlace();
  const slider = byId("step");
  slider.max = steps.length - 1;
  slider.value = place;
  slider.setAttribute("aria-valuetext", `${data.axis} ${steps[place]}`);
  byId("timeline").classList.toggle("single", steps.length < 2);
  byId("step-back").disabled = place === 0;
  byId("step-on").disabled = place === steps.length - 1;
  const traced = data.runs[0].traces.find(([first, last]) => first <= steps[place] && steps[place] <= last);
  byId("step-text").replaceChildren(
    h("strong", {}, `${data.axis} ${steps[place].toLocaleString("en")}`),
    h("span", { class: "muted" }, ` of ${steps.at(-1).toLocaleString("en")}`),
    ...(traced ? [" ", h("a", { href: traced[2], title: "The profiler trace of this step, beside the run" }, "traced")] : []),
  );
  choose(byId("base"), baseChoices(), String(state.base));
  choose(byId("metric"), columns.map((name) => [name, name]), currentMetric());
  byId("metric-field").hidden = columns.length === 0;
  drawBand(place);
}

function baseChoices() {
  const found = [["previous", `previous ${data.axis}`], ["first", `first ${data.axis}`]];
  if (runs.length > 1) found.push(["other", `run ${labels[0]} (for ${labels[1]})`]);
  return [...found, ...steps.map((step) => [String(step), `${data.axis} ${step.toLocaleString("en")}`])];
}

/** Fill a menu where its choices are other ones, and choose. */
function choose(menu, choices, value) {
  const made = JSON.stringify(choices);
  if (menu.dataset.made !== made) {
    menu.replaceChildren(...choices.map(([name, text]) => h("option", { value: name }, text)));
    menu.dataset.made = made;
  }
  menu.value = value;
}

/** The mean of the metric above the slider, a place per step. */
function drawBand(place) {
  const band = byId("band");
  const metric = currentMetric();
  const width = band.clientWidth;
  if (!width || metric === null || steps.length < 2) {
    band.replaceChildren();
    return;
  }
  const lines = runs.filter((run) => run.meanCurve(metric)).map((run) => {
    const curve = run.meanCurve(metric);
    const last = new Map(curve.steps.map((step, at) => [lastUpTo(steps, step), curve.values[at]]));
    last.delete(-1);
    return { steps: [...last.keys()], values: [...last.values()], style: `run-${run.place}` };
  });
  for (const line of lines) if (line.steps.at(-1) < steps.length - 1) [line.steps, line.values] = [[...line.steps, steps.length - 1], [...line.values, null]];
  const drawn = sparkline(lines, width, 34, place);
  band.replaceChildren(...(drawn ? [drawn] : []));
}

/** Write a text into a field in which nobody is typing. */
function setField(field, text) {
  if (field !== document.activeElement && field.value !== text) field.value = text;
}

function drawFilters() {
  const name = state.sort.replace(/^-/, "");
  choose(byId("filter"), Object.entries(filters()).map(([key, [text]]) => [key, text]), Object.hasOwn(filters(), state.filter) ? state.filter : "all");
  choose(byId("sort"), Object.entries(sorts()).map(([key, [text]]) => [key, text]), Object.hasOwn(sorts(), name) ? name : "order");
  const falling = state.sort.startsWith("-");
  byId("direction").textContent = falling ? "↓" : "↑";
  byId("direction").title = falling ? "From high to low" : "From low to high";
  byId("filter").classList.toggle("active", state.filter !== "all");
  setField(byId("search"), state.q);
  setField(byId("curve-search"), state.curve);
}

// --- what is chosen ---

function on(id, event, work) {
  byId(id).addEventListener(event, work);
}

for (const button of byId("views").children) button.addEventListener("click", () => show({ view: button.dataset.view }));
on("step", "input", (event) => showStepAt(Number(event.target.value)));
on("step-back", "click", () => showStepAt(stepPlace() - 1));
on("step-on", "click", () => showStepAt(stepPlace() + 1));
on("base", "change", ({ target }) => show({ base: wholeNumber(target.value) ?? target.value, mode: state.mode === "text" ? "difference" : state.mode }));
on("metric", "change", ({ target }) => show({ metric: target.value === defaultMetric ? null : target.value }));
on("filter", "change", ({ target }) => show({ filter: target.value }));
on("sort", "change", ({ target }) => show({ sort: (state.sort.startsWith("-") ? "-" : "") + target.value }));
on("direction", "click", () => show({ sort: state.sort.startsWith("-") ? state.sort.slice(1) : `-${state.sort}` }));
on("help-button", "click", () => byId("help").showModal());
on("copy-link", "click", ({ currentTarget }) => {
  writeAddress();
  copy(location.href, currentTarget);
});

function whenStill(work) {
  let waiting = 0;
  return (event) => {
    clearTimeout(waiting);
    waiting = setTimeout(work, 100, event.target.value);
  };
}

on("search", "input", whenStill((q) => show({ q })));
on("curve-search", "input", whenStill((curve) => show({ curve })));

/** Copy a text; the button says whether that worked. */
async function copy(text, button) {
  const name = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = name), 1500);
}

// --- keys ---

const ACTIONS = {
  ArrowLeft: () => showStepAt(stepPlace() - 1),
  ArrowRight: () => showStepAt(stepPlace() + 1),
  Home: () => showStepAt(0),
  End: () => showStepAt(steps.length - 1),
  ArrowUp: () => movePrompt(-1),
  ArrowDown: () => movePrompt(1),
  k: () => movePrompt(-1),
  j: () => movePrompt(1),
  "/": () => byId(state.view === "curves" ? "curve-search" : "search").select(),
  t: () => show({ mode: "text" }),
  d: () => show({ mode: state.mode === "difference" ? "text" : "difference" }),
  l: () => hasLogprobs && show({ mode: state.mode === "logprobs" ? "text" : "logprobs" }),
  c: () => show({ filter: state.filter === "changed" ? "all" : "changed" }),
  v: () => show({ view: VIEWS[(VIEWS.indexOf(state.view) + 1) % VIEWS.length] }),
  "?": () => byId("help").showModal(),
  Escape: () => showPane("list"),
};

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  const typing = event.target.matches("input[type=search], select");
  if (typing && event.key === "Escape") event.target.blur();
  if (typing && event.key === "Enter") byId("list").focus();
  if (typing || !ACTIONS[event.key]) return;
  event.preventDefault();
  ACTIONS[event.key]();
});

// --- light and dark ---

const THEMES = ["auto", "light", "dark"];

/** What the browser keeps for this page; nothing where it is told not to. */
function kept(name, value) {
  try {
    if (value === undefined) return localStorage.getItem(name);
    localStorage.setItem(name, value);
  } catch {
    // A page from a file or a mail may not be allowed to keep anything.
  }
  return null;
}

function setTheme(name) {
  const theme = THEMES.includes(name) ? name : "auto";
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = { auto: "◐", light: "○", dark: "●" }[theme];
  byId("theme").title = { auto: "Light or dark as the system", light: "Light", dark: "Dark" }[theme];
  byId("theme").setAttribute("aria-label", byId("theme").title);
  kept("lockstep-theme", theme);
}

on("theme", "click", () => setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]));

// --- a run that goes on ---

/** Load the page again now and then; the address keeps the reader's place, and the tab how far the panes are scrolled. */
function followRun() {
  const panes = ["list", "detail", "curve-list", "health"];
  try {
    const before = JSON.parse(sessionStorage.getItem("lockstep-scroll") ?? "{}");
    for (const pane of panes) byId(pane).scrollTop = before[pane] ?? 0;
    list.draw();
    if (before.pane) showPane(before.pane);
  } catch {
    // Without a memory of the tab, the panes begin at their tops.
  }
  let paused = kept("lockstep-reload") === "off";
  const button = byId("reload");
  const tell = () => {
    button.textContent = paused ? "Paused" : "Live";
    button.title = paused ? "The page stays as it is. Click to follow the run." : `Loads itself again every ${data.reload_s} s. Click to stop.`;
    button.classList.toggle("live", !paused);
    kept("lockstep-reload", paused ? "off" : "on");
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    paused = !paused;
    tell();
  });
  tell();
  setInterval(() => {
    const busy = document.activeElement?.matches("input[type=search]") || byId("help").open || !getSelection().isCollapsed;
    if (paused || busy || document.hidden) return;
    writeAddress();
    try {
      const scrolled = Object.fromEntries(panes.map((pane) => [pane, byId(pane).scrollTop]));
      sessionStorage.setItem("lockstep-scroll", JSON.stringify({ ...scrolled, pane: document.body.dataset.pane }));
    } catch {
      // As above.
    }
    location.reload();
  }, data.reload_s * 1000);
}

// --- start ---

byId("keys").append(...KEYS.flatMap(([key, does]) => [h("dt", {}, key), h("dd", {}, does)]));
const told = [...data.notes, `Made ${data.made} from ${runs.map((run) => `${run.name}: ${run.files.join(", ")}`).join("; ")}. Numbers have six significant digits.`];
byId("notes").append(...told.map((note) => addText(h("li"), note)));
const rowCount = runs.reduce((sum, run) => sum + run.when.length, 0);
byId("summary").append(
  ...(runs.length > 1 ? runs.flatMap((run) => [badge(run), `${run.name} · `]) : []),
  [count(prompts.length, "prompt"), count(steps.length, data.axis), count(rowCount, "answer")].join(" · "),
);
for (const button of byId("views").children) button.hidden = !VIEWS.includes(button.dataset.view);
if (data.notes.length) byId("help-button").classList.add("noted");
showPane("list");
setTheme(kept("lockstep-theme"));
readAddress();
// Where most prompts are asked once, as in rollouts, those of the step that is shown are what people look for.
if (!location.hash && steps.length > 2 && rowCount < (prompts.length * runs.length * steps.length) / 2) state.filter = "asked";
if (state.prompt !== null) showPane("detail");
render();
if (data.reload_s) followRun();
addEventListener("hashchange", () => {
  readAddress();
  render();
});
let resizing = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(resizing);
  resizing = requestAnimationFrame(() => {
    drawBand(stepPlace());
    if (state.view === "health") drawHealth();
  });
});
requestAnimationFrame(() => setTimeout(() => performance.mark("report-shown")));
