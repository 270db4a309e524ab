"""Selection, Policy and Summary with a scripted model and a sandbox that believes what the code says of itself; and the
skill library: what it keeps, what it refuses, and what BM25 finds in it (selector.recall)."""

import json
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import summarizer
from backbone import Completion, Sampling
from chat.calls import extract_tool_call
from command.process import UserError
from conftest import (CONTENT, FakeSandbox, Scripted, call, entry, kernel, make_task, proposing, selecting,
                      write_lines)
from policy import Kernel, Prompt, Trajectory, Turn, play_in_waves, rollout, rollout_metrics
from recipes import ranked_parent
from sandbox import Verdict
from selector import Selection, read_selection, recall, select, selection_metrics
from skills import Skill, SkillLibrary, skill_from_json
from summarizer import (Proposal, Summary, apply_pass_rule, best_skill, best_trigger, lazy_advice, propose,
                        read_proposals, summary_metrics, summary_reward, verify)
from tasks import Task

SKILLS = [Skill(f"skill-{i}", f"description {i}", "general", (word,), f"{CONTENT} body{i}")
          for i, word in enumerate(["forward", "module", "inputs", "randn", "init"])]  # words of the task


REPLY = Sampling(400)  # tokens: more than the scripted replies have


@pytest.fixture
def scripted(model):
    return Scripted(model.model, model.tokenizer)


# ---- selection


@pytest.mark.parametrize("reply, chosen, dropped", [
    (selecting("skill-2", "skill-1", "skill-0", "skill-3", "skill-2"), ["skill-2", "skill-1", "skill-0"], ["skill-3"]),
    (selecting("skill-9", "SKILL-2", None, {"name": 1}, "skill-1"), ["skill-1"],
     ["skill-9", "SKILL-2", "None", "{'name': 1}"]),
    ('```json\n{"selected_skills": ["skill-4"]}\n```', ["skill-4"], []), ("skill-1", [], []),
    (call("select_skills", selected_skills="skill-1"), [], [])])
def test_only_candidates_are_selected_and_at_most_three(reply, chosen, dropped):
    skills, gone = read_selection(extract_tool_call(reply, "select_skills"), SKILLS)
    assert [s.name for s in skills] == chosen and list(gone) == dropped


def test_replies_belong_to_the_task_that_they_answer(scripted):
    """k selections each. Tasks with other candidates each: what one task's reply names is no candidate of the next."""
    words = ["apples", "pears", "plums", "figs"]
    skills = [Skill(f"use-{word}", word, "general", (), word) for word in words]
    scripted.script = lambda role, prompt: [selecting(next(f"use-{w}" for w in words if f"```python\n{w}\n" in prompt))]
    selections = select(scripted, SkillLibrary(skills), [Task(word, 0, word) for word in words], 2, REPLY)
    assert [role for role, _ in scripted.asked] == ["selection"] * 8
    for skill, mine in zip(skills, selections):
        assert [(one.candidates, one.skills, one.dropped) for one in mine] == [([skill], (skill,), ())] * 2


def test_long_tasks_are_cut_at_a_thousand_characters(scripted):
    scripted.script = lambda role, prompt: ["none"]
    long = Task("long", 0, "forward " + "#" * 991 + "@$")
    for scripted.large, end in ((False, "#@\n"), (True, "#@$")):  # a large model sees it whole
        select(scripted, SkillLibrary(SKILLS), [long], 1, REPLY)
        assert end in scripted.asked[-1][1]


def test_nobody_is_asked_without_candidates_or_with_bm25_alone(scripted):
    [empty] = select(scripted, SkillLibrary(), [make_task()], 2, REPLY)
    assert [(s.skills, s.completion) for s in empty] == [((), None)] * 2
    [alone] = select(scripted, SkillLibrary(SKILLS), [make_task()], 2, REPLY, bm25_only=True)
    best = recall(SkillLibrary(SKILLS), make_task().source)[:3]
    assert [s.skills for s in alone] == [tuple(best)] * 2 and len(best) == 3 and scripted.asked is None


def test_candidates_that_do_not_fit_are_left_out(scripted):
    scripted.script = lambda role, prompt: [selecting("skill-0")]
    whole = select(scripted, SkillLibrary(SKILLS), [make_task()], 1, REPLY)[0][0]
    assert "description 4" in scripted.asked[0][1] and "body" not in scripted.asked[0][1]  # the content is not shown
    size = len(whole.completion.prompt_ids)
    for limit, kept in ((size, 5), (size - 1, 4)):
        sampling = Sampling(400, max_prompt_tokens=limit)
        short = select(scripted, SkillLibrary(SKILLS), [make_task()], 1, sampling)[0][0]
        assert short.candidates == whole.candidates[:kept] and len(short.completion.prompt_ids) <= limit


