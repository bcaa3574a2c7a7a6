"""The offload that hides: no step is longer with it, and one is with a block more; places by seconds."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from braid.cli import main
from braid.config import Module, from_json, to_json
from braid.errors import ExitCode
from braid.planning.estimate import estimate
from braid.planning.plan import check, plan
from braid.timing.calibration import Calibration, load
from braid.timing.links import load_cluster
from braid.timing.meter import ClusterMeter
from braid.timing.offload import Decided, decided, decided_on, hidden_offload, times_on, with_times
from braid.timing.step import Stepper
from tests.model.encoder_cases import IMAGES
from tests.timing.test_step import CLUSTER, qwen

RUNS = {
    "alone": (qwen("[*E]x5", micro_batches=2, shard="none"), 2),
    "one process": (qwen("[*E]x4", micro_batches=1), 1),
    "pipeline": (qwen("[*E]x3|[*E]x5", micro_batches=4, pp=2, ep=2, shard="optimizer"), 4),
}


def on_link(rate: float) -> Calibration:
    return replace(load("h100"), host_link={"to_host": rate, "to_device": rate})


@pytest.mark.parametrize("regions", [(), ("experts",)], ids=["blocks", "experts"])
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("link", [20e9, 60e9])
def test_what_hides_makes_no_step_longer_and_a_block_more_does(name: str, regions: tuple, link: float) -> None:
    (run, world), known = RUNS[name], on_link(link)

    def seconds(share: float) -> float:
        train = replace(run.train, offload=share, offload_regions=regions if share else ())
        made = plan(with_times(replace(run, train=train), world, known), world)
        return Stepper(made).seconds(ClusterMeter(made, CLUSTER, known))

    asked = replace(run, train=replace(run.train, offload=1.0, offload_regions=regions))
    share, kept = hidden_offload(asked, world, CLUSTER, known), seconds(0.0)
    assert seconds(share) <= 1.011 * kept
    first = {"alone": 0.1, "one process": 0.13, "pipeline": 0.1}[name]
    assert share == 1.0 or seconds(round(share + 0.01, 2) if share else first) > 1.009 * kept


def test_places_follow_from_the_device_and_stay_with_the_run() -> None:
    run, world = qwen("[*E]x8", micro_batches=1), 1
    asked = replace(run, train=replace(run.train, offload=0.25))
    slow, fast = (with_times(asked, world, on_link(rate)) for rate in (5e9, 500e9))
    (kind, figures), (head, _) = (word.split("=") for word in slow.train.offload_times)
    assert (kind, head) == ("[*E]", "head")
    stage = estimate(plan(asked, world)).stages[0].offload
    assert stage is not None
    assert int(figures.split(",")[2]) == pytest.approx(stage.offloaded / 2 / 5e9 * 1e6, abs=1)
    lists = [" ".join(map(str, plan(each, world).schedule.ops[0])) for each in (slow, fast)]
    assert lists[0].index("RELOAD0.0:0.block#0") < lists[0].index("B0.0:4.block")
    assert lists[1].index("RELOAD0.0:0.block#0") > lists[1].index("B0.0:2.block")
    assert with_times(slow, world, on_link(500e9)) == slow, "a run that has times keeps them"
    assert from_json(to_json(slow)) == slow
    assert with_times(asked, world, replace(load("h100"), host_link={})) == asked
    assert times_on(asked, world, "a device that nobody knows") == asked
    assert times_on(asked, world, "NVIDIA H100 80GB HBM3") == with_times(asked, world, load("h100"))


def test_the_command_prints_the_share_and_by_how_much_the_peak_falls(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "qwen3-30b-a3b", "--world", "2", "--cluster", "h100-ib", "--mesh.tp", "1"]
    words += ["--mesh.pp", "1", "--mesh.ep", "2", "--model.pattern", "[*E]x6"]
    words += ["--train.batch-samples", "8", "--train.micro-batches", "1"]
    assert main([*words, "--train.offload", "auto"]) == ExitCode.OK
    printed = capsys.readouterr().out
    share = printed.split("train.offload auto: ")[1].split()[0]
    assert 0 < float(share) < 1
    kept, away = (
        json.loads(out)
        for each in ([], ["--train.offload", share])
        if main([*words, *each, "--json"]) == ExitCode.OK and (out := capsys.readouterr().out)
    )
    assert away["peak_without_offload"] == kept["peak"] > away["peak"]
    assert f"to {away['peak'] / 2**30:,.1f} GiB on the fullest rank" in printed


def test_a_run_leaves_the_share_to_its_device() -> None:
    run, world = qwen("[*E]x8", micro_batches=1), 1
    asked = replace(run, train=replace(run.train, offload="auto", offload_regions=("experts",)))
    assert not check(asked, world)
    assert from_json(to_json(asked)) == asked
    found = decided_on(asked, world, "NVIDIA H100 80GB HBM3")
    cluster = load_cluster("h100-ib")
    assert found == decided(asked, world, cluster)
    assert found.run.train.offload == hidden_offload(asked, world, cluster)
    given = replace(run, train=replace(run.train, offload=0.25))
    assert decided_on(given, world, "NVIDIA H100 80GB HBM3") == Decided(given)
    beside = replace(asked, modules={"vision": Module(model=IMAGES, token=3, most_patches=64)})
    for device, one, why in (
        (None, asked, "no GPU decides"),
        ("NVIDIA GeForce RTX 4090", asked, "ships no cluster of NVIDIA GeForce RTX 4090"),
        ("NVIDIA H100 80GB HBM3", beside, "for runs without modules"),
    ):
        found = decided_on(one, world, device)
        assert (found.run.train.offload, found.run.train.offload_regions) == (0.0, ())
        assert why in found.reasons[0]
    assert plan(asked, world).schedule == plan(run, world).schedule, "nobody has decided"


def test_no_step_waits_where_no_link_is_known() -> None:
    run = qwen("[*E]x8", micro_batches=1)
    asked = replace(run, train=replace(run.train, offload="auto"))
    known = replace(load("h100"), host_link={})
    assert "no calibration for the link to the host" in decided(asked, 1, CLUSTER, known).reasons[0]


def test_commands_say_what_auto_became(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny", "--train.offload", "auto"]) == ExitCode.OK
    assert "nothing is offloaded, no GPU decides" in capsys.readouterr().out
    words = ["plan", "tiny", "--world", "2", "--cluster", "h100-ib", "--train.offload", "auto"]
    assert main([*words, "--search"]) == ExitCode.CONFIG
    assert "leave train.offload out" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["show", "tiny", "--train.offload", "half"])
