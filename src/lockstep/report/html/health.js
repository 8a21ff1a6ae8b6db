// Health: a strip for each state, a cell for each round, and the alarms. A cell leads to its answers.

const STRIP_HEIGHT = 22;
const SHOWN_ALARMS = 5; // the last ones; earlier ones unfold

/** The alarms of all runs, and for each run the strips of its samples and of its rollouts. */
function drawHealth() {
  const panel = byId("health");
  const scrolled = panel.scrollTop;
  const blocks = runs.flatMap((run) => Object.entries(run.strips).map(([name, strip]) => strips(run, name, strip)));
  panel.replaceChildren(alarmList(), ...blocks.map(({ block }) => block));
  const drawn = blocks.flatMap(({ rows }) => rows);
  // All are read before any is written, so that the page is laid out once.
  const widths = drawn.map(({ cells }) => cells.clientWidth);
  drawn.forEach((row, place) => row.draw(widths[place]));
  panel.scrollTop = scrolled;
}

function alarmList() {
  const told = runs.flatMap((run) => run.alarms.map((alarm) => ({ run, alarm })));
  const items = told.map(({ run, alarm }) =>
    h("li", { class: "told" }, runs.length > 1 ? badge(run) : null,
      h("button", { type: "button", class: "when", title: "To the answers", onclick: () => openState(alarm.state, alarm.step) }, `${data.axis} ${alarm.step.toLocaleString("en")}`),
      addText(h("span", { dir: "auto" }), `${alarm.name}: ${alarm.line.replace(/^step [\d,]+: /, "")}`)),
  );
  const earlier = items.splice(SHOWN_ALARMS);
  const rest = earlier.length ? h("details", {}, h("summary", { class: "muted" }, count(earlier.length, "earlier alarm")), h("ol", { class: "alarms" }, earlier)) : "";
  const none = h("p", { class: "muted" }, "No alarm: no state of answers has become more frequent than chance allows.");
  return h("section", { class: "block" }, h("h3", {}, count(told.length, "alarm")), told.length ? [h("ol", { class: "alarms" }, items), rest] : none);
}

/** The strips of a run's samples or rollouts. */
function strips(run, name, strip) {
  const present = Object.keys(strip.states).filter((state) => strip.states[state].some(Boolean));
  const never = Object.keys(strip.states).filter((state) => !present.includes(state));
  const rows = present.map((state) => stripRow(run, name, strip, state));
  const title = h("h3", {}, runs.length > 1 ? badge(run) : null, name === "samples" ? "Samples" : "Rollouts");
  const caption = name === "samples" ? "The share of a round's answers in each state. Click to see them." : "The share of all answers of a rollout; a click leads to those that are kept.";
  const axis = h("div", { class: "strip-axis muted" }, h("span", {}, strip.steps[0].toLocaleString("en")), h("span", {}, strip.steps.at(-1).toLocaleString("en")));
  return {
    rows,
    block: h("section", { class: "block" }, title, h("p", { class: "muted" }, caption), rows.map(({ element }) => element), rows.length ? axis : "",
      never.length ? h("p", { class: "muted never" }, `never: ${never.join(", ")}`) : ""),
  };
}

function stripRow(run, name, strip, state) {
  const cells = h("div", { class: "strip" });
  const counts = strip.states[state];
  const at = lastUpTo(strip.steps, currentStep());
  const now = at < 0 ? "–" : percent(counts[at], strip.answers[at]);
  const draw = (width) => {
    if (width) cells.replaceChildren(stripImage(run, name, strip, state, width, at));
  };
  return { cells, draw, element: h("div", { class: "strip-row" }, h("span", { class: "strip-name" }, state), cells, h("span", { class: "strip-now" }, now)) };
}

function stripImage(run, name, strip, state, width, at) {
  const [steps, size] = [strip.steps, width / strip.steps.length];
  const gap = size > 4 ? 1 : 0;
  const drawn = steps.map((step, place) => {
    const [count, answers] = [strip.states[state][place], strip.answers[place]];
    const opacity = count ? (0.15 + 0.85 * (count / answers)).toFixed(3) : null;
    const title = svg("title", {}, `${data.axis} ${step.toLocaleString("en")}: ${state} in ${count} of ${answers} answers (${percent(count, answers)})`);
    return svg("rect", { class: opacity ? "cell" : "cell none", x: (place * size).toFixed(2), y: 0, width: Math.max(0.5, size - gap).toFixed(2), height: STRIP_HEIGHT, "fill-opacity": opacity }, title);
  });
  const marks = run.alarms.filter((alarm) => alarm.state === state && (alarm.name === "rollout") === (name === "rollouts")).map((alarm) => {
    const x = (Math.max(0, lastUpTo(steps, alarm.step)) + 0.5) * size;
    const from = Math.max(0, lastUpTo(steps, alarm.began)) * size;
    return [
      svg("path", { class: "alarm-since", d: `M${from.toFixed(1)} ${STRIP_HEIGHT + 4}H${(x + size / 2).toFixed(1)}` }),
      svg("path", { class: "alarm-mark", d: `M${x.toFixed(1)} ${STRIP_HEIGHT + 1}l5 9h-10z` }, svg("title", {}, alarm.line)),
    ];
  });
  const here = at < 0 ? null : svg("rect", { class: "here", x: (at * size).toFixed(2), y: 0, width: Math.max(1, size - gap).toFixed(2), height: STRIP_HEIGHT });
  const image = svg("svg", { width, height: STRIP_HEIGHT + 11, role: "img", "aria-label": `${state} over the ${data.axis}s` }, drawn, here, marks.flat());
  image.addEventListener("click", (event) => {
    const place = Math.floor((event.clientX - image.getBoundingClientRect().left) / size);
    openState(state, steps[Math.min(steps.length - 1, Math.max(0, place))]);
  });
  return image;
}

function percent(count, answers) {
  const share = answers ? (100 * count) / answers : 0;
  return `${share.toFixed(share < 10 && share !== Math.round(share) ? 1 : 0)} %`;
}

/** Show the answers of a step that are in a state. */
function openState(state, step) {
  const filter = `health:${state}`;
  showStepAt(nearest(steps, step));
  show({ view: "answers", filter: Object.hasOwn(filters(), filter) ? filter : "all", q: "", prompt: null });
  showPane("list");
}