def test_what_metrics_say_of_selections():
    chosen = [Selection(make_task(), SKILLS, None, tuple(SKILLS[:n]), reward=float(n)) for n in (0, 2, 1)]
    metrics = selection_metrics(chosen, {"skill-1", "skill-2"})
    assert metrics == {"reward_selection": 1.0, "selected": 1.0, "selected_learnt": 2}


# ---- policy

@pytest.mark.parametrize("device, clock, when", [("cuda", "measured", [1, 3, 4, 5, 6]),
                                                 ("cpu", "modelled", [3, 3, 6, 6, 6])])
def test_rollouts_use_all_turns_and_show_skills_and_feedback(scripted, device, clock, when):
    """when: how many replies had been written as each kernel was submitted, at once on a GPU and together on a CPU.

    The first reply to task 1 has no kernel, and never reaches the sandbox. All begin their next turns together.
    """
    submitted = []

    class Eager(FakeSandbox):
        def verdict(self, task, code):
            submitted.append(len(scripted.asked))
            return super().verdict(task, code)

    scripted.script = lambda role, prompt: [
        "no code" if "x) * 3" in prompt and "Compiled" not in prompt else kernel(1.0 + prompt.count("Speedup"))]
    jobs = [(make_task(0), SKILLS[:2]), (make_task(1), ()), (make_task(2), ())]
    done = rollout(scripted, Eager(device), jobs, 2, REPLY)
    assert submitted == when and [(one.task, one.skills) for one in done] == [(task, tuple(s)) for task, s in jobs]
    assert [[turn.verdict.speedup for turn in one.turns] for one in done] == [[1.0, 2.0], [None, 1.0], [1.0, 2.0]]
    prompts = [prompt for _, prompt in scripted.asked]
    assert [(prompt.split("relu(x) * ")[1][0], "body0" in prompt and "body1" in prompt) for prompt in prompts] == [
        ("2", True), ("3", False), ("4", False)] * 2
    assert "Speedup 1.00x" in prompts[3] and "no code block" in prompts[4]
    assert done[1].turns[0].code is None and done[1].turns[0].verdict.clock == clock
    cut = rollout(scripted, FakeSandbox(), jobs[1:2], 1, Sampling(2))[0].turns[0]
    assert "cut off after 2 tokens" in cut.verdict.error and not cut.completion.finished


def test_a_rollout_ends_when_its_next_prompt_would_be_too_long(scripted):
    scripted.script = lambda role, prompt: [kernel(1.0)]
    jobs = [(make_task(), ()), (make_task(), SKILLS)]
    whole = rollout(scripted, FakeSandbox(), jobs, 3, REPLY)
    lengths = [[len(turn.completion.prompt_ids) for turn in one.turns] for one in whole]
    limit = lengths[1][0]
    short = rollout(scripted, FakeSandbox(), jobs, 3, Sampling(400, max_prompt_tokens=limit))
    assert [len(one.turns) for one in short] == [sum(n <= limit for n in row) for row in lengths]
    assert len(short[1].turns) == 1 and short[1].turns[0].completion.token_ids  # exactly the limit
    [never] = rollout(scripted, FakeSandbox(), jobs, 3, Sampling(400, max_prompt_tokens=limit - 1))[1].turns
    assert never.completion.token_ids == [] and "more than" in never.verdict.error and not never.verdict.correct


# ---- summary: when

ANSWER = Completion([1], [2], [0.0], "", True)


def trajectory(*speedups, task=None, skills=()):
    """Turns with these speedups; None for a wrong one."""
    turns = [Turn(ANSWER, f"code {s}", Verdict(compiled=True, correct=s is not None, speedup=s)) for s in speedups]
    return Trajectory(task or make_task(), tuple(skills), turns)


@pytest.mark.parametrize("device, waves", [("cpu", [[*range(9)], [*range(9)]]),
                                           ("cuda", [[*range(9)], [*range(1, 9)], [0]])])
