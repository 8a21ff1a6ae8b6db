// On paper: every prompt that passes search and filter, with its answers at the step that is shown.

const MAX_PRINTED = 1000;
const MAX_PRINTED_TEXT = 4000;

function drawPrint() {
  const step = currentStep();
  const list = chosenPrompts();
  const printed = list.slice(0, MAX_PRINTED).map((prompt) => {
    const text = addText(h("div", { class: "print-prompt", dir: "auto" }), beginning(prompts[prompt].text, MAX_PRINTED_TEXT));
    const rows = comparisons(prompt, step).map(({ run, row, base }) => {
      const body = h("div", { class: "print-answer", dir: "auto" });
      const long = run.text(row).length > MAX_PRINTED_TEXT;
      const shown = beginning(run.text(row), MAX_PRINTED_TEXT);
      if (state.mode === "difference" && base) addDifference(body, beginning(base.run.text(base.row), MAX_PRINTED_TEXT), shown);
      else addText(body, shown);
      if (long) body.append(` … (${count(run.text(row).length, "character")})`);
      const numbers = columns.filter((name) => run.value(name, row) !== null).map((name) => `${name} ${format(run.value(name, row))}`);
      const where = [runs.length > 1 ? run.name : null, `${data.axis} ${run.when[row]}`, ...numbers, run.reason(row)];
      return [body, addText(h("div", { class: "print-figures" }), where.filter(Boolean).join(" · "))];
    });
    return h("section", {}, h("h3", {}, idText(prompt)), text, rows);
  });
  const left = list.length - printed.length;
  const since = state.mode === "difference" ? `, compared with ${baseText()}` : "";
  byId("print").replaceChildren(
    h("h1", {}, document.title),
    h("p", {}, `${data.axis} ${step}${since}. ${count(list.length, "prompt")}${left ? `, the first ${MAX_PRINTED} of which are printed` : ""}.`),
    ...printed,
  );
}

addEventListener("beforeprint", drawPrint);
addEventListener("afterprint", () => byId("print").replaceChildren());
