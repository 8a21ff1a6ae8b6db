// A conversation: who said what, with calls of tools and reasoning folded, and the reward that followed an answer.

/** Fill an answer with its turns. */
function addTurns(element, turns, key, needle) {
  element.classList.add("turns");
  turns.forEach((turn, place) => {
    const said = turn.parts.map((part, number_) => turnPart(part, `${key}.${place}.${number_}`, needle));
    const role = ["assistant", "tool"].includes(turn.role) ? turn.role : "other";
    const who = h("div", { class: "speaker" }, addText(h("span"), turn.speaker));
    if (turn.reward !== undefined) who.append(h("span", { class: turn.reward ? "turn-reward" : "turn-reward zero", title: "The reward that followed this answer" }, format(number(turn.reward))));
    element.append(h("section", { class: `turn ${role}` }, who, h("div", { class: "said" }, said.length ? said : h("span", { class: "none" }, "empty"))));
  });
}

function turnPart(part, key, needle) {
  const text = h("div", { class: "part", dir: "auto" });
  addLong(text, part.text, key, (shown) => addText(text, shown, needle));
  if (part.kind === "text") return text;
  const open = needle !== "" && part.text.toLowerCase().includes(needle);
  const name = part.kind === "call" ? part.call : `Reasoning, ${count(part.text.length, "character")}`;
  const unread = part.kind === "call" && !part.readable;
  return h("details", { class: unread ? "folded unread" : `folded ${part.kind}`, open }, addText(h("summary"), beginning(name, 400)), text);
}
