// Rollouts as conversations, with a filter. Texts that a model wrote are only ever set as text, never as markup.
"use strict";
const MOST_LISTED = 300;
const ROLES = {policy: "Policy", selection: "Selection", summary: "Summary"};
const BAD = ["rejected", "wrong", "broken", "no code"];
const CODE = new RegExp([
  "(?<c>#.*)", "(?<s>[rbf]?(?:\"\"\".*?(?:\"\"\"|$)|\"(?:\\\\.|[^\"\\\\])*\"|'(?:\\\\.|[^'\\\\])*'))",
  "(?<k>\\b(?:and|as|assert|break|class|continue|def|elif|else|except|False|for|from|if|import|in|is|lambda|None|not" +
  "|or|pass|raise|return|self|True|try|while|with|yield)\\b)",
  "(?<n>\\b\\d[\\w.]*)", "(?<d>@[\\w.]+|(?<=\\b(?:def|class) )\\w+|\\b(?:tl|triton|torch)(?:\\.\\w+)+)"].join("|"), "g");

/** An element with attributes and children; what is no element becomes text. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter(child => child !== null && child !== undefined));
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
  return make("pre", {class: "code numbered"}, ...lines.map(line => make("span", {}, ...highlighted(line))));
}

/** A reply: its words as they are, its code blocks highlighted. */
function reply(text) {
  const parts = text.split(/```\w*\n([\s\S]*?)(?:```|$)/);  // words, code, words, code, ...
  return parts.map((part, i) => i % 2 ? codeBlock(part) : part.trim() ? make("pre", {}, part.trim()) : null);
}

/** A unified diff: what the model changed after it had read the verdict. */
function difference(lines) {
  const kinds = {"+": "added", "-": "removed", "@": "hunk"};
  return make("pre", {class: "code"}, ...lines.map(line => line[0] === "@" ? make("span", {class: "hunk"}, line) :
    make("span", {class: kinds[line[0]] || ""}, line.slice(0, 1), " ", ...highlighted(line.slice(1)))));
}

function folded(title, ...children) {
  return make("details", {}, make("summary", {}, title), ...children);
}

function fact(name, value) {
  return value === null || value === undefined || value === "" ? null :
    make("span", {}, name + " ", make("b", {}, typeof value === "number" ? String(+value.toPrecision(4)) : value));
}

function badge(outcome) {
  const tone = BAD.includes(outcome) ? "bad" : ["faster", "staged", "passed"].includes(outcome) ? "good" : "";
  return make("span", {class: "tag " + tone}, outcome);
}

const times = speedup => speedup ? speedup.toFixed(2) + "x" : "";

/** What the sandbox said: numbers, the profile as bars, and the words that the model was told. */
function verdict(turn) {
  const v = turn.verdict, facts = make("p", {class: "facts"}, v ? badge(v.outcome) : null, fact("reward", turn.reward),
    fact("advantage", turn.advantage));
  if (!v) return [facts, turn.feedback ? make("pre", {}, turn.feedback) : null];
  const took = v.candidate_ms !== null && v.reference_ms !== null ?
    v.candidate_ms.toPrecision(4) + " ms against " + v.reference_ms.toPrecision(4) + " ms" : "";
  facts.append(...[fact("speedup", times(v.speedup)), fact("took", took),
                   fact("share of own kernels", v.coverage)].filter(Boolean));
  const rows = v.profile.map(([name, share, own]) => {
    const bar = make("i", own ? {class: "good"} : {});
    bar.style.width = 100 * Math.min(Math.max(share, 0), 1) + "%";
    return make("tr", {}, make("td", {}, name), make("td", {}, own ? "own" : "PyTorch"),
                make("td", {}, (100 * share).toFixed(0) + " %"), make("td", {class: "bar"}, bar));
  });
  return [facts, rows.length ? make("table", {class: "profile"}, make("tbody", {}, ...rows)) : null,
          turn.feedback || v.problem ? make("pre", {class: "feedback"}, turn.feedback || v.problem) : null];
}

function proposal(p) {
  return make("div", {class: "turn"}, make("h4", {}, p.name || "a proposal without a name", " ", badge(p.outcome)),
    p.detail ? make("p", {}, p.detail) : null,
    ...(p.attempt ? [folded("The kernel that was to prove it", ...reply(p.attempt.reply)), ...verdict(p.attempt)] : []));
}

