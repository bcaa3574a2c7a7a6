"""The files of deploy/: instructions that exist, and numbers and names that belong together."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from braid.cli import COMMANDS
from braid.planning.plan import check
from tests.guides import braid_words, parsed

ROOT = Path(__file__).resolve().parent.parent
INSTRUCTIONS = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENTRYPOINT", "CMD", "ENV", "USER"}


def instructions(text: str) -> list[tuple[str, str]]:
    """Name and rest of each instruction of a Dockerfile."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def test_the_image_installs_and_copies_what_there_is():
    found = instructions((ROOT / "deploy" / "Dockerfile").read_text())
    assert {name for name, _ in found} <= INSTRUCTIONS
    copied = [path for name, rest in found if name == "COPY" for path in rest.split()[:-1]]
    assert {"pyproject.toml", "src"} <= set(copied)
    assert all((ROOT / path).exists() for path in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["readme"] in copied
    (extras,) = [
        match[1] for name, rest in found if name == "RUN" and (match := re.search(r'"\.\[(.*)\]"', rest))
    ]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert json.loads(dict(found)["ENTRYPOINT"]) == ["braid"]
    assert "braid" in project["scripts"]


@pytest.fixture
def jobset() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="needs the package pyyaml (extra `yaml`)")
    return yaml.safe_load((ROOT / "deploy" / "jobset.yaml").read_text())


def test_the_manifest_starts_a_run_that_can_be_planned(jobset, monkeypatch):
    monkeypatch.chdir(ROOT)
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    words = [*container["command"], *container["args"]]
    launcher = dict(word.removeprefix("--").split("=", 1) for word in words[1 : words.index("-m")])

    assert spec["parallelism"] == spec["completions"] == int(launcher["nnodes"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(launcher["nproc-per-node"])
    name = jobset["metadata"]["name"]
    assert launcher["rdzv-endpoint"].partition(":")[0] == f"{name}-{job['name']}-0-0.{name}"
    assert int(launcher["shutdown-timeout"]) < pod["terminationGracePeriodSeconds"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}

    plain = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    options = parsed(braid_words(plain), monkeypatch)
    assert check(options.run, options.world) == []
    for path in (options.out, *map(Path, options.run.data.sources), Path(options.run.data.tokenizer)):
        assert path.is_relative_to(mounts["shared"])


def test_the_options_of_torchrun_exist(jobset):
    from torch.distributed.run import get_args_parser

    known = {option for action in get_args_parser()._actions for option in action.option_strings}
    (job,) = jobset["spec"]["replicatedJobs"]
    manifest = job["template"]["spec"]["template"]["spec"]["containers"][0]["args"]
    script = (ROOT / "scripts" / "slurm_train.sh").read_text()
    (slurm,) = re.findall(r"srun \S+ torchrun (.*?) -m braid", script.replace("\\\n", " "), re.DOTALL)
    for words in (manifest[: manifest.index("-m")], shlex.split(slurm)):
        used = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert len(used) >= 5
        assert used <= known


def test_the_pages_name_commands_of_braid():
    """`docker run ... braid COMMAND` in the comments of the Dockerfile."""
    comments = re.findall(r"^# .* braid (\w+) ", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    assert comments
    assert set(comments) <= {command.name for command in COMMANDS}