def test_with_a_gpu_a_wave_does_not_wait_for_its_last_verdicts(device, waves):
    """One verdict takes as long as nobody waits for it."""
    sandbox, late, written = FakeSandbox(device), Future(), []
    judge = sandbox.submit
    sandbox.submit = lambda pairs: [late] if device == "cuda" and pairs[0].code == "late" else judge(pairs)
    sandbox.wait = lambda futures: late.done() or late.set_result(Verdict())
    sampler = Mock(write=lambda wave: written.append([*wave]) or [(number, "reply") for number in wave])

    def play(number):
        for code in ("late" if number == 0 else "first", "second"):
            assert (yield Prompt([number])) == "reply"
            assert not (yield Kernel(None, code)).correct

    assert sorted(play_in_waves(sampler, sandbox, [*map(play, range(9))])) == [*range(9)]
    assert written == waves


def test_what_metrics_say_of_rollouts():
    rollouts = [trajectory(1.1, 1.3), trajectory(None, 1.2), trajectory(None, None), trajectory(0.5, 1.0)]
    for rewards, rolled in zip([(1.0, 2.0), (0.0, 1.0), (0.0, 0.0), (3.0, 1.0)], rollouts):
        rolled.turns[1].advice_tokens = 5
        for turn, turn.reward in zip(rolled.turns, rewards):
            turn.verdict.coverage = 0.5 if turn.verdict.correct else 0.1  # only correct turns count
    rollouts[2].turns[0].verdict.rejected = "decoy"
    rollouts[3].turns[1].completion = Completion([1], [2], [0.0], "", False)
    found = rollout_metrics(rollouts)
    assert (found["cheats"], found["unfinished"]) == (1 / 8, 1 / 8)
    assert (found["reward_best"], found["reward_first"]) == (1.5, 1.0)
    assert (found["correct"], found["correct_first"], found["fast_1"], found["fast_1.2"]) == (0.75, 0.5, 0.5, 0.25)
    assert found["speedup"] == pytest.approx((1.3 + 1.2 + 1.0) / 3) and found["coverage"] == 0.5
    assert [rolled.tokens for rolled in rollouts] == [7] * 4  # one of each turn, and the advice


@pytest.mark.parametrize("speedups, best", [
    ((1.0, 1.2), 1), ((1.0, 1.19), None), ((0.5, 1.0), None), ((0.5, 1.3, 1.2), 1), ((1.5, 1.7), None),
    ((None, 3.0), None), ((1.0, None, 1.4), 2), ((2.0,), None), ((1.0, 2.0, 4.0), 2)])
def test_a_summary_is_triggered_by_a_gain_and_of_a_group_by_its_fastest(speedups, best):
    rolled, faster, others = trajectory(*speedups), trajectory(1.0, 8.0), [trajectory(3.0, 3.1), trajectory(None, 9.0)]
    found = None if best is None else (rolled, rolled.turns[0], rolled.turns[best])
    assert best_trigger([*others, rolled], 1.2) == found
    assert best_trigger([*others, rolled, faster], 1.2)[0] is faster


# ---- summary: what


LONG = CONTENT + " a" * (640 - len(CONTENT.split()))  # as long as a skill may be, in words


@pytest.mark.parametrize("reply, reasons", [
    (selecting("a"), ["no tool call"]), (call("update_skill_library", new_skills="x"), ["malformed"]),
    (proposing(None, entry()), ["malformed", None]),
    (proposing(entry(), entry(name="b"), entry(name="c")), [None, None, "too many"])] + [
    (proposing(entry(**changes)), [reason]) for reason, several in {
        None: [{"tags": ["t"] * 16}, {"description": "d" * 500}, {"content": LONG},
               {"scope": "task_specific/softmax"}, {"content": "## Motivation\nx\n### Key idea\ny\n**Example**\nz"}],
        "malformed": [{"name": 3}, {"name": "x" * 90}, {"name": "a\nb"}, {"description": "d" * 501},
                      {"scope": "everywhere"}, {"tags": "a, b"}, {"tags": [1]}, {"tags": []}, {"tags": ["t"] * 17},
                      {"content": "Motivation: x\nExample: y"}],
        "too long": [{"content": LONG + " a"}],
        "lazy advice": [{"content": CONTENT + "\nOr use torch.compile."}, {"description": "Fall back to PyTorch"},
                        {"name": "skip_the_kernel"}]
        }.items() for changes in several])
def test_form_check_records_a_reason(reply, reasons):
    call = extract_tool_call(reply, "update_skill_library")
    proposals = read_proposals(call, count_tokens=lambda text: len(text.split()))
    assert [p.rejected for p in proposals] == reasons and set(reasons) - {None} <= set(summarizer.REASONS)


@pytest.mark.parametrize("changes, known", [
    ({"content": "  " + CONTENT.replace(" ", "  ") + " BODY0"}, True), ({"name": "skill-1"}, False),
    ({"name": "skill", "description": "Description  1"}, True)])  # the library has given it its number
