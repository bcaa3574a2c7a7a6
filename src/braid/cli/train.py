"""`braid train`: plan a run, launch its ranks, train, and print a summary.

`train` runs in the launching process and again in every worker, which it recognizes by RANK or WORLD_SIZE in
the environment. Invalid options and runs are rejected before torch is imported or any process starts.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from braid import validators
from braid.cli.args import optional, parse_options, perfetto_hint, split_positional
from braid.cli.next_steps import PROGRAM, Prompt, next_commands, program, prompt_of
from braid.cli.plan_files import TRACE, is_other_kind
from braid.cli.plan_notes import graph_lines, ineffective_options, schedule_summary, trained_summaries
from braid.cli.progress import bar
from braid.cli.recipes import RunFields, expand_recipe_help
from braid.cli.sources import load_source, output_folder
from braid.cli.step_bar import step_bar
from braid.config import Run, to_json
from braid.console import flush_at_exit
from braid.errors import BraidError, ConfigError, ExitCode, PreemptedError, Problem
from braid.planning.divisibility import describe_mesh, most_ranks
from braid.planning.modules import encoder_size
from braid.planning.plan import Plan, check
from braid.planning.plan import plan as make_plan
from braid.planning.plan import size as size_of
from braid.precision import FASTEST, described
from braid.train.surgery import parse_rules

if TYPE_CHECKING:
    from braid.train.init_from import InitOptions
    from braid.train.loop import Outcome
    from braid.train.metrics import Listener
    from braid.train.trainer import Trainer

OUT_OF_SERVICE = "out-of-service"
"""File in the run's folder with slots that are not to be used, one per line."""

SAMPLE_TOKENS = 200
DISTRIBUTED_SAMPLE_TOKENS = 40
"""Fewer than on one rank: distributed generation has no KV cache, so every token recomputes the sequence."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train a model. To resume an interrupted run, repeat the command."""

    run: RunFields
    out: Annotated[Path | None, optional("DIR", "runs/RECIPE")] = None
    """Run directory: checkpoints, metrics.jsonl, tokenized data."""
    init: Annotated[Path | None, optional("PATH", "random initialization")] = None
    """Initialize a new run from this checkpoint or run of the same model; the optimizer starts from scratch."""
    fresh_weights: bool = False
    """Take only the settings of a folder given as RECIPE, and draw new weights."""
    start_over: bool = False
    """If all checkpoints of the run are damaged, keep them under other names and train from step 0."""
    init_rules: Annotated[tuple[str, ...], optional("RULE [RULE ...]", "the models are the same")] = ()
    """With --init, how a model that differs starts: untie, vocab, mtp, hyper, upcycle, blocks:0,1,-,2,
    fresh:GLOB, drop:GLOB (docs/init.md)."""
    init_allow: Annotated[tuple[str, ...], optional("NAME [NAME ...]", "none")] = ()
    """With --init, settings that may differ although that changes the model: model.attention.rope_base."""
    init_modules: Annotated[tuple[str, ...], optional("NAME=PATH [NAME=PATH ...]", "those of --init")] = ()
    """With --init, checkpoints or runs that modules start from: vision=runs/radio."""
    init_plan: bool = False
    """With --init, print where every tensor comes from, and exit."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses a GPU if one is available."""
    world: Annotated[int | None, optional("INT", "1, or the world size of torchrun")] = None
    """Number of ranks to start on this machine."""
    restarts: int = 0
    """How many times to restart all ranks after one fails; training resumes from the latest checkpoint."""
    min_world: Annotated[int | None, optional("INT", "--world")] = None
    """With --restarts, or under torchrun: go on with as few ranks as this if others do not come back."""
    check_collectives: bool = False
    """For debugging: ranks compare op, shape, dtype and order of each collective before it runs (slow)."""
    tensorboard: bool = False
    """Log metrics to TensorBoard files in the run directory (needs the package tensorboard)."""
    wandb: Annotated[str | None, optional("PROJECT", "off")] = None
    """Log metrics to this Weights & Biases project (needs the package wandb)."""
    trace: Annotated[Path | None, optional("FILE", "off")] = None
    """Write a trace of all ranks, for Perfetto or chrome://tracing."""
    trace_steps: str = "2:4"
    """Steps to trace as FIRST:LAST, counted from 1 at the start of this command."""


