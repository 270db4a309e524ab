// What test_report.py does on the page, and what it reads there
const $ = selector => [...document.querySelectorAll(selector)], result = {};
const choose = (name, value) => {
  document.forms[0].elements[name].value = value;
  document.forms[0].dispatchEvent(new Event("change", {bubbles: true}));
  return $("#list button").length };
result.roles = ["policy", "selection", "summary", ""].map(role => choose("role", role));
result.steps = ["step 1", "evaluation after step 2", ""].map(step => choose("step", step));
result.skill = [choose("skill", "found_2"), choose("skill", "")];
result.verdict = choose("verdict", "rejected");
choose("verdict", "");
const conversation = document.getElementById("conversation");
$("[data-open$='x$:step_1.3']")[0].click();
result.turns = $("#conversation .turn").length;
result.marked = $("#list [aria-current]").map(button => button.dataset.open);
result.evil = conversation.textContent.includes("onerror") && !conversation.querySelector("img");
result.told = $("#conversation .feedback").map(text => text.textContent);
$("[data-open$='x$:step_1.0']")[0].click();
result.dropped = $("#conversation .feedback").map(text => text.textContent);
$("#library [data-open]")[0].click();
result.proposals = $("#conversation .turn .turn h4").map(title => title.textContent);
result.charts = $("img").filter(image => image.naturalHeight > 100).length;
return result
