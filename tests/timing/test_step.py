"""Step time: its parts add up, long steps follow from short ones, and what was not measured is said."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from braid import recipes
from braid.architecture import Mlp
from braid.cli import main
from braid.config import Run
from braid.errors import ConfigError
from braid.planning.plan import plan, with_micro_batches
from braid.timing.calibration import load
from braid.timing.links import load_cluster
from braid.timing.meter import ClusterMeter
from braid.timing.predict import predict
from braid.timing.seconds import COPIES
from braid.timing.step import BUBBLE, HOST, Stepper
from tests.engine.graph_runs import gpu_run, with_graphs


def qwen(
    pattern: str = "[*E]x8", micro_batches: int = 8, recompute: tuple[str, ...] = (), **mesh: object
) -> Run:
    run = recipes.load("qwen3-30b-a3b")
    return replace(
        run,
        model=replace(run.model, pattern=pattern),
        mesh=replace(run.mesh, **{"tp": 1, "pp": 1, "ep": 1, **mesh}),
        train=replace(
            run.train, batch_samples=16 * micro_batches, micro_batches=micro_batches, recompute=recompute
        ),
    )


CLUSTER = load_cluster("h100-ib")

MESHES = {
    "shards": {},
    "tensor": {"tp": 4},
    "experts": {"ep": 8},
    "overlap": {"ep": 8, "overlap": True, "delay_weights": True},
    "context": {"cp": 4, "shard": "gradients"},
    "late weights": {
        "ep": 8,
        "overlap": True,
        "delay_weights": True,
        "late_weights": True,
        "shard": "gradients",
    },
    "1f1b": {"pp": 4, "ep": 4, "shard": "optimizer"},
    "1f1b overlap": {"pp": 2, "ep": 4, "overlap": True, "shard": "gradients"},
    "interleaved": {"pp": 2, "ep": 8, "shard": "none"},
    "dual_pipe_v": {"pp": 4, "ep": 4, "schedule": "dual_pipe_v", "overlap": True},
}


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("recompute", [(), ("norm", "activation"), ("full",)], ids=["none", "some", "full"])
def test_parts_add_up_to_the_step_on_every_stage(name: str, recompute: tuple[str, ...]) -> None:
    pattern = "[*E][*E]|[*E][*E]|[*E][*E]|[*E][*E]" if name == "interleaved" else "[*E]x8"
    made = plan(qwen(pattern, recompute=recompute, **MESHES[name]), 16)
    step = Stepper(made).step(ClusterMeter(made, CLUSTER, load("h100")))
    for parts in step.stations:
        assert sum(parts.values()) == pytest.approx(step.seconds, rel=1e-9)
        assert min(parts.values()) > -1e-9 * step.seconds
    if name == "shards":
        assert step.stations[0][BUBBLE] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("name", ["shards", "overlap", "1f1b", "dual_pipe_v"])
@pytest.mark.parametrize("rate", [5e9, 5e12], ids=["slow", "fast"])
def test_waiting_for_copies_to_the_host_is_a_part_of_the_step(name: str, rate: float) -> None:
    """Of every stage the parts still add up; a link that is fast enough costs nothing."""
    known = replace(load("h100"), host_link={"to_host": rate, "to_device": rate})
    run = qwen(micro_batches=4, **MESHES[name])
    kept, away = (
        Stepper(made := plan(replace(run, train=replace(run.train, offload=share)), 16)).step(
            ClusterMeter(made, CLUSTER, known)
        )
        for share in (0.0, 0.5)
    )
    for parts in away.stations:
        assert sum(parts.values()) == pytest.approx(away.seconds, rel=1e-9)
        assert min(parts.values()) > -1e-9 * away.seconds
    waited = max(parts[COPIES] for parts in away.stations)
    if rate == 5e9:
        assert waited > 0.05 * kept.seconds
        assert away.seconds > 1.05 * kept.seconds
    else:
        assert waited < 0.01 * kept.seconds
        assert away.seconds == pytest.approx(kept.seconds, rel=0.01)


def test_a_link_to_the_host_that_nobody_has_measured_is_named() -> None:
    known = replace(load("h100"), host_link={})
    run = qwen(ep=8, shard="optimizer")
    predict(plan(run, 16), CLUSTER, known)
    with pytest.raises(ConfigError, match="h100: no calibration for the link to the host, which train"):
        predict(plan(replace(run, train=replace(run.train, offload=0.5)), 16), CLUSTER, known)


@pytest.mark.parametrize("mesh", [{"pp": 4, "ep": 4}, {"pp": 4, "ep": 4, "schedule": "dual_pipe_v"}])
def test_a_long_step_follows_from_two_short_ones(mesh: dict[str, object]) -> None:
    made = plan(qwen(micro_batches=26, **mesh), 16)
    meter, stepper = ClusterMeter(made, CLUSTER, load("h100")), Stepper(made)
    assert [short.run.train.micro_batches for short in stepper.plans] == [10, 14]
    whole = Stepper(made)
    whole.plans = (made,)
    assert stepper.seconds(meter) == pytest.approx(whole.seconds(meter), rel=1e-6)


def test_a_shorter_plan_has_the_schedule_of_a_shorter_run() -> None:
    made = plan(qwen(micro_batches=8, pp=4, ep=4), 16)
    assert with_micro_batches(made, 4).schedule == plan(qwen(micro_batches=4, pp=4, ep=4), 16).schedule


def test_more_recompute_takes_longer() -> None:
    regions: tuple[tuple[str, ...], ...] = ((), ("norm",), ("norm", "activation", "core"), ("full",))
    runs = [qwen(recompute=names, ep=8, shard="optimizer") for names in regions]
    seconds = [predict(plan(run, 8), CLUSTER).seconds for run in runs]
    assert seconds == sorted(seconds)
    assert 1.2 * seconds[0] < seconds[-1] < 1.5 * seconds[0]


def test_uneven_experts_slow_the_step_down() -> None:
    made = plan(qwen(ep=8, shard="optimizer"), 8)
    assert predict(made, CLUSTER, load_factor=1.5).seconds > 1.05 * predict(made, CLUSTER).seconds


def test_the_range_holds_the_likely_time_and_says_what_would_narrow_it() -> None:
    found = predict(plan(qwen(ep=16), 16), CLUSTER)
    assert found.low < found.seconds < found.high
    assert "network" in found.narrowed_by
    assert 0 < found.mfu < 1


def test_what_was_not_measured_has_no_time() -> None:
    known = replace(load("h100"), kernels=())
    with pytest.raises(ConfigError, match="no time can be given:\nh100: no calibration for kernel attention"):
        predict(plan(qwen(), 16), CLUSTER, known)


WORDS = ["plan", "qwen3-30b-a3b", "--world", "8", "--mesh.ep", "8", "--train.micro-batches", "1"]


def test_the_command_prints_where_the_time_goes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--time", "--cluster", "h100-ib"]) == 0
    shown = capsys.readouterr().out
    assert "a step takes" in shown
    assert "tokens to experts and back" in shown
    assert main([*WORDS, "--cluster", "h100-ib", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["time"]
    assert sum(found["stages"][0].values()) == pytest.approx(found["seconds"])


def test_without_a_cluster_the_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in (
        (["--time"], "--time and --advise need --cluster"),
        (["--time", "--cluster"], "--cluster has no name behind it"),
        (["--cluster", "--time"], "--cluster has no name behind it"),
        (["--cluster", "h100"], "no cluster 'h100'; did you mean 'h100-ib'?"),
        (["--split-by-time"], "--cluster to one of a100-ib"),
        (["--calibration", "x.json"], "--cluster to one of a100-ib"),
    ):
        assert main([*WORDS, *options]) == 2
        told = capsys.readouterr().err
        assert message in told
        assert "b200-ib" in told


def test_cuda_graphs_take_their_micro_batches_off_the_host() -> None:
    run = gpu_run("[*-]x8", micro_batches=16)
    larger = replace(
        run,
        model=replace(run.model, hidden=1024, vocab=32_000, mlp=Mlp(ffn=4096)),
        data=replace(run.data, sequence_tokens=2048),
    )
    found = {}
    for name, each in (("none", larger), ("step", with_graphs(larger))):
        made = plan(each, 1)
        found[name] = Stepper(made).step(ClusterMeter(made, CLUSTER, load("h100")))
    assert found["none"].stations[0][HOST] > found["step"].seconds
    assert found["step"].stations[0][HOST] == 0
    device = found["none"].seconds - found["none"].stations[0][HOST]
    assert found["step"].seconds == pytest.approx(device, rel=1e-9)
