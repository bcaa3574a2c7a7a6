"""The search for garbage: what it leaves alone while a run trains, and what it still finds."""

import gc
import weakref

from braid.planning.plan import plan
from braid.train import loop
from braid.train.device import choose_device
from braid.train.gc_freeze import frozen_gc
from tests.train.helpers import run_on, started, train_to_end


class Knot:
    def __init__(self):
        self.self = self


def test_what_was_there_before_is_not_searched_and_what_comes_later_is():
    old = Knot()
    kept = weakref.ref(old)
    with frozen_gc():
        searched = {id(each) for each in gc.get_objects()}
        assert id(old) not in searched
        del old
        new = weakref.ref(Knot())
        gc.collect()
        assert new() is None
        assert kept() is not None
    gc.collect()
    assert kept() is None
    assert gc.get_freeze_count() == 0


def test_a_run_trains_with_its_model_left_out_of_the_search(corpus, tmp_path, monkeypatch):
    run = run_on(corpus, steps=2)
    feed, state, places = started(run, tmp_path)
    seen = []

    def step(*args, **kwargs):
        seen.append(any(each is state.model for each in gc.get_objects()))
        return begin_step(*args, **kwargs)

    begin_step = loop.begin_step
    monkeypatch.setattr(loop, "begin_step", step)
    train_to_end(plan(run, 1), places, choose_device("cpu"), feed, state)
    assert seen == [False, False]
    assert any(each is state.model for each in gc.get_objects())
