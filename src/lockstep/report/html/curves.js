// All curves: what the answers say in the mean, and what the run logged.

/** Every curve by its name, a line per run; those of rewards and of the answers come first. */
function allCurves() {
  const found = new Map();
  const put = (name, run, curve) => {
    if (!found.has(name)) found.set(name, []);
    found.get(name).push({ ...curve, label: runs.length > 1 ? labels[run.place] : "value", style: `run-${run.place}` });
  };
  if (steps.length > 1) {
    for (const name of columns) {
      for (const run of runs) {
        const curve = run.meanCurve(name);
        if (curve && !curve.logged) put(`answers/${name}`, run, curve);
      }
    }
  }
  for (const run of runs) {
    for (const [name, curve] of Object.entries(run.series)) put(name, run, { steps: curve.steps, values: curve.values.map(number) });
  }
  const first = [...found.keys()].filter((name) => name.startsWith("reward/"));
  return new Map([...first, ...found.keys()].map((name) => [name, found.get(name)]));
}

let curveCache = null;

function isConstant({ values }) {
  return values.every((value) => value === values[0]);
}

/** Curves that never change, in a line of their own. */
function constants(group, names) {
  if (!names.length) return "";
  const found = names.map((name) => {
    const title = group ? name.slice(group.length + 1) : name;
    const values = curveCache.get(name).map((line) => h("dd", { class: `now ${line.style}` }, format(line.values[0])));
    return h("div", {}, h("dt", {}, title), values);
  });
  return h("dl", { class: "figures constants" }, h("div", {}, h("dt", {}, "constant:")), found);
}

function drawCurves() {
  curveCache ??= allCurves();
  const needle = state.curve.trim().toLowerCase();
  const names = [...curveCache.keys()].filter((name) => name.toLowerCase().includes(needle));
  const groups = new Map();
  for (const name of names) {
    const slash = name.indexOf("/");
    const group = slash < 0 ? "" : name.slice(0, slash);
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push(name);
  }
  const changes = runs.flatMap((run) =>
    run.changes.map(([step, text]) => h("p", { class: "muted" },
      `${runs.length > 1 ? `${labels[run.place]}: from` : "From"} step ${step.toLocaleString("en")} on ${text}.`)),
  );
  const shown = [...groups].map(([group, members]) => {
    const steady = members.filter((name) => curveCache.get(name).every(isConstant));
    const cards = members.filter((name) => !steady.includes(name)).map((name) => {
      const title = group ? name.slice(group.length + 1) : name;
      return new Chart({ title, lines: curveCache.get(name), step: currentStep(), onPick: pickStep }).element;
    });
    const caption = group === "answers" ? h("p", { class: "muted" }, "The mean over all samples of a step, from the rows.") : "";
    return h("section", { class: "block" }, h("h3", {}, group || "other"), caption, cards.length ? h("div", { class: "charts" }, cards) : "", constants(group, steady));
  });
  byId("curve-count").textContent = names.length === curveCache.size ? count(names.length, "curve") : `${names.length} of ${count(curveCache.size, "curve")}`;
  if (!shown.length) {
    const why = curveCache.size ? "No curve has this name." : "There are no curves: one step, and no metrics.jsonl beside the rows. It is written with trainer.tracker {type: jsonl}.";
    shown.push(h("p", { class: "empty" }, why));
  }
  const list = byId("curve-list");
  const scrolled = list.scrollTop;
  list.replaceChildren(...changes, ...shown);
  list.scrollTop = scrolled;
}
