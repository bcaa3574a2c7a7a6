"""Who watches a run with modules reads of its edges: in traces, and where a rank waits for rows."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from braid.distributed.transfer import close_edges, open_edges
from braid.engine.edges import EdgeLinks
from braid.launch.stack_probe import WaitState, probe_thread
from braid.prove.outcome import started
from braid.schedule import parse_op
from braid.topology.transfer import Piece, Transfer
from braid.train.step import train_step
from braid.train.tracing import Tracer
from tests.ranks import run_ranks
from tests.topology.cases import LEARNING_RATE
from tests.topology.module_cases import VISION, multimodal


def test_a_trace_names_edges(corpus: Path, tmp_path: Path) -> None:
    run = multimodal("tied", corpus, {"vision": VISION}, samples=4, micro_batches=2)
    state, feed = started(0, 1, run)
    tracer = Tracer(tmp_path / "trace.json", range(1, 2), state)
    tracer.begin(1)
    train_step(state, run, feed.train, LEARNING_RATE)
    tracer.end(1)
    events = json.loads(tracer.file.read_text())["traceEvents"]
    names = {event["name"] for event in events}
    messages = {name for name in names if "{vision}" in name}
    assert {parse_op(name).act.value for name in messages} == {"SEND_F", "RECV_F", "SEND_B", "RECV_B"}
    assert {parse_op(name).micro_batch for name in messages} == {0, 1}


def waited(rank: int, world: int) -> WaitState | None:
    """What is seen of rank 0 while it waits for a row that rank 1 sends only after it was looked at."""
    channel = ("F", "vision")
    groups = open_edges({channel: (0, 1)}, rank, torch.device("cpu"))
    piece = Piece(peer=1 - rank, start=0, stop=1)
    planned = Transfer(sends=(piece,) if rank else (), receives=() if rank else (piece,), kept=())
    links = EdgeLinks(
        groups=groups,
        transfers={("vision", 0): planned},
        reads=frozenset() if rank else {channel},
        no_rows=lambda: torch.empty(0, 3),
    )
    store, seen = dist.distributed_c10d._get_default_store(), [WaitState(waits=False)]
    main = threading.get_ident()

    def look() -> None:
        while seen[0].call != "wait_for_transfer":
            seen[0] = probe_thread(main)
        store.set("seen", "yes")

    if rank == 0:
        watcher = threading.Thread(target=look)
        watcher.start()
        assert links.receive("F", "vision", 0).tolist() == [[1.0, 1.0, 1.0]]
        watcher.join()
    else:
        store.wait(["seen"])
        links.send("F", "vision", 0, torch.ones(1, 3), None)
    links.finish()
    dist.barrier()
    close_edges(groups)
    return None if rank else seen[0]


def test_a_rank_that_waits_for_rows_says_on_which_edge_and_for_whom() -> None:
    seen, _ = run_ranks(2, waited)
    assert seen == WaitState(waits=True, call="wait_for_transfer", group="F-vision", members=(0, 1))
