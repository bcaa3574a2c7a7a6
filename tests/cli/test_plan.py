"""`braid plan`: what a person and a program see."""

from __future__ import annotations

import json
from typing import Any

import pytest

from braid.cli import main
from braid.errors import ExitCode


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == ExitCode.OK
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(told(capsys, *words, "--json"))
    return found


def test_a_table_of_memory_and_one_of_what_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "qwen3-30b-a3b", "--world", "16", "--mesh.tp", "2", "--mesh.ep", "8")
    for words in ("16 ranks = pp 1 x dp 8 x cp 1 x tp 2", "optimizer", "activations", "dispatch of rows"):
        assert words in text


def test_one_rank_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no communication" in told(capsys, "tiny")


def test_json_has_the_keys_that_programs_rely_on(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(
        capsys, "tiny", "--world", "4", "--mesh.tp", "2", "--mesh.pp", "2", "--device-memory", "h200"
    )
    told_of_all = {
        "world",
        "ranks",
        "axes",
        "device",
        "schedule",
        "pattern",
        "trained",
        "graphs",
        "device_memory",
        "peak",
        "fits",
        "notes",
        "not_counted",
    }
    assert set(found) == {*told_of_all, "stages", "advice"}
    assert found["schedule"] == "1f1b"
    assert found["notes"] == found["not_counted"] == []
    assert found["fits"] is True
    assert found["device_memory"] == 139 * 2**30
    assert [stage["stage"] for stage in found["stages"]] == [0, 1]
    for stage in found["stages"]:
        assert stage["memory"]["peak"] <= found["peak"]
        assert stage["sent"]["pp"] > 0
        totals = dict.fromkeys(stage["sent"], 0)
        for call in stage["calls"]:
            totals[call["family"]] += call["sent"]
        assert {family: sent for family, sent in stage["sent"].items() if family != "pp"} == {
            family: sent for family, sent in totals.items() if family != "pp"
        }


def test_a_run_that_does_not_fit_is_told_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "hybrid-300m", "--device-memory", "22GiB")
    assert found["fits"] is False
    assert found["peak"] > 22 * 2**30
    fitting = [each for each in found["advice"] if each["peak"] <= 22 * 2**30]
    assert {each["field"] for each in fitting} >= {"train.micro_batches", "world"}
    for each in fitting:
        again = as_json(
            capsys, "hybrid-300m", "--device-memory", "22GiB", f"--{each['field']}", str(each["value"])
        )
        assert again["fits"] is True
        assert again["peak"] == each["peak"]


def test_all_problems_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "tiny", "--world", "3", "--mesh.tp", "2", "--device-memory", "lots"]) == ExitCode.CONFIG
    )
    text = capsys.readouterr().err
    assert "2 problems" in text
    assert "device-memory = 'lots'" in text


def test_sixteen_thousand_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = ("--mesh.tp", "8", "--mesh.ep", "64", "--train.batch-samples", "16384")
    found = as_json(capsys, "deepseek-v3", "--world", "16384", *mesh)
    assert found["axes"]["dp"] == 2048
    assert {"tp", "dp_cp", "edp", "ep_etp"} <= set(found["stages"][0]["sent"])


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 * 2**30), ("24 GB", 24 * 10**9), ("500mb", 5 * 10**8), ("H100", 79 * 2**30)]
)
def test_the_memory_of_a_device_in_any_unit(text: str, size: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert as_json(capsys, "tiny", "--device-memory", text)["device_memory"] == size


@pytest.mark.parametrize(
    ("mesh", "gather", "reduce"),
    [
        (("--mesh.shard", "all"), "over dp and cp (4 ranks)", "start the reduce-scatter of gradients"),
        (
            ("--mesh.shard", "none"),
            "over dp and cp (1 rank: nothing is sent)",
            "start the all-reduce of gradients",
        ),
        (("--mesh.replicate", "2"), "over dp and cp (2 ranks)", "start the reduce-scatter and all-reduce"),
    ],
)
def test_ops_say_what_is_sent_and_over_how_many_ranks(
    capsys: pytest.CaptureFixture[str], mesh: tuple[str, ...], gather: str, reduce: str
) -> None:
    lines = told(capsys, "tiny", "--world", "4", *mesh, "--ops", "0").splitlines()
    assert next(line for line in lines if "UNSHARD" in line).endswith(gather)
    found = next(line for line in lines if "REDUCE_GRAD" in line)
    assert reduce in found
    assert found.endswith("over dp and cp (4 ranks)")


def test_ops_of_a_rank_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny", "--ops", "1"]) == ExitCode.CONFIG
    assert "must be a rank of the run, counted from 0" in capsys.readouterr().err
