"""The forms of the paper's release: its prompt files, its tools with limits, its feedback as JSON.

A checkpoint that the authors have released does best with the prompts that it was trained on. `--prompts` reads a copy
of the release's kernel/config: chat/prompts.py passes every file through `in_our_layout`. What the release writes in
code, and not in a file, stands here. results/faithful.md lists the differences that remain.
"""

import copy
import json

from judge.verdict import printable

_HEAD = "---\nname: __name__\ndescription: __description__\nscope: __scope__\ntags: [__tags__]\n---\n\n__content__\n"
FORMS = {  # the texts of prompts.yaml that the release has in skill_library.py and skill_prompt_builder.py
    "selection_task": "__policy_user__",
    "candidate": "__number__. **__name__**  [scope=__scope__]__tag_note__\n    __description__",
    "skill": _HEAD, "skill_in_use": _HEAD, "skills_in_use": "__skills__",
    "no_skills": "(none: this rollout was of the null scheme)"}


def in_our_layout(parsed, limits) -> dict:
    """A parsed file of prompts in the layout of prompts.yaml. One that has that layout already comes back as it is.

    The release has `per_turn_prompts` in one file (the message that holds the feedback), and in another the prompts of
    Selection and Summary without the forms of the skills in them. limits: {role: most skills in a call of its tool}.
    Raises an error of any kind for a file in neither layout.
    """
    texts = dict(parsed.get("prompts") or {})
    tools = copy.deepcopy(parsed.get("tools") or {})
    for turn in parsed.get("per_turn_prompts") or ():
        if turn["name"] == "tool_response":
            texts |= {"feedback": turn["template"].format(feedback="__feedback__"), "verdict_form": "json"}
    if {"selection_user", "summary_user"} <= texts.keys() and "candidate" not in texts:
        texts = FORMS | texts
        for role, most in limits.items():
            for tool in tools.get(role, ())[:1]:
                limit_tool(role, tool["function"], most)
    return {"prompts": texts, "tools": tools}


def limit_tool(role, function, most):
    """Say in a tool's texts how many skills a call may hold, as the release's skill_prompt_builder.py does."""
    said = function["description"]
    if role == "selection":
        function["description"] = said.replace("the most", f"the top {most} most", 1)
    else:
        function["description"] = f"{said.rstrip('.')} with at most {most} skills."
    for entry in function["parameters"]["properties"].values():
        if entry["type"] == "array":
            entry["maxItems"] = most
            entry["description"] = f"{entry['description'].rstrip('.')} (at most {most})."


def json_feedback(verdict, reward) -> str:
    """A verdict as the release shows it (vllm_async_engine.py): its server's answer, and what reward_client.py adds.

    The server's client gets a whole answer (EvaluationResponse) for a kernel that compiles only. For another, and for a
    reply without ModelNew, we have fewer keys, as it has; an excerpt tells the two apart, as it tells an error in
    forward from a wrong output. A Verdict holds no ids, dates and device, and no CPU times of the kernels.
    """
    error = "\n".join(filter(None, [printable(verdict.rejected or verdict.error or ""), verdict.excerpt])) or None
    added = {"reward": reward, "speedup": verdict.speedup or 0.0, "success": verdict.correct,
             "correctness": verdict.correct, "compiled": verdict.compiled and not verdict.rejected}
    if not verdict.compiled and not verdict.rejected:
        server = {"status": "failed", "error_message": error} if verdict.excerpt else {}
        return json.dumps(server | added | {"error": error}, ensure_ascii=False, indent=2)
    code = "RUNTIME_ERROR" if verdict.excerpt else "CORRECTNESS_ERROR"
    kernels, facts = json_profile(verdict)
    server = {"status": "completed", "compiled": True, "correctness": verdict.correct,
              "decoy_kernel": bool(verdict.rejected), "reference_runtime": verdict.reference_ms or -1.0,
              "kernel_runtime": verdict.candidate_ms or -1.0, "speedup": 0.0, "metadata": kernels,
              "error_message": error, "error_code": None if verdict.correct or verdict.rejected else code}
    if verdict.rejected:
        added |= {"error": "Reward hacking: Decoy kernel detected", "score": reward}
    else:
        added |= {"score": reward, "profiling": None} | facts
    return json.dumps(server | added, ensure_ascii=False, indent=2)


def json_profile(verdict) -> tuple[dict, dict]:
    """(the kernels, their numbers and times) of a correct verdict, as `json_feedback` has them, in microseconds."""
    profile = verdict.profile if verdict.correct else []
    total = 1000 * verdict.candidate_ms if verdict.correct else 0.0
    table = [{"name": printable(entry.name), "cuda_time_us": entry.share * total} for entry in profile]
    own = [entry.share * total for entry in profile if entry.own]
    facts = {"num_custom_kernel": len(own), "num_total_kernels": len(table),
             "custom_kernel_cuda_time_in_profiling_us": sum(own), "total_kernel_run_time_in_profiling_us": total}
    profiling = {"kernels": table, "kernel_count": len(table), "total_cuda_time_us": total}
    return {"profiling": profiling} if verdict.correct else {}, facts