def test_a_known_proposal_is_marked_and_not_rejected(changes, known):
    keys = {key for skill in SKILLS for key in summarizer.identity(skill)}
    [proposal] = read_proposals({"new_skills": [entry(**changes)]}, keys)
    assert proposal.known == known and proposal.rejected is None


_, REFUSED, _, KEPT = [part.splitlines() for part in Path(__file__).with_name("advice.txt").read_text().split("\n\n")]
KEPT.append("```python\n# use torch.compile\n```")


@pytest.mark.parametrize("text, lazy", [(text, True) for text in REFUSED] + [(text, False) for text in KEPT])
def test_advice_not_to_write_kernels_is_refused_and_mentioning_torch_is_not(text, lazy):
    assert bool(lazy_advice("Motivation: speed.\nKey Idea: " + text)) == lazy


def test_s_summaries_of_each_winner(scripted):
    scripted.script = lambda role, prompt: [proposing(entry()), "nothing"]
    winners = [best_trigger([trajectory(1.0, 2.0, task=make_task(i), skills=SKILLS[:1])], 1.2) for i in range(2)]
    summaries = propose(scripted, winners, 4, SkillLibrary(SKILLS), REPLY, torch.Generator().manual_seed(0))
    assert [[s.task.name for s in mine] for mine in summaries] == [["task0"] * 4, ["task1"] * 4]
    for part in ("relu(x) * 2", "body0", "First answer, speedup 1.00", "code 1.0", "Best answer, speedup 2.00",
                 "code 2.0", "update_skill_library"):
        assert part in scripted.asked[0][1]
    limit = len(summaries[0][0].completion.prompt_ids) - 1
    assert propose(scripted, winners, 4, SkillLibrary(), Sampling(400, max_prompt_tokens=limit)) == [[], []]
    scripted.script = lambda role, prompt: [proposing(entry())]
    learnt = SkillLibrary([Skill("learnt", "another", "general", ("relu",), CONTENT)])
    assert propose(scripted, winners, 1, learnt, Sampling(400, max_prompt_tokens=limit + 1))[0][0].proposals[0].known


# ---- summary: whether

def summary_of(*skills, first=1.0, winner_skills=()):
    winner = trajectory(first, 2.0, skills=winner_skills)
    summary = Summary(winner.task, winner, winner.turns[0], winner.turns[1], ANSWER)
    summary.proposals = [Proposal(skill.name, skill) for skill in skills]
    return summary


@pytest.mark.parametrize("speedup, first, rejected", [
    (1.2, 1.0, None), (1.19, 0.5, "too slow"), (1.5, 1.3, "too slow"), (1.57, 1.3, None), (None, 1.0, "not correct")])
def test_pass_rule(speedup, first, rejected):
    proposal, [before, attempt] = Proposal(None, SKILLS[0]), trajectory(first, speedup).turns
    apply_pass_rule(proposal, attempt, before, 1.2)
    assert proposal.rejected == rejected and proposal.attempt is attempt
    assert proposal.skill.verify_speedup == (None if rejected else speedup)


def test_verification_is_one_greedy_batch_with_the_winners_skills(scripted):
    """Equal proposals of several summaries share one attempt; each gets its verdict. A summary earns at most 6."""
    speedups = {"body2": 1.5, "body3": 1.1, "body4": 9.0}
    scripted.script = lambda role, prompt: [kernel(speedups[next(word for word in speedups if word in prompt)])]
    Scripted.draws.clear()
    two, three, four = SKILLS[2:]
    first, second, other = (summary_of(two, three, winner_skills=SKILLS[:2]), summary_of(two, winner_skills=SKILLS[:2]),
                            summary_of(two, four))
    second.proposals.append(Proposal(None, rejected="malformed"))
    verify(scripted, FakeSandbox(), [[first, second], [], [other]], REPLY, 1.2)
    assert Scripted.draws == {(0.0, 1.0)}
    assert all(role == "policy" and "Speedup" not in prompt for role, prompt in scripted.asked)  # single turn
    assert ["body0" in prompt and "body1" in prompt for _, prompt in scripted.asked] == [True, True, False, False]
    assert [[p.rejected for p in s.proposals] for s in (first, second)] == [[None, "too slow"], [None, "malformed"]]
    assert best_skill([first, second]) is first.proposals[0] and first.proposals[0].skill.verify_speedup == 1.5
    assert best_skill([other]).skill.verify_speedup == 9.0 and best_skill([]) is None
    other.proposals[1].known = True
    assert best_skill([other]) is other.proposals[0]  # the library has the better one, which is rewarded nevertheless
    assert [summary_reward(s) for s in (first, second, other, summary_of())] == [1.5, 1.5, 6.0, 0.0]
    first.reward, second.reward = 0.0, 1.0
    assert summary_metrics([first, second]) == {"reward_summary": 0.5, "summaries": 2, "proposals": 4, "passed": 2,
                                                "rejected": {"malformed": 1, "too slow": 1}}


