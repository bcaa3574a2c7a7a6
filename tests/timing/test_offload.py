"""The offload that hides: as much as the link moves while a micro-batch runs forward, and no block more."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from braid.cli import main
from braid.config import Run
from braid.errors import ExitCode
from braid.planning.estimate import estimate
from braid.planning.plan import plan
from braid.schedule import Act
from braid.timing.calibration import load
from braid.timing.meter import ClusterMeter
from braid.timing.offload import hidden_offload
from braid.timing.step import Stepper
from tests.timing.test_step import CLUSTER, qwen

RUNS = {
    "alone": (qwen("[*E]x5", micro_batches=2, shard="none"), 2),
    "one process": (qwen("[*E]x4", micro_batches=1), 1),
    "pipeline": (qwen("[*E]x3|[*E]x5", micro_batches=4, pp=2, ep=2, shard="optimizer"), 4),
}


def forward_seconds(run: Run, world: int) -> list[float]:
    """Of a micro-batch on each stage, by the simulated step."""
    made = plan(replace(run, train=replace(run.train, offload=1.0)), world)
    spans = Stepper(made).timeline(ClusterMeter(made, CLUSTER, load("h100"))).spans
    return [
        sum(span.end - span.start for span in own if span.op.act is Act.F and span.op.micro_batch == 0)
        for own in spans
    ]


@pytest.mark.parametrize("regions", [(), ("experts",)], ids=["blocks", "experts"])
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("link", [20e9, 60e9])
def test_what_hides_is_what_the_link_moves_in_a_forward(name: str, regions: tuple, link: float) -> None:
    run, world = RUNS[name]
    seconds = forward_seconds(run, world)

    def hides(share: float) -> bool:
        train = replace(run.train, offload=share, offload_regions=regions if share else ())
        stages = estimate(plan(replace(run, train=train), world)).stages
        moved = [0 if stage.offload is None else stage.offload.offloaded for stage in stages]
        return all(size <= link * each for size, each in zip(moved, seconds, strict=True))

    asked = replace(run, train=replace(run.train, offload=1.0, offload_regions=regions))
    share = hidden_offload(asked, world, CLUSTER, link=link)
    assert hides(share)
    assert share == 1.0 or not hides(round(share + 0.01, 2))


def test_the_command_prints_the_share_and_by_how_much_the_peak_falls(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "qwen3-30b-a3b", "--world", "2", "--cluster", "h100-ib", "--mesh.tp", "1"]
    words += ["--mesh.pp", "1", "--mesh.ep", "2", "--model.pattern", "[*E]x6"]
    words += ["--train.batch-samples", "8", "--train.micro-batches", "1"]
    assert main([*words, "--offload-by-time"]) == ExitCode.OK
    printed = capsys.readouterr().out
    share = printed.split("to train with it: --train.offload ")[1].split()[0]
    assert 0 < float(share) < 1
    kept, away = (
        json.loads(out)
        for each in ([], ["--train.offload", share])
        if main([*words, *each, "--json"]) == ExitCode.OK and (out := capsys.readouterr().out)
    )
    assert away["peak_without_offload"] == kept["peak"] > away["peak"]
    assert f"to {away['peak'] / 2**30:,.1f} GiB on the fullest rank" in printed


@pytest.mark.parametrize(
    ("words", "rule"),
    [([], "needs --cluster"), (["--cluster", "h100-ib", "--search"], "--search lists several")],
    ids=["no cluster", "search"],
)
def test_what_has_no_offload_by_time_is_refused(words, rule, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny", "--offload-by-time", *words]) == ExitCode.CONFIG
    assert rule in capsys.readouterr().err