function conversation(data, rollout) {
  const evaluation = rollout.phase === "evaluation";
  const link = id => make("button", {type: "button", class: "link", "data-open": rollout.source + ":" + id}, "the rollout");
  const summed = data.rollouts.filter(other => other.source === rollout.source && other.of === rollout.id);
  return [
    make("h3", {}, `${ROLES[rollout.role] || rollout.role}: ${rollout.task} `, ...rollout.outcome.map(badge)),
    make("p", {class: "facts"}, fact(evaluation ? "evaluation after step" : "step", when(rollout) && rollout.step),
      fact("best reward", rollout.reward), fact("best speedup", times(rollout.speedup)),
      fact("skills", rollout.skills.join(", ") || (rollout.role === "policy" ? "none (null scheme)" : "")),
      rollout.of ? make("span", {}, "sums up ", link(rollout.of)) : null,
      summed.length ? make("span", {}, "summed up: ", ...summed.map((other, i) => make("button", {type: "button",
        class: "link", "data-open": other.source + ":" + other.id}, (i ? ", " : "") + (i + 1)))) : null),
    data.texts[rollout.prompt] ? folded("Prompt", make("pre", {}, data.texts[rollout.prompt])) : null,
    ...rollout.turns.map((turn, i) => make("section", {class: "turn"},
      rollout.turns.length > 1 ? make("h4", {}, "Turn " + (i + 1)) : null,
      ...(turn.diff ? [turn.diff.length ? difference(turn.diff) : make("p", {}, "The same reply again."),
                       folded("The whole reply", ...reply(turn.reply))] : reply(turn.reply)),
      ...verdict(turn), ...(turn.proposals || []).map(proposal)))];
}

function when(rollout) {
  return rollout.phase === "benchmark" ? "" : (rollout.phase === "evaluation" ? "evaluation after " : "") + "step " + rollout.step;
}

const FIELDS = {  // name of a filter -> the values that a rollout has
  source: r => [String(r.source)], when: r => [when(r)], role: r => [r.role], task: r => [r.task],
  outcome: r => r.outcome, skill: r => r.skills};

function start(data) {
  const form = document.getElementById("filters"), list = document.getElementById("list");
  const shown = document.getElementById("conversation"), byKey = new Map();
  let current = "";  // the key of the rollout that is shown
  for (const rollout of data.rollouts) byKey.set(rollout.source + ":" + rollout.id, rollout);
  for (const select of form.querySelectorAll("select:not([name=source])")) {
    const values = new Set(data.rollouts.flatMap(FIELDS[select.name]).filter(Boolean));
    const sorted = select.name === "when" ? [...values] : [...values].sort();
    select.append(...sorted.map(value => make("option", {value}, select.name === "role" ? ROLES[value] || value : value)));
    if (!values.size) select.parentElement.hidden = true;
  }
  function filter() {
    const wanted = [...new FormData(form)].filter(([, value]) => value);
    const found = data.rollouts.filter(r => wanted.every(([name, value]) => FIELDS[name](r).includes(value)));
    document.getElementById("count").textContent = `${found.length} of ${data.rollouts.length} rollouts`;
    list.replaceChildren(...found.slice(0, MOST_LISTED).map(r => make("li", {}, make("button",
      {type: "button", "data-open": r.source + ":" + r.id}, `${r.task} `, ...r.outcome.map(badge),
      make("small", {}, [when(r), ROLES[r.role] || r.role, times(r.speedup), r.skills.join(", ")].filter(Boolean).join(" · "))))));
    if (found.length > MOST_LISTED) list.append(make("li", {class: "quiet"}, `and ${found.length - MOST_LISTED} more: narrow the filter`));
    mark();
    return found;
  }
  function mark() {  // the rollout that is shown, in the list
    for (const button of list.querySelectorAll("button")) {
      button.removeAttribute("aria-current");
      if (button.dataset.open !== current) continue;
      button.setAttribute("aria-current", "true");
      list.scrollTop = button.offsetTop - list.clientHeight / 2;
    }
  }
  function open(key) {
    const rollout = byKey.get(key);
    shown.replaceChildren(...(rollout ? conversation(data, rollout).filter(Boolean) : [make("p", {}, "This rollout is not on the page.")]));
    current = key;
    mark();
  }
  function narrow(values) {
    form.reset();
    for (const [name, value] of Object.entries(values)) if (form.elements[name]) form.elements[name].value = value;
    const found = filter();
    if (found.length) open(found[0].source + ":" + found[0].id);
    document.getElementById("rollouts").scrollIntoView();
  }
  form.addEventListener("change", filter);
  form.addEventListener("reset", () => setTimeout(filter));
  document.addEventListener("click", event => {
    const {open: key, skill, outcome, source} = event.target.closest("button")?.dataset || {};
    if (key) { open(key); history.replaceState(null, "", "#rollout=" + key); if (!list.contains(event.target)) document.getElementById("rollouts").scrollIntoView(); }
    if (skill) narrow({source, skill, role: "policy"});
    if (outcome) narrow({source, outcome, role: "summary"});
  });
  filter();
  const best = data.rollouts.filter(r => r.role === "policy").sort((a, b) => b.speedup - a.speedup)[0] || data.rollouts[0];
  const wanted = decodeURIComponent(location.hash.slice("#rollout=".length));
  open(byKey.has(wanted) ? wanted : best.source + ":" + best.id);
  if (byKey.has(wanted)) document.getElementById("rollouts").scrollIntoView();
}

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), character => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

const packed = document.getElementById("packed");
if (packed) unpack(packed.textContent).then(start).catch(error => {
  document.getElementById("conversation").textContent = "This browser cannot unpack the rollouts (" + error + ").";
});
