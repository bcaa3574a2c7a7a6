"""A wheel in an environment of its own, away from the checkout: commands work there, also those it prints."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.costly("ten commands, each of which loads torch")
ROOT = Path(__file__).resolve().parent.parent
RECIPE = """
from braid.architecture import Attention, Mlp, Model
from braid.config import Data, Optim, Run, Train


def small() -> Run:
    attention = Attention(heads=2, kv_heads=1, head_dim=8, qk_norm=True)
    return Run(
        model=Model(pattern="[*-]", hidden=16, vocab=260, attention=attention, mlp=Mlp(ffn=24)),
        data=Data(sequence_tokens=16, sources=("tokens",)),
        train=Train(steps=2, batch_samples=2, eval_samples=0),
        optim=Optim(warmup_steps=1),
    )
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, that borrows all other packages but tokenizers."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    built = subprocess.run([*pip, "wheel", "--no-deps", "-w", str(folder), str(ROOT)], capture_output=True)
    if built.returncode:
        pytest.skip(f"no wheel could be built: {built.stderr.decode().strip()[-300:]}")
    environment = folder / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (wheel,) = folder.glob("*.whl")
    words = ["install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*pip, "--python", str(environment / "bin" / "python"), *words], check=True)
    site = next(environment.glob("lib/python*/site-packages"))
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (site / "tokenizers.py").write_text("raise ImportError\n")
    return environment


class Shell:
    """Commands in a folder outside of the checkout."""

    def __init__(self, folder: Path, environment: Path) -> None:
        self.folder = folder
        self._variables = {"PATH": f"{environment / 'bin'}:/usr/bin:/bin", "HOME": str(folder)}
        self._variables["OMP_NUM_THREADS"] = "1"
        self._variables |= {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}

    def __call__(self, command: str, *, code: int = 0) -> str:
        """What a command prints, with its errors."""
        words = {"shell": True, "cwd": self.folder, "env": self._variables}
        done = subprocess.run(command, capture_output=True, text=True, **words)  # type: ignore[call-overload]
        told = str(done.stdout + done.stderr)
        assert done.returncode == code, f"{command}\n{told}"
        return told


def printed(told: str, before: str) -> str:
    """The command on the line of an output after these words."""
    return told.partition(before)[2].splitlines()[0].strip()


@pytest.mark.long
def test_a_wheel_works_away_from_its_checkout(installed: Path, tmp_path: Path) -> None:
    """Every command that an output prints is tried as it stands, but for options that make it short."""
    shell = Shell(tmp_path, installed)
    (tmp_path / "mine.py").write_text(RECIPE)
    (tmp_path / "text.jsonl").write_text('{"text": "to be or not to be"}\n' * 20)
    assert "tiny" in shell("braid recipes")
    loads = "from braid.timing import calibration as c, links as l; print(c.load('h200').name, l.clusters())"
    assert "gb200-nvl72" in shell(f'python -c "{loads}"')
    built = shell("braid data build --input text.jsonl --output tokens --validation 0")
    train = f"{installed}/bin/braid train RECIPE --data.sources tokens"
    assert train in built
    trained = shell(f"{train.replace('RECIPE', 'mine.py:small')} --device cpu --out run")
    generate, longer, show = (line.strip() for line in trained.partition("try next\n")[2].splitlines()[:3])
    assert longer.startswith(f"{installed}/bin/braid train ")
    assert "step 4/4" in shell(longer)
    shell(f"{generate} --tokens 2 --device cpu")
    assert "qk_norm" in shell(show)
    shell("braid export run --model-type qwen3 --out hub")
    imported = shell("braid import hub --out imported")
    shell(f"{printed(imported, 'try next')} --tokens 2 --device cpu")
    assert "0 of 13 tensors differ" in shell("braid diff hub imported")
    assert "1 rank" in shell("braid plan imported --html plan.html")
    assert "<canvas" in (tmp_path / "plan.html").read_text()


@pytest.mark.long
def test_commands_of_refusals_work_away_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    shell = Shell(tmp_path, installed)
    (tmp_path / "mine.py").write_text(RECIPE)
    (tmp_path / "text.jsonl").write_text('{"text": "to be or not to be"}\n' * 20)
    shell("braid data build --input text.jsonl --output tokens --validation 0")
    shell("braid train mine.py:small --device cpu --out run")
    smaller = "braid train mine.py:small --device cpu --out other --init run --model.vocab 259"
    refused = shell(smaller, code=4)
    options = (
        f"--init-allow {printed(refused, '--init-allow ')} --init-rules {printed(refused, '--init-rules ')}"
    )
    assert "embedding.weight" in shell(f"{smaller} {options} --init-plan")
    definition = {"model": {"type": "WordLevel", "vocab": {"to": 0, "</s>": 1}, "unk_token": "to"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], **definition}))
    build = "braid data build --input text.jsonl --output words --tokenizer tokenizer.json --validation 0"
    install = shell(build, code=3).partition("run `")[2].partition("`")[0]
    assert shlex.split(install) == [str(installed / "bin" / "python"), "-m", "pip", "install", "tokenizers"]
