"""Recipes: those that come along, and one's own from a file."""

import pytest

from braid import recipes
from braid.errors import ConfigError
from braid.planning.plan import plan

OWN = """
from braid.architecture import Mlp, Model
from braid.config import Run, Train

def wide() -> Run:
    '''A wide one.'''
    model = Model(pattern="-", hidden=8, vocab=257, mlp=Mlp(ffn=64))
    return Run(model=model, train=Train(steps=1, batch_samples=1))

def misspelt() -> Run:
    return Run(model=Model(pattern="-", hidden=8, vocabulary=257), train=Train(steps=1, batch_samples=1))

def wrong() -> Run:
    return 3

def helper():
    raise AssertionError("not a recipe, never called")
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize("name", recipes.bundled())
def test_every_bundled_recipe_can_be_planned_and_has_a_summary(name):
    plan(recipes.load(name), world=1)
    assert recipes.summary(recipes.bundled()[name])


def test_a_recipe_of_ones_own(own):
    assert recipes.load(f"{own}:wide").model.mlp.ffn == 64


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiyn", r"there is no recipe 'tiyn'; did you mean 'tiny'\?"),
        ("nowhere.py:f", r"there is no recipe file 'nowhere.py'"),
        ("{own}:wid", r"has no recipe 'wid'; did you mean 'wide'\?"),
        ("{own}:helper", r"annotate it as `def helper\(\) -> Run:`"),
        ("{own}", r"needs a function.*\nits recipes: misspelt, wide, wrong"),
        ("{own}:misspelt", r"line \d+: TypeError.*'vocabulary'; did you mean 'vocab'\?"),
        ("{own}:wrong", r"returned int: it must return a Run"),
    ],
)
def test_a_recipe_that_cannot_be_had_says_why(own, name, message):
    with pytest.raises(ConfigError, match=message):
        recipes.load(name.format(own=own))


@pytest.mark.parametrize(("text", "message"), [("def (", "line 1: "), ("import nowhere", "line 1: Module")])
def test_a_file_that_cannot_be_loaded_says_where(tmp_path, text, message):
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        recipes.load(f"{path}:any")
