"""Runs from files: what `show --json` prints, JSON and YAML, and everything that is wrong with one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from braid import recipes
from braid.cli import main
from braid.config import to_json
from braid.errors import ConfigError, ExitCode
from braid.run_files import load_run
from tests.runs import small_run

yaml = pytest.importorskip("yaml", reason="needs the package pyyaml (extra `yaml`)")

RUN = {
    "model": {
        "pattern": "*",
        "hidden": 16,
        "vocab": 257,
        "attention": {"heads": 2, "kv_heads": 1, "head_dim": 8},
    },
    "train": {"steps": 3, "batch_samples": 2},
}
"""The fields that have no default."""


def written(folder: Path, text: str, name: str = "run.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize("name", ["tiny", "tiny-vlm", "qwen3-next-80b-a3b"])
def test_what_show_prints_is_the_run_as_json_and_as_yaml(name, tmp_path, capsys):
    world = ["--world", "2"] if name == "tiny-vlm" else []
    assert main(["show", name, "--json", *world]) == 0
    text = capsys.readouterr().out
    run = recipes.load(name, 2 if world else 1)
    assert load_run(written(tmp_path, text, "run.json")) == run
    assert load_run(written(tmp_path, text, "flow.yml")) == run  # JSON is YAML
    assert load_run(written(tmp_path, yaml.safe_dump(json.loads(text)), "block.yaml")) == run


# Of the YAML 1.2.2 specification, section 10.3.2, and words that are something else in YAML 1.1.
@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("1E3", 1000.0), ("3", 3.0), ("012", 12.0), ("0o14", 12.0), ("0xC", 12.0), ("1.", 1.0),
     (".5", 0.5), ("+12.3", 12.3), ("-2E+05", -2e5), (".inf", float("inf")), ("-.INF", -float("inf"))],
)  # fmt: skip
def test_numbers_of_yaml_are_those_of_its_version_1_2(text, value, tmp_path):
    file = written(tmp_path, yaml.safe_dump(RUN) + f"optim: {{lr: {text}}}\n")
    assert load_run(file).optim.lr == value


@pytest.mark.parametrize(
    "text", ["no", "on", "Yes", "off", "2026-01-01", "1:30", "1_000", "'1e-5'", '"3"', "!!str 3", "<<"]
)
def test_words_of_yaml_stay_strings(text, tmp_path):
    file = written(tmp_path, yaml.safe_dump(RUN) + f"data: {{tokenizer: {text}}}\n")
    assert load_run(file).data.tokenizer == text.removeprefix("!!str ").strip("'\"")


def test_booleans_and_null_of_yaml(tmp_path):
    for null in ("", "~", "null"):
        file = written(tmp_path, yaml.safe_dump(RUN) + f"mesh:\n  ranks: {null}\n")
        assert load_run(file).mesh.ranks is None
    with pytest.raises(ConfigError, match="= 'yes': must be of type bool"):
        load_run(written(tmp_path, yaml.safe_dump(RUN | {"train": RUN["train"] | {"exact_match": "yes"}})))
    tied = {**RUN, "model": {**RUN["model"], "tied": "@"}}
    for word, value in (("true", True), ("False", False)):
        assert load_run(written(tmp_path, yaml.safe_dump(tied).replace("'@'", word))).model.tied is value


BAD_YAML = """\
model:
  pattern: "*"
  hidden: 12.5
  vocb: 300
  attention: {heads: 2, kv_heads: 1, head_dim: 8}
optim: {lr: high,
  schedule: cos}
train:
  steps: no
  batch_samples: 2