def train(args: list[str]) -> int:
    """Launch the ranks of the run, or run as one of them."""
    if not _is_worker():
        return _launch(args, *_parse(args))
    from braid.launch.process import refusal_told, release_surplus, wait_as_surplus

    with refusal_told(os.environ):
        plan, opts, out = _worker_plan(args)
    code = int(ExitCode.BUG)
    if int(os.environ["RANK"]) >= plan.world:
        code = wait_as_surplus(os.environ)
    else:
        try:
            code = _run_rank(plan, out, args, opts)
        except BraidError as error:
            code = error.exit_code
            raise
        finally:
            release_surplus(os.environ, plan.world, code)
    flush_at_exit()
    # Skip interpreter shutdown: threads of destroyed communicators may outlive it and abort the process.
    os._exit(code)


def _is_worker() -> bool:
    """Whether a launcher has started this process as a rank."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def _parse(args: list[str]) -> tuple[TrainOptions, Path]:
    """The options, and the folder of the run."""
    name, rest = split_positional(expand_recipe_help(args), "train", "RECIPE")
    source = load_source(name, rest)
    opts = parse_options(TrainOptions, rest, f"braid train {name}", TrainOptions(run=source.run))
    out = output_folder(name, source, opts.out)
    if opts.init is None and not opts.fresh_weights and out != source.folder:
        opts = replace(opts, init=source.checkpoint)
    return opts, out


def _launch(args: list[str], opts: TrainOptions, out: Path) -> int:
    """Train in this process, or launch the ranks."""
    opts = _on_device(opts, 1 if opts.world is None else opts.world)
    plan = _checked_plan(opts, 1 if opts.world is None else opts.world)
    if opts.min_world is not None and not opts.restarts:
        raise ConfigError(f"--min-world {opts.min_world} is about restarts: set --restarts N too")
    if opts.init_plan:
        return _print_init_plan(plan, opts)
    if plan.world == 1 and opts.restarts == 0:
        return _run_rank(plan, out, args, opts)
    from braid.launch.elastic import Slots
    from braid.launch.worker_pool import check_gpus, launch
    from braid.train.memory_checkpoints import memory_folder
    from braid.train.run_dir import RunDir

    check_gpus(plan.world, opts.device)
    print(f"starting {plan.world} ranks", file=sys.stderr)
    command = [sys.executable, "-m", "braid", "train", *args]
    smallest = plan.world if opts.min_world is None else opts.min_world
    job = uuid.uuid4().hex
    try:
        return launch(
            command,
            slots=Slots(plan.world, min_world=smallest, fits=_fits(opts.run), file=out / OUT_OF_SERVICE),
            restarts=opts.restarts,
            environment={**os.environ, PROGRAM: shlex.join(program())},
            failures=RunDir(out=out).failures,
            job=job,
        )
    finally:
        shutil.rmtree(memory_folder(out, job), ignore_errors=True)


def _on_device(opts: TrainOptions, world: int) -> TrainOptions:
    """The options with what the GPU at hand decides: precision that pays, and where copies of offload stand."""
    run = opts.run
    if FASTEST not in run.train.precision and not run.train.offload:
        return opts
    import torch

    from braid.timing.fastest import fastest
    from braid.timing.offload import decided_on, times_on

    on_gpu = opts.device != "cpu" and torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else None
    precise = fastest(run, world, device)
    placed = decided_on(precise.run, world, device)
    if os.environ.get("RANK", "0") == "0":
        for reason in (*precise.reasons, *placed.reasons):
            print(reason, file=sys.stderr)
    return replace(opts, run=placed.run if device is None else times_on(placed.run, world, device))


def _checked_plan(opts: TrainOptions, world: int) -> Plan:
    """The plan, or a `ConfigError` with all problems. If they all vanish with another world size, the error is
    one line that proposes the nearest world sizes that fit."""
    problems = check(opts.run, world)
    persistent = check(opts.run, world + 1) if problems else []
    if problems and not any(problem in persistent for problem in problems):
        from braid.launch.elastic import nearest_worlds

        near = nearest_worlds(_fits(opts.run), world, most_ranks(opts.run))
        if near:
            why = "; ".join(f"{problem.field} = {problem.value} {problem.rule}" for problem in problems)
            fitting = " and ".join(str(other) for other in near)
            raise ConfigError(f"--world {world} does not fit: {why}. The nearest that fit: {fitting}")
    problems += validators.at_least("restarts", opts.restarts, 0)
    if opts.min_world is not None:
        problems += _min_world_problems(opts.min_world, opts.run, world)
    problems += _trace_problems(opts.trace, opts.trace_steps)
    if problems:
        raise ConfigError(problems)
    if opts.init is None and (opts.init_rules or opts.init_allow or opts.init_modules or opts.init_plan):
        options = "--init-rules, --init-allow, --init-modules and --init-plan"
        raise ConfigError(f"{options} need a checkpoint: set --init PATH")
    parse_rules(opts.init_rules)
    _parse_modules(opts.init_modules)
    return make_plan(opts.run, world)


def _min_world_problems(smallest: int, run: Run, world: int) -> Iterator[Problem]:
    """What is wrong with --min-world, if the run has `world` ranks otherwise."""
    rule = None
    if not 1 <= smallest < world:
        rule, remedy = f"must be from 1 to {world - 1}, below the number of ranks", "fewer, or leave it out"
    elif not any(_fits(run)(fewer) for fewer in range(smallest, world)):
        rule = f"no number of ranks from {smallest} to {world - 1} fits the mesh and the samples of a step"
        remedy = "fewer, or leave it out"
    if rule is not None:
        yield Problem(field="min-world", value=smallest, rule=rule, remedy=remedy)


def _fits(run: Run) -> Callable[[int], bool]:
    """Whether a run can be planned for a number of ranks."""
    return lambda world: not check(run, world)


def _print_init_plan(plan: Plan, opts: TrainOptions) -> int:
    from braid.train.init_from import plan_lines, start_from
    from braid.train.state import resolve_checkpoint

    assert opts.init is not None, "checked with the plan"
    path, options = resolve_checkpoint(opts.init), _init_options(opts)
    for line in plan_lines(path, plan, start_from(path, plan, options)):
        print(line)
    return ExitCode.OK


def _init_options(opts: TrainOptions) -> InitOptions:
    from braid.train.init_from import InitOptions

    modules = _parse_modules(opts.init_modules)
    return InitOptions(rules=parse_rules(opts.init_rules), allow=opts.init_allow, modules=modules)


def _parse_modules(texts: Sequence[str]) -> dict[str, Path]:
    """Modules and their checkpoints, from `NAME=PATH`."""
    pairs = [(text, *text.split("=", 1)) for text in texts]
    if wrong := [text for text, *parts in pairs if len(parts) != 2 or not all(parts)]:
        raise ConfigError(f"--init-modules {wrong[0]}: must be NAME=PATH, for example vision=runs/radio")
    named = {name: Path(path) for _, name, path in pairs}
    if len(named) < len(pairs):
        raise ConfigError("--init-modules: a module is given twice; keep one of them")
    return named


def _parse_trace_steps(text: str) -> range | None:
    """`FIRST:LAST` as a range of steps counted from 1; None if the text is invalid."""
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        return None
    return range(int(first), int(last) + 1)


def _trace_problems(file: Path | None, text: str) -> Iterator[Problem]:
    if file is not None and is_other_kind(file, TRACE):
        rule = "is a file of another kind, and would be lost"
        yield Problem(field="trace", value=str(file), rule=rule, remedy="another file")
    if _parse_trace_steps(text) is None:
        rule = "must be FIRST:LAST, two steps counted from 1, FIRST not after LAST"
        yield Problem(field="trace-steps", value=text, rule=rule, remedy="for example 2:4")


def _worker_plan(args: list[str]) -> tuple[Plan, TrainOptions, Path]:
    """Of one rank of a launcher, braid's own or torchrun: the plan, the options and the folder of the run."""
    from braid.launch.elastic import largest_world
    from braid.launch.process import LAUNCHER, launch_env_of
    from braid.launch.worker_pool import die_with_launcher

    die_with_launcher(os.environ)
    opts, out = _parse(args)
    env = launch_env_of(os.environ)
    assert env is not None
    if LAUNCHER in os.environ:
        opts = _on_device(opts, env.world)
        return _checked_plan(replace(opts, min_world=None), env.world), opts, out
    if opts.world not in (None, env.world):
        raise ConfigError(
            f"--world {opts.world}, but the launcher started {env.world} ranks: leave --world out"
        )
    if opts.restarts:
        raise ConfigError(
            f"--restarts {opts.restarts} applies only to ranks that braid starts itself: "
            "pass --max-restarts to torchrun instead"
        )
    world = env.world
    if opts.min_world is not None:
        world = largest_world(_fits(opts.run), env.world, opts.min_world) or env.world
        if env.rank == 0 and world < env.world:
            print(f"braid: going on with {world} ranks of {env.world}, the others wait", file=sys.stderr)
    opts = _on_device(opts, world)
    return _checked_plan(replace(opts, min_world=None), world), opts, out


