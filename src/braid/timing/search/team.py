"""The processes of a search: each has a `Ranking` of its own, and answers what it is asked."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from braid.timing.search.choices import Choice, MeshSizes
from braid.timing.search.ranking import Ranking
from braid.timing.search.simulate import Setting, Timed

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Team:
    """Several processes, or this one alone. They start at once, so that they have loaded what they need when
    there is something to ask."""

    def __init__(self, setting: Setting, limit: int, processes: int) -> None:
        self._make = partial(Ranking, setting, limit)
        self._alone: Ranking | None = None
        self._helpers = [_Helper(self._make) for _ in range(processes)] if processes > 1 else []

    @property
    def alone(self) -> Ranking:
        """This process's own."""
        if self._alone is None:
            self._alone = self._make()
        return self._alone

    def of_meshes(
        self,
        what: Callable[[Ranking, Sequence[Asked]], Sequence[Answer]],
        asked: Sequence[Asked],
        sizes: Callable[[Asked], MeshSizes],
    ) -> list[Answer]:
        """A method of `Ranking` for meshes: those that share bricks are asked of the same process."""
        return self._answers(what, asked, [hash(sizes(each)._replace(pp=1)) for each in asked])

    def timed(self, choices: Sequence[Choice]) -> list[Timed]:
        """Candidates, simulated, in their order."""
        return self._answers(Ranking.timed, choices, range(len(choices)))

    def _answers(
        self,
        what: Callable[[Ranking, Sequence[Asked]], Sequence[Answer]],
        asked: Sequence[Asked],
        keys: Sequence[int],
    ) -> list[Answer]:
        """The answers in the order of what is asked; equal keys go to the same process."""
        if not self._helpers:
            return list(what(self.alone, asked))
        count = len(self._helpers)
        shares = [[at for at, key in enumerate(keys) if key % count == number] for number in range(count)]
        for helper, share in zip(self._helpers, shares, strict=True):
            helper.ask(what, [asked[at] for at in share])
        found: dict[int, Answer] = {}
        for helper, share in zip(self._helpers, shares, strict=True):
            found |= zip(share, helper.answer(), strict=True)
        return [found[at] for at in range(len(asked))]

    def close(self) -> None:
        for helper in self._helpers:
            helper.close()


class _Helper:
    """One more process."""

    def __init__(self, make: Callable[[], Ranking]) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, what: Callable[..., Any], asked: Sequence[Any]) -> None:
        self._connection.send((what, asked))

    def answer(self) -> Any:
        """Of the oldest question that is not answered yet. Raises what it raised."""
        try:
            found = self._connection.recv()
        except EOFError as error:
            code = self._process.exitcode
            raise RuntimeError(f"a process of the search ended with exit code {code}") from error
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.join()


def _serve(connection: Connection, make: Callable[[], Ranking]) -> None:
    """Answers until the other end is closed. Without garbage collection, as `braid plan`: op lists have no
    cycles."""
    gc.disable()
    ranking = make()
    try:
        while True:
            what, asked = connection.recv()
            connection.send(_answered(ranking, what, asked))
    except (EOFError, KeyboardInterrupt):
        return


def _answered(ranking: Ranking, what: Callable[..., Any], asked: Sequence[Any]) -> Any:
    try:
        return what(ranking, asked)
    except Exception as error:
        return error
