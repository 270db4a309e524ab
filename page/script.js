// Rollouts as conversations, with a filter. Texts that a model wrote are only ever set as text, never as markup.
"use strict";
const MOST_LISTED = 1000;
const TONES = {faster: "good", staged: "good", passed: "good", rejected: "bad", wrong: "bad", broken: "bad"};
const CODE = new RegExp([
  "(?<c>#.*)", "(?<s>[rbf]?(?:\"\"\".*?(?:\"\"\"|$)|\"(?:\\\\.|[^\"\\\\])*\"|'(?:\\\\.|[^'\\\\])*'))",
  "(?<k>\\b(?:and|as|assert|break|class|continue|def|elif|else|except|False|for|from|if|import|in|is|lambda|None|not" +
  "|or|pass|raise|return|self|True|try|while|with|yield)\\b)",
  "(?<n>\\b\\d[\\w.]*)", "(?<d>@[\\w.]+|(?<=\\b(?:def|class) )\\w+|\\b(?:tl|triton|torch)(?:\\.\\w+)+)"].join("|"), "g");
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

/** The words of a line of code as spans of their kind. */
function highlighted(line) {
  const parts = [];
  let end = 0;
  for (const match of line.matchAll(CODE)) {
    const kind = Object.keys(match.groups).find(name => match.groups[name] !== undefined);
    parts.push(line.slice(end, match.index), make("span", {class: kind}, match[0]));
    end = match.index + match[0].length;
  }
  return [...parts, line.slice(end)];
}

function codeBlock(code) {
  const lines = code.replace(/\n$/, "").split("\n");
  return make("pre", {class: "code"}, ...lines.map(line => make("span", {}, ...highlighted(line))));
}

/** A reply: its words as they are, its code blocks highlighted. */
function reply(text) {
  const parts = text.split(/```\w*\n([\s\S]*?)(?:```|$)/);  // words, code, words, code, ...
  return parts.map((part, i) => i % 2 ? codeBlock(part) : part.trim() ? make("pre", {}, part.trim()) : null);
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
const when = r => r.phase === "benchmark" ? "" : (r.phase === "evaluation" ? "evaluation after step " : "step ") + r.step;
const link = (key, ...words) => make("button", {type: "button", class: "link", "data-open": key}, ...words);

/** What the sandbox said: numbers, the profile as bars, and the words that the model was told. */
function verdict(turn) {
  const v = turn.verdict || {profile: []};
  const rows = v.profile.map(({name, share, own}) => make("tr", {}, make("td", {}, name),
    make("td", {}, own ? "own" : "PyTorch"), make("td", {}, (100 * share).toFixed(0) + " %"),
    make("td", {class: "bar"}, make("i", {class: own ? "good" : "", style: `width: ${100 * share}%`}))));
  const told = turn.feedback || v.rejected || v.error || (turn.dropped || []).map(name => "no candidate: " + name).join("\n");
  return [make("p", {class: "facts"}, turn.verdict ? badge(outcome(v)) : null, fact("reward", turn.reward),
               fact("advantage", turn.advantage), fact("speedup", times(v.speedup)),
               fact("reference ms", v.reference_ms), fact("kernel ms", v.candidate_ms),
               fact("share of own kernels", v.coverage)),
          rows.length ? make("table", {class: "profile"}, ...rows) : null,
          told ? make("pre", {class: "feedback"}, told) : null];
}

function proposal(p) {
  const attempt = p.attempt ? [folded("The kernel that was to prove it", ...reply(p.attempt.reply)), ...verdict(p.attempt)] : [];
  return make("div", {class: "turn"}, make("h4", {}, p.written?.name || "a proposal without a name", " ", badge(became(p))),
    make("p", {}, p.detail), ...attempt);
}

function turn(t, i) {
  return make("section", {class: "turn"}, make("h4", {}, "Turn " + (i + 1)), ...reply(t.reply), ...verdict(t),
    ...(t.proposals || []).map(proposal));
}

function conversation(data, rollout) {
  return [
    make("h3", {}, `${rollout.role}: ${rollout.task} `, ...outcomes(rollout).map(badge)),
    make("p", {class: "facts"}, when(rollout), fact("best speedup", times(best(rollout))),
      fact("skills", (rollout.skills || []).join(", ") || "none"),
      rollout.winner ? link(rollout.folder + ":" + rollout.winner, "the rollout that it sums up") : null),
    folded("Prompt", make("pre", {}, data.texts[rollout.prompt])), ...(rollout.turns || [rollout]).map(turn)];
}

function start(data) {
  const form = document.getElementById("filters"), list = document.getElementById("list");
  const shown = document.getElementById("conversation");
  const byKey = new Map(data.rollouts.map(rollout => [key(rollout), rollout]));
  for (const select of form.querySelectorAll("select")) {
    const values = [...new Set(data.rollouts.flatMap(FIELDS[select.name]).filter(Boolean))];
    if (select.name !== "step") values.sort();
    select.append(...values.map(value => make("option", {value}, value)));
    select.parentElement.hidden = values.length < 2;
  }
  function filter() {
    const wanted = [...new FormData(form)].filter(([, value]) => value);
    const found = data.rollouts.filter(r => wanted.every(([name, value]) => FIELDS[name](r).includes(value)));
    document.getElementById("count").textContent = `${found.length} of ${data.rollouts.length} rollouts` +
      (found.length > MOST_LISTED ? `, the first ${MOST_LISTED} are listed` : "");
    list.replaceChildren(...found.slice(0, MOST_LISTED).map(r => make("li", {}, link(key(r), `${r.task} `,
      ...outcomes(r).map(badge), make("small", {}, [when(r), r.role, times(best(r)), ...(r.skills || [])].filter(Boolean).join(" · "))))));
    return found;
  }
  function open(key) {
    const rollout = byKey.get(key);
    shown.replaceChildren(...(rollout ? conversation(data, rollout) : ["This rollout is not on the page."]));
    for (const button of list.querySelectorAll("button"))
      if (button.toggleAttribute("aria-current", button.dataset.open === key)) list.scrollTop = button.offsetTop - list.clientHeight / 2;
  }
  form.addEventListener("change", filter);
  form.addEventListener("reset", () => setTimeout(filter));
  document.addEventListener("click", event => {
    const button = event.target.closest("button"), {open: wanted, ...values} = button?.dataset || {};
    if (values.folder) {  // a link to some rollouts: the filter is set to them
      form.reset();
      for (const [name, value] of Object.entries(values)) form.elements[name].value = value;
      const found = filter();
      if (found.length) open(key(found[0]));
    }
    if (wanted) open(wanted);
    if ((wanted || values.folder) && !list.contains(button)) document.getElementById("rollouts").scrollIntoView();
  });
  const first = filter().filter(r => r.role === "policy").sort((a, b) => best(b) - best(a))[0];
  if (first) open(key(first));
}

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), character => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

unpack(document.getElementById("packed").textContent).then(start).catch(error => {
  document.getElementById("conversation").textContent = "This browser cannot unpack the rollouts (" + error + ").";
});
