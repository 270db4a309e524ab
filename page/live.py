"""What a run shows while it goes on: a line for each step, and its numbers for TensorBoard or Weights & Biases."""

from page.records import EVALUATION


def progress(line, options, library) -> str:
    """What a step prints; before the first step only the evaluation. line: of metrics.jsonl. library: after the step.

    `replies a+b+c` are those of Policy, Selection and Summary in the groups of the loss.
    """
    parts = ["before training"]  # then, if there are any, the skills found and the evaluation
    if line["step"]:
        rows = "+".join(map(str, line["rows"].values()))
        parts = [f"step {line['step']}/{options.steps}  reward {line['reward_best']:.3f}  "
                 f"correct {line['correct']:.0%}  Fast_1 {line['fast_1']:.0%}  speedup {line['speedup'] or 0:.2f}x "
                 f"({line['clock']})  replies {rows}  skills {line['library']} (+{line['staged']})  proposals "
                 f"passed {line['passed']} of {line['proposals']}  {sum(line['seconds'].values()):.0f} s"]
    if line.get("staged"):
        parts.append("new: " + ", ".join(skill.name for skill in library.skills[-line["staged"]:]))
    if "eval_fast_1" in line:
        figures = [f"{label} {line[key]:{form}}" for key, label, form in EVALUATION]
        parts.append(f"evaluation: {', '.join(figures)} ({line['clock']})")
    return ("  |  " if line["step"] else "  ").join(parts)


def tracker(log, out, config, step):
    """A function (numbers, step) that sends a dict of numbers to the program that `log` names.

    log: "files" (to none), "tensorboard" or "wandb". Both packages are optional. out: the run's folder; config: its
    options, a dict; step: of the checkpoint that it continues from.
    """
    if log == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter(out / "tensorboard", purge_step=step + 1)

        def write(numbers, step):
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)
            writer.flush()
        return write
    if log == "wandb":
        import wandb
        run = wandb.init(id=out.name, name=out.name, dir=out, config=config, resume="allow")  # the name identifies it
        return lambda numbers, step: run.log(numbers, step=step)
    return lambda numbers, step: None
