"""Set-up: what it borrows, what it keeps, what it says when nothing can be installed."""

import json
import subprocess
import sys
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


def base_python(folder, packages):
    """A Python that believes it has these packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for name, version in packages.items():
        (site / f"{name}-{version}.dist-info").mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (site / f"{name}-{version}.dist-info" / "METADATA").write_text(text)
    return folder / "bin" / "python", site


def set_up(python, checkout, *extras):
    words = [str(python), str(checkout / "scripts" / "setup_venv.py"), *extras]
    return subprocess.run(words, env=OFFLINE, capture_output=True, text=True)


def test_a_torch_that_is_here_is_borrowed_and_missing_packages_are_named(checkout, tmp_path):
    python, site = base_python(tmp_path / "base", {"torch": "2.11.0", "numpy": "2.4.6"})
    done = set_up(python, checkout)
    assert done.returncode == 1
    assert "braid needs safetensors, tyro, rich" in done.stderr
    borrowed = next((checkout / ".venv").glob("lib/python*/site-packages/borrowed.pth"))
    assert str(site) in borrowed.read_text().splitlines()
    assert not (checkout / ".venv" / "made-from").exists()


def test_offline_with_everything_here_braid_is_linked_in(checkout, tmp_path):
    packages = dict.fromkeys(("torch", "numpy", "safetensors", "tyro", "rich"), "9.0")
    python, _ = base_python(tmp_path / "base", packages)
    done = set_up(python, checkout, "dev")
    assert done.returncode == 0
    assert "braid is linked in" in done.stdout
    linked = next((checkout / ".venv").glob("lib/python*/site-packages/braid.pth"))
    assert linked.read_text().strip() == str(checkout / "src")


@pytest.mark.parametrize("version", ["1.13.1", "2.10.0"])
def test_an_older_torch_is_not_borrowed_and_a_failed_first_set_up_leaves_nothing(version, checkout, tmp_path):
    python, _ = base_python(tmp_path / "base", {"torch": version})
    done = set_up(python, checkout)
    assert done.returncode == 1
    assert "everything in constraints.txt" in done.stdout
    assert not (checkout / ".venv").exists()


def test_extras_that_cannot_be_added_leave_the_rest_as_it_was(checkout, tmp_path):
    python, _ = base_python(tmp_path / "base", {})
    subprocess.run([sys.executable, "-m", "venv", str(checkout / ".venv")], check=True)
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