def test_a_parents_chance_falls_with_its_rank():
    """EvoEngineer: five parents with chances in proportion to 1/5, 1/6, 1/7, 1/8 and 1/9."""
    turns = trajectory(1.0, 7.0, 7.0, 3.0, None, 2.0, 5.0, 4.0).turns
    generator = torch.Generator().manual_seed(0)
    drawn = Counter(ranked_parent(turns, generator)[0].verdict.speedup for _ in range(4000))
    total = sum(1 / n for n in range(5, 10))
    for n, speedup in zip(range(5, 10), (7.0, 5.0, 4.0, 3.0, 2.0)):
        assert abs(drawn[speedup] / 4000 - 1 / n / total) < 0.025
    assert drawn[1.0] == 0 and ranked_parent(turns[:3]) == ranked_parent(turns[4:5] * 9) == []


# ---- the library

def skill(name, content="Motivation: m\nKey Idea: k\nExample:\ne", description="d", tags=("t",), **more):
    return Skill(name, description, "general", tags, content, **more)


def test_roundtrip_keeps_every_field(tmp_path):
    library = SkillLibrary([skill("a", "line one\nline two \u00e9", verify_speedup=1.75), skill("b", tags=())])
    library.save(tmp_path / "skill_library.jsonl")
    assert SkillLibrary.of_model(tmp_path).skills == library.skills
    first = json.loads((tmp_path / "skill_library.jsonl").read_text().split("\n")[0])
    assert list(first) == ["name", "description", "scope", "tags", "content", "verify_speedup"]


def test_a_skill_that_joins_has_a_name_of_its_own_and_is_found():
    library = SkillLibrary([skill("a"), skill("a-2"), skill("b")])
    assert recall(library, "softmax") == []
    assert [library.add(skill("a", "softmax")).name for _ in range(3)] == ["a-3", "a-4", "a-5"]
    assert [s.name for s in recall(library, "softmax")] == ["a-3", "a-4", "a-5"]


@pytest.mark.parametrize("line", [
    '{"name": "half', [1, 2], {"name": "n"}, entry(name=" "), entry(tags=[1]), entry(verify_speedup="fast")])
def test_a_broken_line_is_refused_with_its_number(tmp_path, line):
    write_lines(tmp_path / "skill_library.jsonl", entry(), "", line, entry())
    with pytest.raises(UserError, match="skill_library.jsonl, line 3: not a skill"):
        SkillLibrary.of_model(tmp_path)


def test_the_release_takes_lines_without_scope_or_list_of_tags():
    for nothing in (None, ""):
        made = skill_from_json(entry(name=" n ", scope=nothing, tags=nothing, author=1))
        assert (made.name, made.scope, made.tags) == ("n", "general", ())


def test_the_best_twenty_are_recalled_and_equal_scores_keep_the_librarys_order():
    content = {30: "softmax softmax"} | dict.fromkeys(range(6), "relu") | dict.fromkeys(range(90, 190), "cumsum")
    library = SkillLibrary([skill(f"s{i}", content.get(i, "softmax"), description="") for i in range(190)])
    assert [s.name for s in recall(library, "softmax")] == ["s30"] + [f"s{i}" for i in range(6, 25)]


@pytest.mark.parametrize("query, written", [
    ("F.layer_norm(x)", "LayerNorm in one sweep"), ("self.bn = nn.BatchNorm2d(c)", "batch_norm folded"),
    ("nn.LayerNorm(8)", "layer-norm"), ("x = F.relu(x)", "ReLU"), ("nn.ReLU()", "a relu/gelu chain"),
    ("x = torch.Softmax(x)", "exp over one row, of softmax"), ("self.my_convolution", "convolution")])
def test_code_finds_what_a_skill_calls_otherwise(query, written):
    library = SkillLibrary([skill(f"s{i}", text) for i, text in enumerate(("scan", written, "sort", written))])
    assert recall(library, query) == [library.skills[1], library.skills[3]]  # half of the library; and no other
    assert recall(library, "unrelated vocabulary") == recall(library, "") == []
    assert recall(SkillLibrary(library.skills[:2]), "nothing of it") == library.skills[:2]  # too few to rank
