"""`run_ranks` and its server for tests: ranks are forked with what tests import besides."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from braid.launch import local_ranks
from braid.launch.local_ranks import RanksFailed as RanksFailed
from braid.launch.local_ranks import without_main as without_main

PRELOAD = "tests.ranks_preload"


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call `function(rank, world, *arguments)` on `world` ranks and return their results in rank order."""
    return local_ranks.run_ranks(world, function, *arguments, timeout_s=timeout_s, preload=PRELOAD)


def warm_server() -> multiprocessing.context.ForkServerContext:
    """The server that ranks are forked from, one per test process. It is ready when this returns."""
    return local_ranks.warm_server(PRELOAD)