def _run_rank(plan: Plan, out: Path, args: list[str], opts: TrainOptions) -> int:
    """Train as one rank. Only rank 0 prints, and only rank 0 reports an error that all ranks raise."""
    # Imports torch, which takes seconds: only after the arguments are validated.
    from braid.launch.process import is_everywhere, launch_env_of, leave

    env = launch_env_of(os.environ)
    rank = 0 if env is None else env.rank
    try:
        with ExitStack() as stack:
            if rank != 0:
                stack.enter_context(redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
            return _train(plan, out, args, opts)
    except BraidError as error:
        if rank == 0 or not is_everywhere(error):
            raise
        return error.exit_code
    finally:
        leave()


def _train(plan: Plan, out: Path, args: list[str], opts: TrainOptions) -> int:
    from braid.console import say, table, warn
    from braid.interchange.side_files import hand_on
    from braid.train.export_settings import run_of
    from braid.train.state import resolve_checkpoint
    from braid.train.trainer import Trainer

    trace_steps = _parse_trace_steps(opts.trace_steps)
    assert trace_steps is not None, "checked with the plan"
    with bar("tokenizing the data") as progress:
        trainer = Trainer(
            plan,
            out=out,
            init=opts.init,
            init_options=_init_options(opts),
            start_over=opts.start_over,
            device=opts.device,
            trace=opts.trace,
            trace_steps=trace_steps,
            watch=True,
            check_collectives=opts.check_collectives,
            build_progress=progress,
            command=shlex.join([*program(os.environ), "train", *args]),
            environment={**os.environ, "WORLD_SIZE": str(plan.world)} if _is_worker() else os.environ,
        )
    with trainer:
        say(_first_line(args[0], trainer, opts.init))
        if opts.init is not None and trainer.process.rank == 0:
            hand_on(run_of(resolve_checkpoint(opts.init, quiet=True)), out)
        say(table(_header(trainer, opts.init)))
        say("")
        if trainer.process.rank == 0:
            for note in ineffective_options(plan):
                warn(note)
            trainer.listeners += _metric_listeners(opts, out)
        with step_bar() as trainer.show:
            outcome = trainer.train()
        try:
            sample, prompt = _sample(trainer)
        except SystemExit as end:  # SIGTERM
            raise PreemptedError(
                f"stopped after the last step, which is saved in {outcome.checkpoint}"
            ) from end
    say("")
    say(table([*sample, ("", ""), *_summary(outcome, trainer)]))
    say("\ntry next")
    for command in next_commands(args, out, plan, program(os.environ), os.environ, prompt):
        say(f"  {command}")
    return ExitCode.OK


def _first_line(name: str, trainer: Trainer, init: Path | None) -> str:
    """The command, and what a folder given as RECIPE contributes to the run."""
    if not Path(name).is_dir():
        return f"braid train {name}"
    if trainer.resumed:
        return f"braid train {name}: continues the run in {trainer.run_dir.out}"
    if init is None:
        return f"braid train {name}: its settings, with fresh weights"
    return f"braid train {name}: its settings, and the weights of {init}"


def _metric_listeners(opts: TrainOptions, out: Path) -> list[Listener]:
    from braid.train.metrics import TensorBoard, Wandb

    listeners: list[Listener] = []
    if opts.tensorboard:
        listeners.append(TensorBoard(out / "tensorboard"))
    if opts.wandb is not None:
        listeners.append(Wandb(opts.wandb, out, to_json(opts.run)))
    return listeners


def _header(trainer: Trainer, init: Path | None) -> Sequence[tuple[str, str]]:
    from braid.console import magnitude
    from braid.planning.local_model import choose_kernels

    plan, state, data, device = trainer.plan, trainer.state, trainer.data, trainer.device.torch
    run = plan.run
    size = size_of(plan)
    weights = f"{magnitude(size.total)} parameters, {magnitude(size.active)} active per token"
    position = f"step {state.step}, sample {state.samples}"
    status = f"continues from {position}" if trainer.resumed else "a new run"
    if init is not None and not trainer.resumed:
        status += f" from the weights of {init}"
    if state.step == run.train.steps:
        status = f"already finished at step {state.step}: nothing to do"
    kernels = [str(choice) for choice in choose_kernels(plan, device).choices]
    ranks = f"{plan.world}: {describe_mesh(run.mesh, plan.axes)}"
    return [
        ("model", f"{run.model.pattern}, {weights}"),
        *((name, _encoder(plan, name)) for name in plan.encoders),
        ("data", f"{data.name}, {magnitude(data.tokens)} tokens"),
        ("step", f"{plan.step_tokens:,} tokens = {run.train.batch_samples} x {run.data.sequence_tokens}"),
        ("device", f"{trainer.device.name}, {run.train.dtype}"),
        *([] if plan.world == 1 else [("ranks", ranks)]),
        *(("trained" if i == 0 else "", text) for i, text in enumerate(trained_summaries(plan))),
        *([("schedule", text)] if (text := schedule_summary(plan)) else []),
        *(("graphs" if i == 0 else "", text) for i, text in enumerate(graph_lines(plan, device.type))),
        *(("kernels" if i == 0 else "", text) for i, text in enumerate(kernels)),
        *(("precision" if i == 0 else "", text) for i, text in enumerate(described(run.train.precision))),
        ("out", f"{trainer.run_dir.out}, {status}"),
    ]


def _encoder(plan: Plan, name: str) -> str:
    """A module besides the language model, in one line."""
    from braid.console import magnitude

    each = plan.encoders[name]
    text = f"{each.module.model.pattern}, {magnitude(encoder_size(each))} parameters"
    return text if plan.world == 1 else f"{text}, {describe_mesh(each.module.mesh, each.axes)}"


def _sample(trainer: Trainer) -> tuple[Sequence[tuple[str, str]], Prompt]:
    """A short generated text, and a prompt for another, with images if the data have any. The run has succeeded
    by now, so a failure here is only reported in its place."""
    from braid.model.generate import decode_text

    tokens = SAMPLE_TOKENS if trainer.plan.world == 1 else DISTRIBUTED_SAMPLE_TOKENS
    data, run = trainer.data, trainer.plan.run
    shown, sources = "", run.data.sources
    prompt = Prompt(data.prompt, data.images) if data.images else prompt_of(sources, data.prompt)
    try:
        stored = None if data.images else trainer.stored_prompt()
        text = trainer.generate(stored or data.prompt, images=data.images, tokens=tokens, seed=run.train.seed)
        if stored is not None:
            placeholders = {name: module.token for name, module in run.modules.items()}
            prompt = Prompt(decode_text(data.tokenizer, stored.ids, placeholders), (Path("FILE"),))
            shown = "".join("[image] " * len(items.lengths) for items in stored.items.values())
        shown += "".join(f"[{image.name}] " for image in data.images)
    except BraidError as error:
        text = f"(none: {error})"
    lines = (_printable(line) for line in (shown + text).splitlines() or [""])
    return [("sample" if i == 0 else "", line) for i, line in enumerate(lines)], prompt


def _printable(line: str) -> str:
    """Escapes control characters, which a terminal would interpret."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)


def _exact_match(share: float, trainer: Trainer) -> str:
    """The share of exact answers, and what was trained for it if that is not everything."""
    trained = "; ".join(trained_summaries(trainer.plan))
    return f"{share:.1%} of the validation answers" + (f"; trained: {trained}" if trained else "")


def _summary(outcome: Outcome, trainer: Trainer) -> Sequence[tuple[str, str]]:
    validation = "n/a" if outcome.val_loss is None else f"{outcome.val_loss:.3f} nats per token"
    return [
        ("validation", f"{validation}; unigram entropy of the data: {trainer.data.unigram_entropy:.3f}"),
        *([] if outcome.exact_match is None else [("exact match", _exact_match(outcome.exact_match, trainer))]),
        ("checkpoint", str(outcome.checkpoint)),
        ("metrics", str(trainer.run_dir.metrics)),
        *([] if trainer.traced is None else [("trace", perfetto_hint(trainer.traced))]),
    ]
