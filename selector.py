"""The Selection role: which skills may help with this task? BM25 recall, then LLM reranking (paper section 3, 'Select')."""

import backbone

TASK_CHARACTERS = 1000  # of the task's source that Selection sees


def selection_messages(task, candidates) -> list[dict]:
    """Task head and candidate skills: names, descriptions, scopes and tags; never the bodies."""
    lines = [f"- {s.name} [{s.scope}] ({', '.join(s.tags)}): {s.description}" for s in candidates]
    user = f"```python\n{task.source.strip()[:TASK_CHARACTERS]}\n```\n\nCandidate skills:\n" + "\n".join(lines)
    return [{"role": "system", "content": backbone.SYSTEM["selection"]}, {"role": "user", "content": user}]