lr: 1e-3
"""
FOUND = (
    "1: model.vocab is missing",
    "3: model.hidden = 12.5: must be of type int",
    "4: model.vocb is not a known field; did you mean 'vocab'?",
    "6: optim.lr = 'high': must be of type float",
    "7: optim.schedule = 'cos': must be one of cosine, wsd; did you mean 'cosine'?",
    "9: train.steps = 'no': must be of type int",
    "11: lr is not a known field",
)


@pytest.mark.parametrize("command", ["train", "plan", "show", "prove"])
def test_every_problem_of_a_file_is_listed_with_its_line(command, tmp_path, capsys):
    file = written(tmp_path, BAD_YAML)
    assert main([command, str(file)]) == ExitCode.CONFIG
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"braid: the run file has {len(FOUND)} problems"
    assert [line.removeprefix(f"{file}:").partition("; did you mean 'lr_share'")[0] for line in lines[1:]] == [
        *FOUND
    ]


BAD_JSON = r"""{
 "optim": {"beta s}": 0,
           "betas" : [ 0.9 ],
           "clip": "\"],}"
 }, "lr_share": {
   "a,]\"": true
 },
 "train": {"steps": 4, "batch_samples": 2,
           "steps": -1.5e0, "recompute": ["full",
                                          "norms"]}
}
"""
FOUND_IN_JSON = [
    "1: model is missing",
    "2: optim.beta s} is not a known field; did you mean 'betas'?",
    "3: optim.betas = [0.9]: must have 2 values",
    "4: optim.clip = '\"],}': must be of type float",
    '6: lr_share[a,]"] = True: must be of type float',
    "9: 'steps' is given twice: keep one of them",
    "9: train.steps = -1.5: must be of type int",
    "10: train.recompute[1] = 'norms': must be one of",
]


def test_problems_of_json_have_lines_too(tmp_path):
    file = written(tmp_path, BAD_JSON, "run.json")
    with pytest.raises(ConfigError) as error:
        load_run(file)
    lines = [line.removeprefix(f"{file}:") for line in str(error.value).splitlines()]
    assert lines[0] == "the run file has 8 problems"
    assert all(line.startswith(found) for line, found in zip(lines[1:], FOUND_IN_JSON, strict=True)), lines


BOMB = "a0: &a0 [0]\n" + "".join(f"a{i + 1}: &a{i + 1} [{f'*a{i},' * 9}]\n" for i in range(9))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.json", '{"model": 3,\n "train"}', r"run\.json:2: is not JSON: Expecting ':' delimiter, column 9"),
        ("run.json", "[" * 100_000, "is no run file"),
        ("run.json", "9" * 5000, "is not JSON that can be read"),
        ("run.json", "[]", r"run\.json:1: run = \[\]: must be an object with the fields of Run"),
        ("run.yaml", "", r"the run file .*run\.yaml is empty: `braid show tiny --json` prints one"),
        ("run.yaml", "# nothing yet", r"run = None: must be an object"),
        ("run.json", b"\xff\xfe", r"cannot read the run file .*run\.json: it is not UTF-8 text: invalid start"),
        ("run.yaml", "a: [1\nb: 2", r"run\.yaml:2: is not YAML: expected ',' or ']'"),
        ("run.yaml", "a: 1\n---\nb: 2", "is not YAML: but found another document"),
        ("run.yaml", "a: !!python/object/apply:os.system [x]", r"run\.yaml:1: has the tag tag:yaml"),
        ("run.yaml", "a: !!int x", "'x' is no int, which its tag says"),
        ("run.yaml", "a: &a [*a]", "more than 100,000 values or 50 levels"),
        ("run.yaml", BOMB, "more than 100,000 values or 50 levels"),
        ("run.yaml", "a: 1\n3: 2", r"run\.yaml:2: has a key that is no string"),
        ("run.yaml", "lr_share: {x: " + "9" * 200 + "}", "a number has 200 digits"),
        ("none.yaml", None, r"cannot read the run file .*none\.yaml: No such file or directory"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_run_is_refused(name, text, message, tmp_path):
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message):
        load_run(tmp_path / name)


def test_options_override_the_file_and_its_name_is_that_of_the_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "texts").mkdir()
    for number in range(9):
        (tmp_path / "texts" / f"{number}.txt").write_text("some words " * 20)
    corpus = tmp_path / "corpus"
    assert main(["data", "build", "--input", str(tmp_path / "texts"), "--output", str(corpus)]) == 0
    run = small_run()
    run = replace(run, train=replace(run.train, steps=9))
    (tmp_path / "runs-of-mine").mkdir()
    file = written(tmp_path / "runs-of-mine", json.dumps(to_json(run)), "first.json")
    monkeypatch.chdir(tmp_path)
    options = ["--data.sources", str(corpus), "--train.steps", "2"]
    assert main(["train", str(file), *options, "--device", "cpu"]) == 0
    lines = (tmp_path / "runs" / "first" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    capsys.readouterr()
    assert main(["show", str(file), "--optim.lr", "0.125", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(to_json(run))) | {
        "optim": json.loads(json.dumps(to_json(run)["optim"])) | {"lr": 0.125}
    }


def test_a_rule_that_is_broken_names_the_run_and_the_line_of_the_file(tmp_path, capsys):
    wrong = RUN | {"train": {"steps": -1, "batch_samples": 2}, "optim": {"lr": -1.0}}
    file = written(tmp_path, yaml.safe_dump(wrong, sort_keys=False))
    line = {
        text.strip().partition(":")[0]: place for place, text in enumerate(file.read_text().splitlines(), 1)
    }
    assert main(["plan", str(file), "--optim.lr=-2"]) == ExitCode.CONFIG
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"braid: {file}: invalid settings: 2 problems"
    assert lines[1:] == [
        "train.steps = -1",
        "  rule  must be a number of at least 1",
        "  set   1 or more",
        f"  in    {file}:{line['steps']}",
        "optim.lr = -2.0",  # that of the option
        "  rule  must be a number above 0",
        "  set   a number above 0",
    ]
    assert main(["plan", "tiny", "--optim.lr=-2"]) == ExitCode.CONFIG
    assert capsys.readouterr().err.splitlines()[0] == "braid: tiny: invalid settings: 1 problem"
    assert main(["plan", str(file), "--train.steps=1", "--optim.lr=1", "--load", "0"]) == ExitCode.CONFIG
    assert capsys.readouterr().err.splitlines()[0] == "braid: invalid settings: 1 problem"  # not of the run
