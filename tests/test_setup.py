"""Set-up: what it borrows, what it keeps, what it says when nothing can be installed."""

import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null", "PATH": "/usr/bin:/bin"}


@pytest.fixture
def checkout(tmp_path):
    """A copy of what set-up reads, without a .venv."""
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "setup_venv.py"
    script.write_text((ROOT / "scripts" / "setup_venv.py").read_text())
    return tmp_path


@pytest.fixture(scope="module")
def pip(tmp_path_factory):
    """Python's own pip, unpacked once: `venv` takes seconds to unpack it into each environment."""
    wheels = Path(importlib.util.find_spec("ensurepip").origin).parent / "_bundled"
    folder = tmp_path_factory.mktemp("pip")
    with zipfile.ZipFile(next(wheels.glob("pip-*.whl"))) as wheel:
        wheel.extractall(folder)
    return folder


LINKING = """
import os, venv
from pathlib import Path

def link_pip(_, context):
    site = next(Path(context.env_dir).glob("lib/python*/site-packages"))
    for entry in os.scandir({pip!r}):
        os.symlink(entry.path, site / entry.name)

venv.EnvBuilder._setup_pip = link_pip
"""


def base_python(folder, packages, pip):
    """A Python that believes it has these packages, and whose `venv` links pip in."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "sitecustomize.py").write_text(LINKING.format(pip=str(pip)))
    for name, version in packages.items():
        (site / f"{name}-{version}.dist-info").mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (site / f"{name}-{version}.dist-info" / "METADATA").write_text(text)
    return folder / "bin" / "python", site


def set_up(python, checkout, *extras):
    words = [str(python), str(checkout / "scripts" / "setup_venv.py"), *extras]
    return subprocess.run(words, env=OFFLINE, capture_output=True, text=True)


def test_a_torch_that_is_here_is_borrowed_and_missing_packages_are_named(checkout, pip, tmp_path):
    python, site = base_python(tmp_path / "base", {"torch": "2.11.0", "numpy": "2.4.6"}, pip)
    done = set_up(python, checkout)
    assert done.returncode == 1
    assert "braid needs safetensors, tyro, rich" in done.stderr
    borrowed = next((checkout / ".venv").glob("lib/python*/site-packages/borrowed.pth"))
    assert str(site) in borrowed.read_text().splitlines()
    assert not (checkout / ".venv" / "made-from").exists()


def test_offline_with_everything_here_braid_is_linked_in(checkout, pip, tmp_path):
    packages = dict.fromkeys(("torch", "numpy", "safetensors", "tyro", "rich"), "9.0")
    python, _ = base_python(tmp_path / "base", packages, pip)
    done = set_up(python, checkout, "dev")
    assert done.returncode == 0
    assert "braid is linked in" in done.stdout
    linked = next((checkout / ".venv").glob("lib/python*/site-packages/braid.pth"))
    assert linked.read_text().strip() == str(checkout / "src")


@pytest.mark.parametrize("version", ["1.13.1", "2.10.0"])
def test_an_older_torch_is_not_borrowed_and_a_failed_first_set_up_leaves_nothing(
    version, checkout, pip, tmp_path
):
    python, _ = base_python(tmp_path / "base", {"torch": version}, pip)
    done = set_up(python, checkout)
    assert done.returncode == 1
    assert "everything in constraints.txt" in done.stdout
    assert not (checkout / ".venv").exists()


def test_extras_that_cannot_be_added_leave_the_rest_as_it_was(checkout, pip, tmp_path):
    python, _ = base_python(tmp_path / "base", {}, pip)
    subprocess.run([str(python), "-m", "venv", str(checkout / ".venv")], check=True)
    stamp = checkout / ".venv" / "made-from"
    code = f"import sys; sys.path.insert(0, {str(checkout / 'scripts')!r}); import setup_venv; "
    code += "print(setup_venv.fingerprint(None))"
    made_from = subprocess.run([str(python), "-c", code], env=OFFLINE, capture_output=True, text=True)
    stamp.write_text(json.dumps({"made_from": made_from.stdout.strip(), "extras": []}))
    assert set_up(python, checkout).returncode == 0
    done = set_up(python, checkout, "dev")
    assert done.returncode == 1
    assert ".venv is as it was" in done.stderr
    assert stamp.exists()
