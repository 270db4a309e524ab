// Rollouts as conversations, with a filter. Texts that a model wrote are only ever set as text, never as markup.
"use strict";
const MOST_LISTED = 1000;
const TONES = {faster: "good", staged: "good", passed: "good", rejected: "bad", wrong: "bad", broken: "bad"};
const OUTCOMES = ["faster", "correct", "rejected", "wrong", "broken"];  // of a kernel, best first
const FIELDS = {  // name of a filter -> the values that a rollout has
  folder: r => [r.folder], step: r => [when(r)], role: r => [r.role], task: r => [r.task], verdict: r => outcomes(r),
  skill: r => r.skills || []};

/** What became of a kernel. */
function outcome(verdict) {
  if (verdict.rejected) return "rejected";
  if (verdict.correct) return verdict.speedup > 1 ? "faster" : "correct";
  return verdict.compiled ? "wrong" : "broken";
}

/** What became of a rollout: of its best turn, of a selection, or of each proposal of a summary. */
function outcomes(rollout) {
  if (rollout.role === "selection") return [rollout.skills.length ? "skills chosen" : "none chosen"];
  if (rollout.role === "summary") return [...new Set(rollout.proposals.map(became))].sort();
  const each = rollout.turns.map(turn => outcome(turn.verdict));
  return [OUTCOMES.find(name => each.includes(name))];
}

/** An element with attributes and children; what is no element becomes text, and null nothing. */
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter(child => child !== null));
  return element;
}

/** A reply: its words as they are, its code blocks apart. */
function reply(text) {
  const parts = text.split(/```\w*\n([\s\S]*?)(?:```|$)/);  // words, code, words, code, ...
  return parts.map((part, i) => part.trim() ? make("pre", {class: i % 2 ? "code" : "prose"}, part.trimEnd()) : null);
}

function folded(title, ...children) {
  return make("details", {}, make("summary", {}, title), ...children);
}

function fact(name, value) {
  return value === undefined || value === null || value === "" ? null :
    make("span", {}, name + " ", make("b", {}, typeof value === "number" ? String(+value.toPrecision(4)) : value));
}

const badge = outcome => make("span", {class: "tag " + (TONES[outcome] || "")}, outcome);
const became = proposal => proposal.rejected || (proposal.staged ? "staged" : "passed");
const best = rollout => Math.max(0, ...(rollout.turns || []).map(turn => turn.verdict.correct ? turn.verdict.speedup : 0));
const times = speedup => speedup ? speedup.toFixed(2) + "x" : "";
const key = rollout => rollout.folder + ":" + rollout.id;
const link = (key, ...words) => make("button", {type: "button", class: "link", "data-open": key}, ...words);

function when(rollout) {
  if (rollout.id.startsWith("results")) return "";  // of a benchmark
  return (rollout.id.startsWith("eval") ? "evaluation after step " : "step ") + rollout.step;
}

/** What the sandbox said: numbers, and the words that the model was told. */
function verdict(turn) {
  const v = turn.verdict || {};
  const told = turn.feedback || v.rejected || v.error || (turn.dropped || []).map(name => "no candidate: " + name).join("\n");
  return [make("p", {class: "facts"}, turn.verdict ? badge(outcome(v)) : null, fact("reward", turn.reward),
               fact("advantage", turn.advantage), fact("speedup", times(v.speedup)),
               fact("coverage", v.coverage)),
          told ? make("pre", {class: "prose feedback"}, told) : null];
}

function proposal(p) {
  const attempt = p.attempt ? [folded("The kernel that was to prove it", ...reply(p.attempt.reply)), ...verdict(p.attempt)] : [];
  return make("div", {class: "turn"}, make("h4", {}, p.written?.name || "a proposal without a name", " ", badge(became(p))),
    p.detail, ...attempt);
}

function turn(t, i) {
  return make("section", {class: "turn"}, make("h4", {}, "Turn " + (i + 1)), ...reply(t.reply), ...verdict(t),
    ...(t.proposals || []).map(proposal));
}

function conversation(rollout) {
  return [
    make("h3", {}, `${rollout.role}: ${rollout.task} `, ...outcomes(rollout).map(badge)),
    make("p", {class: "facts"}, when(rollout), fact("best speedup", times(best(rollout))),
      fact("skills", (rollout.skills || []).join(", ") || "none"),
      rollout.winner ? link(rollout.folder + ":" + rollout.winner, "the rollout that it sums up") : null),
    folded("Prompt", make("pre", {class: "prose"}, rollout.prompt || "")), ...(rollout.turns || [rollout]).map(turn)];
}

const rollouts = JSON.parse(document.getElementById("data").textContent);
const byKey = new Map(rollouts.map(rollout => [key(rollout), rollout]));
const form = document.getElementById("filters"), list = document.getElementById("list");

/** List the rollouts that the filter wants. */
function filter() {
  const wanted = [...new FormData(form)].filter(([, value]) => value);
  const found = rollouts.filter(r => wanted.every(([name, value]) => FIELDS[name](r).includes(value)));
  document.getElementById("count").textContent = `${found.length} of ${rollouts.length} rollouts` +
    (found.length > MOST_LISTED ? `, the first ${MOST_LISTED} are listed` : "");
  list.replaceChildren(...found.slice(0, MOST_LISTED).map(r => make("li", {}, link(key(r), `${r.task} `,
    ...outcomes(r).map(badge), make("small", {}, [when(r), r.role, times(best(r)), ...(r.skills || [])].filter(Boolean).join(" · "))))));
}

/** Show a rollout, and mark it in the list. */
function show(key) {
  const rollout = byKey.get(key);
  document.getElementById("conversation").replaceChildren(...(rollout ? conversation(rollout) : ["This rollout is not on the page."]));
  for (const button of list.querySelectorAll("button")) button.toggleAttribute("aria-current", button.dataset.open === key);
}

for (const select of form.querySelectorAll("select")) {
  const values = [...new Set(rollouts.flatMap(FIELDS[select.name]).filter(Boolean))];
  if (select.name !== "step") values.sort();
  select.append(...values.map(value => make("option", {value}, value)));
  select.parentElement.hidden = values.length < 2;
}
form.addEventListener("change", filter);
form.addEventListener("reset", () => setTimeout(filter));
document.addEventListener("click", event => {
  const button = event.target.closest("[data-open]");
  if (!button) return;
  show(button.dataset.open);
  const narrow = matchMedia("(max-width: 44rem)").matches;  // the conversation is below the list, not beside it
  if (narrow || !list.contains(button)) document.getElementById("conversation").scrollIntoView();
});
filter();
const first = rollouts.filter(r => r.role === "policy").sort((a, b) => best(b) - best(a))[0];
if (first) show(key(first));
