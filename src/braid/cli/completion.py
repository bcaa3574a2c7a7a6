"""`braid completion bash|zsh|fish`: a script that completes commands, recipes, options and their choices.

The script has everything in it: pressing Tab starts no Python. bash and zsh share the tables, as both read
`case` and arrays. An option of a part that a recipe lacks (`--model.latent-attention.rank`) is offered too: the
script knows no recipe.
"""

from __future__ import annotations

import dataclasses
import shlex
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from braid import recipes
from braid.cli.args import Command, wants_help
from braid.cli.checkpoint import InspectOptions
from braid.cli.checkpoint import VerifyOptions as VerifyCheckpointOptions
from braid.cli.convert import ExportOptions, ImportOptions
from braid.cli.data import BuildOptions
from braid.cli.data import VerifyOptions as VerifyDataOptions
from braid.cli.diff import DiffOptions
from braid.cli.evaluate import EvalOptions
from braid.cli.generate import GenerateOptions
from braid.cli.grid import GridOptions, RunGridOptions
from braid.cli.pattern import PatternOptions
from braid.cli.plan import PlanOptions
from braid.cli.prove import ProveOptions
from braid.cli.recipes import ShowOptions
from braid.cli.report import ReportOptions
from braid.cli.trace import SummaryOptions
from braid.cli.train import TrainOptions
from braid.cli.watch import WatchOptions
from braid.config import Run
from braid.errors import ConfigError, ExitCode
from braid.json_fields import field_types
from braid.validators import nearest

INSTALL = types.MappingProxyType(
    {
        "bash": "~/.local/share/bash-completion/completions/braid",
        "zsh": "~/.zfunc/_braid",
        "fish": "~/.config/fish/completions/braid.fish",
    }
)
"""Where each shell looks for the script."""

HELP = """usage: braid completion bash|zsh|fish

Print a script with which the shell completes commands, recipes, options and their choices. Install it once:

{lines}

zsh looks there if ~/.zshrc has `fpath+=~/.zfunc` before `compinit`. Then open a new terminal. After an
update of braid, repeat the command."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a command."""

    flag: str
    choices: tuple[str, ...] = ()
    """Its values; empty for any others."""
    several: bool = False
    """Whether it takes more than one value."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What may follow a command."""

    name: str
    words: tuple[str, ...] = ()
    """That may come first: recipes, actions, shells. Files may too."""
    options: tuple[Option, ...] = ()


def completion(args: list[str]) -> int:
    if wants_help(args):
        width = max(map(len, INSTALL))
        lines = [f"  braid completion {shell:<{width}} > {file}" for shell, file in INSTALL.items()]
        print(HELP.format(lines="\n".join(lines)))
        return ExitCode.OK
    if not args:
        raise ConfigError("`braid completion` needs a shell, bash, zsh or fish: braid completion bash")
    if args[0] not in SCRIPTS:
        given = f"{args[0]!r}{nearest(args[0], SCRIPTS)}"
        raise ConfigError(f"`braid completion` takes bash, zsh or fish, got {given}")
    if args[1:]:
        raise ConfigError(f"`braid completion {args[0]}` takes no arguments, got {args[1]!r}")
    from braid.cli import COMMANDS

    print(SCRIPTS[args[0]](COMMANDS, completions()), end="")
    return ExitCode.OK


