"""Options: one dataclass a program, whose fields become the flags of its command line.

    @dataclass
    class Options:
        GROUPS: ClassVar = {"steps": "the run", ...}              the first field of each group of --help
        steps: int = option((6, 100, 200), "training steps")      three defaults, one for each of SIZES
        gamma: float = setting(1.0, "gamma: ...")                 no flag of its own: --set gamma=0.4

    given = parse(Options, argv, "What the program does.")        {name: value} of what was given, without defaults
    options = complete(Options, given, size=0)                    an Options with every default filled in

The dictionary `given` is kept apart from the defaults because some defaults are known only later: those of a model's
size when it is loaded, those of a run that is continued when its folder is read. Programs parse before they import
torch, so that --help and a misspelt flag are answered at once. What is then not loaded yet, such as a table whose names
an option takes, is checked later: see `check_name`.
"""

import argparse
import dataclasses
import sys

from command.process import UserError, report

LARGEST = 2**63 - 1  # of all numbers: what a seed may be
SIZES = "2 CPU cores", "one GPU", "a model over a billion parameters"  # what three defaults are for


def option(default, meaning, *, flag=True, above_0=False, most=LARGEST, **more):
    """A field of a dataclass of options. default: a value, or a tuple of three, one for each of SIZES.

    flag: does it have a flag of its own, or is it changed by --set NAME=VALUE? above_0, most: bounds of a number. more:
    arguments of argparse's add_argument, such as choices or metavar. A field's annotation is the type of its value.
    """
    first, text = default, default
    if isinstance(default, tuple):
        first = default[0]
        text = " | ".join(map(str, default)) if len(set(default)) > 1 else first
    if text not in ("", None, False):
        meaning += f" (default: {text})"
    return dataclasses.field(default=first, metadata={"default": default, "help": meaning, "flag": flag,
                                                      "above_0": above_0, "most": most, "more": more})


def setting(default, meaning, **more):
    """An option without a flag of its own, which --set NAME=VALUE changes."""
    return option(default, meaning, flag=False, **more)


def flag(name) -> str:
    """What an option is called on the command line.

    >>> flag("policy_tokens")
    '--policy-tokens'
    """
    return "--" + name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """Mistakes become one line, without the usage, and no option may be abbreviated."""

    def __init__(self, **more):
        super().__init__(allow_abbrev=False, argument_default=argparse.SUPPRESS, **more)

    def error(self, message):
        raise UserError(message)


def parse(kind, argv, description) -> dict:
    """The options that were given on a command line, without defaults. kind: a dataclass made of `option`s.

    Raises UserError for a mistake in the command line.
    """
    parser = Parser(description=description, usage="%(prog)s [options]",
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    settings, listed = Parser(add_help=False), ""  # argparse reads NAME=VALUE as the flag --NAME=VALUE of this one
    group = parser
    for field in dataclasses.fields(kind):
        if isinstance(field.metadata["default"], tuple):
            parser.description = f"{description}\n\nThree defaults are for {' | '.join(SIZES)}."
        if field.name in kind.GROUPS:
            group = parser.add_argument_group(kind.GROUPS[field.name])
        if field.metadata["flag"]:
            group.add_argument(flag(field.name), help=field.metadata["help"], **_argument(field))
        else:
            settings.add_argument(f"--{field.name}", **_argument(field))
            listed += f"\n  {field.name}: {field.metadata['help']}"
    if listed:
        parser.add_argument("--set", nargs="+", action="extend", metavar="NAME=VALUE", default=[],
                            help="change any of the further options that are listed below")
        parser.epilog = f"further options, by --set NAME=VALUE:{listed}"
    given = vars(parser.parse_args(argv))
    assignments = given.pop("set", [])
    return given | vars(settings.parse_args([f"--{assignment}" for assignment in assignments]))


def parse_early(kind, description):
    """Answer --help and refuse a bad command line, then forget it. For the lines of a program before torch is imported.
    """
    try:
        parse(kind, sys.argv[1:], description)
    except UserError as error:
        sys.exit(report(error))


def complete(kind, given, size=0):
    """All options: those given, and the defaults of a size (an index of SIZES). Raises UserError for a bad number."""
    values = {}
    for field in dataclasses.fields(kind):
        default = field.metadata["default"]
        if isinstance(default, tuple):
            default = default[size]
        values[field.name] = given.get(field.name, default)
        _check_number(field, values[field.name])
    return kind(**values | given)  # a name that is no option is a TypeError


def check_name(kind, name, value, table):
    """Raise UserError unless the value of option `name` is a name in a table."""
    if value not in table:
        raise UserError(f"{_typed(kind.__dataclass_fields__[name], value)}: choose from {', '.join(table)}")


def check_together(given, pairs):
    """Raise UserError for two options that contradict each other. pairs: flags as they are typed, two each.

    An option that is set to nothing (0 or an empty text) counts as not given.

    >>> check_together({"skills": False, "bm25_only": True}, [("--no-skills", "--bm25-only")])
    Traceback (most recent call last):
    command.process.UserError: --no-skills and --bm25-only contradict each other: choose one
    """
    typed = set()
    for name, value in given.items():
        if value:
            typed.add(flag(name))
        elif value is False:
            typed.add(flag(f"no_{name}"))
    for pair in pairs:
        if typed.issuperset(pair):
            raise UserError(f"{pair[0]} and {pair[1]} contradict each other: choose one")


def _check_number(field, value):
    """Raise UserError for a number that is negative, infinite or nan; for 0 where it is forbidden; above a bound."""
    facts = field.metadata
    if type(value) in (int, float) and (not 0 <= value <= facts["most"] or value == 0 and facts["above_0"]):
        least = "above 0" if facts["above_0"] else "from 0"
        limit = f" to {facts['most']:g}" if facts["most"] < LARGEST else ""
        raise UserError(f"{_typed(field, f'{value:g}')}: choose a number {least}{limit}")


def _typed(field, value) -> str:
    """How this value of an option is written on the command line."""
    return f"{flag(field.name)} {value}" if field.metadata["flag"] else f"--set {field.name}={value}"


def _argument(field) -> dict:
    """Arguments of add_argument. A bool's flag takes no value: --name, or --no-name where the default is True."""
    if field.type is bool and field.metadata["flag"]:
        return {"action": argparse.BooleanOptionalAction if field.default else "store_true"}
    return {"type": boolean if field.type is bool else field.type} | field.metadata["more"]


def boolean(text) -> bool:
    """True or False, as --set spells it. argparse reports the ValueError of another text with this function's name."""
    return ("False", "True").index(text) == 1