def completions() -> list[Completion]:
    """Of every command that takes anything."""
    from braid.cli.calibrate import CalibrateOptions  # imports torch, which most commands do without

    return [
        *(
            Completion(name=name, words=tuple(recipes.bundled()), options=_joined(kinds))
            for name, kinds in (
                ("train", (TrainOptions,)),
                ("plan", (PlanOptions,)),
                ("show", (ShowOptions,)),
                ("prove", (ProveOptions,)),
                ("grid", (GridOptions, RunGridOptions)),
            )
        ),
        *(
            Completion(name=name, options=_joined((kind,)))
            for name, kind in (
                ("watch", WatchOptions),
                ("report", ReportOptions),
                ("generate", GenerateOptions),
                ("eval", EvalOptions),
                ("import", ImportOptions),
                ("export", ExportOptions),
                ("diff", DiffOptions),
                ("pattern", PatternOptions),
                ("calibrate", CalibrateOptions),
                ("data build", BuildOptions),
                ("data verify", VerifyDataOptions),
                ("checkpoint verify", VerifyCheckpointOptions),
                ("checkpoint inspect", InspectOptions),
                ("trace summary", SummaryOptions),
            )
        ),
        Completion(name="data", words=("build", "verify")),
        Completion(name="checkpoint", words=("verify", "inspect")),
        Completion(name="trace", words=("summary",)),
        Completion(name="completion", words=tuple(SCRIPTS)),
    ]


# ----------------------------------------------------------------------------------------------- options


def _joined(kinds: Sequence[type]) -> tuple[Option, ...]:
    found = {option.flag: option for kind in kinds for option in _options(kind, "", in_run=False)}
    return (*found.values(), Option(flag="--help"))


def _options(kind: type, at: str, *, in_run: bool) -> Iterator[Option]:
    """One for each field, as tyro names them; fields of parts have the names of the parts before them."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    for name, hint in field_types(kind).items():
        arms = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        inner = next(arm for arm in arms if arm is not types.NoneType)
        flag = f"{at}{name.replace('_', '-')}"
        if inner is Run:
            yield from _options(Run, "", in_run=True)
        elif dataclasses.is_dataclass(inner):
            yield from _options(typing.cast(type, inner), f"{flag}.", in_run=in_run)
        elif inner is bool and not in_run:
            yield Option(flag=f"--no-{flag}" if defaults[name] is True else f"--{flag}")
        elif not _is_mapping_of_parts(inner):
            several = typing.get_origin(inner) in (tuple, Mapping)
            choices = _choices(typing.get_args(inner)[0] if several else inner)
            optional = ("None",) if choices and len(arms) > 1 and in_run else ()
            yield Option(flag=f"--{flag}", choices=(*choices, *optional), several=several)


def _choices(hint: Any) -> tuple[str, ...]:
    if hint is bool:
        return ("True", "False")
    return tuple(map(str, typing.get_args(hint))) if typing.get_origin(hint) is Literal else ()


def _is_mapping_of_parts(hint: Any) -> bool:
    """Modules: their options have names that a recipe chooses."""
    return typing.get_origin(hint) is Mapping and dataclasses.is_dataclass(typing.get_args(hint)[1])


# ----------------------------------------------------------------------------------------------- scripts


def bash(commands: Sequence[Command], found: Sequence[Completion]) -> str:
    names = " ".join(command.name for command in commands)
    return f"""# Completion of braid for bash: braid completion bash > {INSTALL["bash"]}
{_tables(found)}
_braid() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before=("${{COMP_WORDS[@]:1:COMP_CWORD-1}}")
    local words options choices
    if ((COMP_CWORD == 1)); then
        mapfile -t COMPREPLY < <(compgen -W "{names} --help --version" -- "$current")
        return
    fi
    _braid_find "${{before[@]}}"
    if [[ $current == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$options" -- "$current")
    elif [[ -n $choices ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$choices" -- "$current")
    else
        compopt -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current"; compgen -f -- "$current")
    fi
}}
complete -F _braid braid
"""


def zsh(commands: Sequence[Command], found: Sequence[Completion]) -> str:
    described = "\n".join(f"            {shlex.quote(f'{each.name}:{each.summary}')}" for each in commands)
    return f"""#compdef braid
# Completion of braid for zsh: braid completion zsh > {INSTALL["zsh"]}
{_tables(found)}
_braid() {{
    local current="${{words[CURRENT]}}"
    local -a before=("${{(@)words[2,CURRENT-1]}}") commands
    if ((CURRENT == 2)); then
        commands=(
{described}
        )
        _describe command commands
        return
    fi
    local found_words options choices
    () {{ local words; _braid_find "$@"; found_words=$words }} "${{before[@]}}"
    if [[ $current == -* ]]; then
        compadd -- ${{=options}}
    elif [[ -n $choices ]]; then
        compadd -- ${{=choices}}
    else
        [[ -n $found_words ]] && compadd -- ${{=found_words}}
        _files
    fi
}}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _braid "$@"
else
    compdef _braid braid
fi
"""


def _tables(found: Sequence[Completion]) -> str:
    """A function that sets `words`, `options` and `choices` from the words before the cursor."""
    words = [f'        "{each.name}") words="{" ".join(each.words)}" ;;' for each in found if each.words]
    options = [
        f'        "{each.name}") options="{" ".join(option.flag for option in each.options)}" ;;'
        for each in found
        if each.options
    ]
    chosen: dict[tuple[str, bool], list[str]] = {}
    for each in found:
        for option in each.options:
            if option.choices:
                chosen.setdefault((" ".join(option.choices), option.several), []).append(
                    f'"{each.name} {option.flag}"'
                )

    def choices(several: bool) -> str:
        lines = (
            f'        {"|".join(names)}) choices="{values}" ;;'
            for (values, many), names in chosen.items()
            if many or not several
        )
        return "\n".join(lines)

    both = "|".join(each.name.replace(" ", "\\ ") for each in found if " " in each.name)
    return f"""\
_braid_find() {{
    local command="$1" count=$# previous="" last="" word
    case "$1 ${{2-}}" in
        {both}) command="$1 $2" ;;
    esac
    words="" options="" choices=""
    for word in "$@"; do
        previous="$word"
        [[ $word == --* ]] && last="$word"
    done
    if [[ $command == *" "* ]]; then ((count -= 1)); fi
    if ((count == 1)); then
        case "$command" in
{chr(10).join(words)}
        esac
    fi
    case "$command" in
{chr(10).join(options)}
    esac
    case "$command $previous" in
{choices(several=False)}
    esac
    [[ -n $choices ]] && return
    case "$command $last" in
{choices(several=True)}
    esac
    return 0
}}
"""


def fish(commands: Sequence[Command], found: Sequence[Completion]) -> str:
    lines = [
        f"# Completion of braid for fish: braid completion fish > {INSTALL['fish']}",
        "function __braid_command",
        "    set -l words (commandline -opc)",
        '    contains -- "$words[2]" $argv; or contains -- "$words[2..3]" $argv',
        "end",
        "function __braid_words",
        "    test (count (commandline -opc)) -eq $argv[1]",
        "end",
        "function __braid_after",
        "    set -l words (commandline -opc)",
        '    test "$(string match -- "--*" $words)[-1]" = "$argv[1]"',
        "end",
        "complete -c braid -n '__braid_words 1' -f",
    ]
    for command in commands:
        lines.append(
            f"complete -c braid -n '__braid_words 1' -a {command.name} -d {shlex.quote(command.summary)}"
        )
    for each in found:
        if each.words:
            condition = f"__braid_words 2; and __braid_command {each.name}"
            lines.append(f"complete -c braid -n '{condition}' -a {shlex.quote(' '.join(each.words))}")
    shared: dict[Option, list[str]] = {}
    for each in found:
        for option in each.options:
            shared.setdefault(option, []).append(each.name)
    for option, names in shared.items():
        condition = "__braid_command " + " ".join(f'"{name}"' for name in names)
        values = f" -xa {shlex.quote(' '.join(option.choices))}" if option.choices else ""
        lines.append(f"complete -c braid -n '{condition}' -l {option.flag.removeprefix('--')}{values}")
        if option.choices and option.several:
            more = shlex.quote(f"__braid_after {option.flag}; and {condition}")
            lines.append(f"complete -c braid -n {more} -fa {shlex.quote(' '.join(option.choices))}")
    return "\n".join(lines) + "\n"


SCRIPTS: Mapping[str, Callable[[Sequence[Command], Sequence[Completion]], str]] = types.MappingProxyType(
    {
        "bash": bash,
        "zsh": zsh,
        "fish": fish,
    }
)
