"""The watchdog: when a rank stalls or dies, all ranks report where they are and exit instead of hanging.

    with watched(process, folder, progress, timeout_s) as watchdog:
        ...   # steps, which record what they do in `progress`

Each rank runs two threads next to the working one. The heartbeat thread posts a `Heartbeat` to the rendezvous
store and reads what others have published; on rank 0 it also reads all heartbeats and diagnoses failures. The
sampling thread probes the working thread's stack to see whether it waits, and detects a store that no longer
answers. The first diagnosis published is valid for all ranks. Each rank writes `rank-N.json` and exits with the
code of the failure; for a rank that is gone, another one writes its last heartbeat.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from braid.console import warn
from braid.engine.progress import Progress
from braid.errors import BraidError, CollectiveMismatchError, ExitCode, HangError, PeerLostError
from braid.launch.collective_check import Collective, Side, describe_sides, is_mismatch, sides_of
from braid.launch.diagnosis import (
    Diagnosis,
    FailureKind,
    Heartbeat,
    PeerState,
    Straggler,
    diagnose,
    diagnose_silence,
    failed,
    lost,
    stragglers,
)
from braid.launch.failure_report import FailureReport, write_report
from braid.launch.process import KILLED, STEPPED, ProcessContext, is_everywhere, is_peer_failure
from braid.launch.stack_probe import WaitState, is_waiting, probe_error, probe_thread, stack_of, starved_s

BEAT_S = 0.5
BEAT_PER_RANK_S = 1e-4
"""Heartbeat interval: grows with the world size, so that many ranks do not overload the store."""

SAMPLE_S = 0.02
"""Interval between samples of the working thread's stack."""

STORE_S = 5.0
"""Timeout of a request to the store."""

REPORT_S = 1.5
"""How long a rank that is about to exit waits for the reports of the others."""

Result = TypeVar("Result")

Observer = Callable[[Mapping[int, PeerState], Sequence[Straggler], Diagnosis | None], None]
"""Receives the last heartbeats of all ranks, stragglers, and what the watchdog ends the process for."""

MISSED_BEATS = 4
"""After a rank was lost: it is the one that sent no heartbeat while all others sent this many."""


@contextmanager
def watched(
    process: ProcessContext,
    failures: Path,
    progress: Progress,
    timeout_s: float,
    end: Callable[[int], None] = os._exit,
    observe: Observer | None = None,
) -> Iterator[Watchdog | None]:
    """Watch the calling thread until the end of the `with`. Reports go to a subfolder of `failures` named after
    the start time. A timeout of 0 disables the watchdog. `end` exits the process: os._exit by default, because
    the working thread may be stuck in a collective. On rank 0, `observe` receives every round of heartbeats."""
    if timeout_s == 0:
        yield None
        return
    watchdog = Watchdog(process, failures, progress, timeout_s, end, observe)
    progress.watched = True
    watchdog.start()
    try:
        yield watchdog
    except BraidError as error:
        if is_everywhere(error):
            raise
        watchdog.fail_with(error)
    except Exception as error:
        watchdog.fail_with(error)
    finally:
        progress.watched = False
        watchdog.close()


class Watchdog:
    """The watchdog of one rank."""

    def __init__(
        self,
        process: ProcessContext,
        failures: Path,
        progress: Progress,
        timeout_s: float,
        end: Callable[[int], None],
        observe: Observer | None = None,
    ) -> None:
        self._observe = observe
        self.rank, self.world = process.rank, process.world
        self.progress, self.timeout_s = progress, timeout_s
        self.slow: tuple[Straggler, ...] = ()
        """Current stragglers; on rank 0 only."""
        rendezvous = process.rendezvous
        self._launcher_summarizes = rendezvous is not None and rendezvous.launcher_summarizes
        self._end, self._host, self._thread = end, socket.gethostname(), threading.get_ident()
        self._beat_s = min(BEAT_S, timeout_s / 10) + self.world * BEAT_PER_RANK_S
        if rendezvous is None:  # a single process
            self._root: Store = HashStore()
            self._store_rank: int | None = self.rank
            round_id, self._killed_key, self._stepped_key = "watchdog", KILLED, STEPPED
        else:
            # A connection of its own: the working thread may be blocked in a request on the other one.
            self._root = rendezvous.connect(timedelta(seconds=STORE_S))
            self._store_rank = None if rendezvous.agent_store else 0
            round_id, self._killed_key = rendezvous.round, f"{KILLED}/{rendezvous.attempt}"
            self._stepped_key = f"{STEPPED}/{rendezvous.attempt}"
        self._store = PrefixStore(round_id, self._root)
        # The first rank to set the name of the attempt's folder decides it for all.
        started = datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
        self._folder = failures / self._store.compare_set("name", "", started).decode()
        self._closing, self._exit_lock = threading.Event(), threading.Lock()
        self._store_dead = False
        """Whether a request to the store has failed or timed out: none are sent any more."""
        self._count = self._working = self._samples = 0
        self._first_step, self._stepped = 0, False
        """The first step that was seen; whether the launcher knows that one is done."""
        self._native_id = threading.get_native_id()
        self._device_since: tuple[object, float] = (None, 0.0)
        self._starved_since: tuple[object, float] = (None, 0.0)
        self._heard: dict[int, tuple[Heartbeat, float]] = {}
        """The last heartbeat of each rank, and when it arrived."""
        self._store_answered = self._awake = time.monotonic()
        """When the store last answered; when this process last resumed from being suspended."""
        self._compared: dict[int, Heartbeat] = {}
        """The heartbeats that stragglers are measured from."""
        self._threads = [
            threading.Thread(target=self._heartbeat_loop, name="watchdog-beats", daemon=True),
            threading.Thread(target=self._sampling_loop, name="watchdog", daemon=True),
        ]

    def start(self) -> None:
        self._post_heartbeat()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop the threads and post a last heartbeat, so that others do not miss this rank."""
        with self._exit_lock:
            self._closing.set()
        for thread in self._threads:
            thread.join(STORE_S)
        self._try_store(functools.partial(self._post_heartbeat, finished=True))

    def _try_store(self, request: Callable[[], Result]) -> Result | None:
        """Run requests to the store in a thread of their own, so that a hanging store cannot hang the exit.
        None if they fail or time out, and for all later ones."""
        answers: list[Result] = []

        def run() -> None:
            with suppress(RuntimeError):
                answers.append(request())

        if not self._store_dead:
            thread = threading.Thread(target=run, name="watchdog-request", daemon=True)
            thread.start()
            thread.join(2 * STORE_S)
            self._store_dead = not answers
        return answers[0] if answers else None

    # ------------------------------------------------------------------------------------ sampling thread

    def _sampling_loop(self) -> None:
        """Sample whether the working thread waits; fail if the store does not answer any more."""
        tick, before = min(SAMPLE_S, self._beat_s), time.monotonic()
        while not self._closing.wait(tick):
            now = time.monotonic()
            if now - before >= self.timeout_s / 2:
                self._awake = now  # the process was suspended, as by SIGSTOP: restart all clocks
            before = now
            self._samples += 1
            self._working += not self._waits()
            silent = now - max(self._store_answered, self._awake)
            if silent >= self.timeout_s + 2 * self._beat_s:
                self._store_dead = True
                self._fail(self._diagnose_store(f"has been silent for {silent:.1f} s"))
                return

    def _waits(self) -> bool:
        """Whether the rank waits for others, by a cheap test. On a GPU it is the device's current op that
        counts, because the host runs ahead."""
        behind = self.progress.behind()
        if behind is not None and not isinstance(behind.what, str):
            op = behind.what
            return not op.act.computes or (op.phase or "").endswith(("dispatch", "combine"))
        return is_waiting(self._thread)

    def _diagnose_store(self, how: str) -> Diagnosis:
        """The diagnosis if the store is gone: whoever serves it is at fault."""
        if self._store_rank is None:
            return Diagnosis(
                kind=FailureKind.SILENT, ranks=(), report=f"the launcher, which serves the store, {how}"
            )
        return replace(lost({self._store_rank: how}, self._peers()), kind=FailureKind.SILENT)

    # ----------------------------------------------------------------------------------- heartbeat thread

    def _heartbeat_loop(self) -> None:
        while not self._closing.wait(self._beat_s):
            try:
                self._post_heartbeat()
                self._note_first_step()
                diagnosis = self._published_diagnosis() or self._check_peers()
            except RuntimeError:  # of the store, which may recover; the sampling thread watches the time
                continue
            self._store_answered = time.monotonic()
            if diagnosis is not None:
                self._fail(diagnosis)
                return

    def _post_heartbeat(self, *, finished: bool = False) -> None:
        self._count += 1
        self._store.set(f"beat/{self.rank}", json.dumps(self.heartbeat(finished=finished).to_json()))

    def _note_first_step(self) -> None:
        """Tell the launcher once that a step is done: what fails later is not unable to start."""
        step = self.progress.at.step
        self._first_step = self._first_step or step
        if self.rank == 0 and step > self._first_step and not self._stepped:
            self._root.set(self._stepped_key, "")
            self._stepped = True

    def heartbeat(self, *, finished: bool = False) -> Heartbeat:
        """Where this rank is now."""
        now, at = time.monotonic(), self.progress.at
        # On a busy machine the thread may be ready to run and get no processor: that is no stall.
        starved = starved_s(self._native_id)
        if self._starved_since[0] != (at.step, at.place):
            self._starved_since = ((at.step, at.place), starved)
        since = max(at.since + starved - self._starved_since[1], self._awake)
        wait = WaitState(waits=False)
        behind = self.progress.behind()
        if behind is not None:
            # The host runs ahead of the GPU: report the op that the device has reached.
            key = (behind.step, behind.place)
            if self._device_since[0] != key:
                self._device_since = (key, now)
            at, since = behind, self._device_since[1]
            wait = WaitState(waits=True, call="its device")
        elif now - since >= self.timeout_s / 2 and self.world > 1:
            # Probing is expensive and only matters once a rank may be stuck.
            wait = probe_thread(self._thread)
        return Heartbeat(
            rank=self.rank,
            count=self._count,
            host=self._host,
            step=at.step,
            place=at.place,
            op=str(at.what),
            done=None if at.done is None else str(at.done),
            since_s=now - since,
            waits=wait.waits,
            call=wait.call,
            group=wait.group,
            members=wait.members,
            finished=finished,
            working=self._working,
            samples=self._samples,
            modules=self.progress.modules,
        )

    def _published_diagnosis(self) -> Diagnosis | None:
        """The diagnosis that another rank has published, or of the workers that the launcher lists as
        killed."""
        if self._store.check(["diagnosis"]):
            return Diagnosis.from_json(json.loads(self._store.get("diagnosis")))
        if not self._root.check([self._killed_key]):
            return None
        killed = {int(rank): how for rank, how in json.loads(self._root.get(self._killed_key)).items()}
        return self._publish(lost(killed, self._peers()))

    def _check_peers(self) -> Diagnosis | None:
        """Rank 0 checks all ranks, the others check rank 0."""
        if self.rank == 0:
            self._read_heartbeats(range(self.world))
            self._check_stragglers()
            if self._observe is not None:
                self._observe(self._peers(), self.slow, None)
            found = diagnose(self._peers(), self.timeout_s)
        else:
            self._read_heartbeats((0,))
            found = diagnose_silence(self._peers(), self.timeout_s)
        return None if found is None else self._publish(found)

    def _read_heartbeats(self, ranks: range | tuple[int, ...]) -> None:
        keys = [f"beat/{rank}" for rank in ranks]
        if not self._store.check(keys):
            return  # not all ranks have started yet
        now = time.monotonic()
        for text in self._store.multi_get(keys):
            beat = Heartbeat.from_json(json.loads(text))
            known = self._heard.get(beat.rank)
            if known is None or known[0].count != beat.count:
                self._heard[beat.rank] = (beat, now)

    def _peers(self) -> dict[int, PeerState]:
        now = time.monotonic()
        return {
            rank: PeerState(beat, now - max(when, self._awake)) for rank, (beat, when) in self._heard.items()
        }

    def _publish(self, found: Diagnosis) -> Diagnosis:
        """Publish a diagnosis, unless another rank was first; returns the one that is valid for all ranks."""
        text = self._store.compare_set("diagnosis", "", json.dumps(found.to_json()))
        return Diagnosis.from_json(json.loads(text))

    def _check_stragglers(self) -> None:
        """Update the list of stragglers, and warn about new ones."""
        beats = {rank: beat for rank, (beat, _) in self._heard.items()}
        if not self._compared:
            self._compared = beats if len(beats) == self.world else {}
            return
        found = stragglers(self._compared, beats)
        if found is None:
            return
        self._compared = beats
        known = {each.rank for each in self.slow}
        self.slow = tuple(found)
        for each in found:
            if each.rank not in known:
                warn(
                    f"rank {each.rank} on {beats[each.rank].host} is slow: up to step {beats[each.rank].step} "
                    f"it worked {each.factor:.1f} times as long as the median of the others, which wait for it"
                )

    # ------------------------------------------------------------------------------------------- failing

    def _fail(self, diagnosis: Diagnosis) -> None:
        """End the process, from a thread of the watchdog."""
        with self._exit_lock:
            if self._closing.is_set():
                return
            code = diagnosis.kind.exit_code
            wait = probe_thread(self._thread) if self.world > 1 else WaitState(waits=False)
            report = self._report(diagnosis, code, tuple(stack_of(self._thread)), wait)
            self._write(report)
            if self._observe is not None:
                self._observe(self._peers(), self.slow, diagnosis)
            where = f"rank {self.rank} was at {report.beat}"
            _print(f"braid: {where if self._launcher_summarizes else report}\n")
            self._try_store(lambda: self._await_reports(diagnosis))
            self._closing.set()
            self._end(code)

    def fail_with(self, error: Exception) -> None:
        """Handle an error of the working thread that the other ranks may not know of: diagnose and report it,
        then raise it, or the diagnosis if another rank caused it."""
        with self._exit_lock:
            self._closing.set()
        stack = tuple(line for entry in traceback.format_exception(error) for line in entry.splitlines())
        if is_mismatch(error) or is_peer_failure(error):
            wait = probe_error(error)
            found = self._try_store(
                lambda: (
                    self._find_mismatch(error, wait)
                    if is_mismatch(error)
                    else self._find_lost_ranks() or _unknown(error)
                )
            )
            diagnosis = found or self._diagnose_store("is gone")
            code = diagnosis.kind.exit_code
            raised: Exception = _ERRORS[code](diagnosis.report)
        else:
            own = failed(self.rank, _first_line(error), {self.rank: PeerState(self.heartbeat(), 0.0)})
            diagnosis = self._try_store(lambda: self._publish(own)) or own
            code = error.exit_code if isinstance(error, BraidError) else ExitCode.BUG
            wait, raised = WaitState(waits=False), error
        self._write(self._report(diagnosis, code, stack, wait))
        self._try_store(lambda: self._await_reports(diagnosis))
        if raised is error:
            raise error
        raise raised from error

    def _find_mismatch(self, error: Exception, wait: WaitState) -> Diagnosis:
        """After ranks of a group found that their collectives differ: what each of them was about to run, and
        where. All of them get here; one that does not is left out."""
        own = {"collective": sides_of(error)[0].to_json(), "where": self.heartbeat().where}
        self._store.set(f"mismatch/{self.rank}", json.dumps(own))
        keys = {rank: f"mismatch/{rank}" for rank in {self.rank, *wait.members}}
        deadline = time.monotonic() + STORE_S
        while not self._store.check(list(keys.values())) and time.monotonic() < deadline:
            time.sleep(SAMPLE_S)
        told = {
            rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])
        }
        sides = [
            Side(rank=rank, collective=Collective.from_json(each["collective"]), where=each["where"])
            for rank, each in told.items()
        ]
        at_fault, text = describe_sides(sides)
        group = f" {wait.group}" if wait.group else ""
        return self._publish(
            Diagnosis(
                kind=FailureKind.MISMATCH,
                ranks=at_fault,
                report=f"ranks of the group{group} call different collectives: {text}",
            )
        )

    def _find_lost_ranks(self) -> Diagnosis | None:
        """After a connection to some rank broke, find out which: the launcher knows, or another rank has
        published a diagnosis, or its heartbeats have stopped. None if none of these within a few seconds."""
        first_counts, deadline = dict[int, int](), time.monotonic() + STORE_S
        while time.monotonic() < deadline:
            self._post_heartbeat()
            if (known := self._published_diagnosis()) is not None:
                return known
            self._read_heartbeats(range(self.world))
            counts = {rank: beat.count for rank, (beat, _) in self._heard.items()}
            first_counts = first_counts or counts
            beats = {rank: count - first_counts[rank] for rank, count in counts.items() if rank in first_counts}
            finished = {rank for rank, (beat, _) in self._heard.items() if beat.finished}
            quiet = {rank for rank, number in beats.items() if number == 0 and rank != self.rank} | finished
            if quiet and all(number >= MISSED_BEATS for rank, number in beats.items() if rank not in quiet):
                return self._publish(lost(dict.fromkeys(quiet, "has ended"), self._peers()))
            time.sleep(self._beat_s)
        return None

    def _report(
        self, diagnosis: Diagnosis, code: ExitCode, stack: tuple[str, ...], wait: WaitState
    ) -> FailureReport:
        beat = self.heartbeat()
        if wait.waits:
            beat = replace(beat, **wait._asdict())
        return FailureReport(
            world=self.world, process=os.getpid(), diagnosis=diagnosis, exit_code=code, beat=beat, stack=stack
        )

    def _write(self, report: FailureReport) -> None:
        """Write a report; if that fails, say so and exit all the same."""
        try:
            write_report(self._folder, report)
        except OSError as error:
            _print(f"braid: cannot write a report to {self._folder}: {error.strerror}\n")

    def _await_reports(self, diagnosis: Diagnosis) -> None:
        """Wait until all ranks have written their reports, since a launcher kills the others once one has
        ended. The first rank to get here also writes the reports of ranks that are gone."""
        self._store.set(f"report/{self.rank}", "")
        absent = diagnosis.ranks if diagnosis.kind in (FailureKind.LOST, FailureKind.SILENT) else ()
        if self._store.add("reports", 1) == 1:
            for rank in absent:
                self._write_for(rank, diagnosis)
        expected = [f"report/{rank}" for rank in range(self.world) if rank not in absent]
        deadline = time.monotonic() + REPORT_S
        while not self._store.check(expected) and time.monotonic() < deadline:
            time.sleep(SAMPLE_S)

    def _write_for(self, rank: int, diagnosis: Diagnosis) -> None:
        """Write the report of a rank that is gone, from its last heartbeat."""
        if self._store.check([f"beat/{rank}"]):
            beat = Heartbeat.from_json(json.loads(self._store.get(f"beat/{rank}")))
            self._write(
                FailureReport(world=self.world, process=None, diagnosis=diagnosis, exit_code=None, beat=beat)
            )


_ERRORS = MappingProxyType(
    {
        ExitCode.BUG: CollectiveMismatchError,
        ExitCode.HANG: HangError,
        ExitCode.PEER_LOST: PeerLostError,
    }
)
"""By exit code of a diagnosis, the error that the working thread raises for it."""


def _unknown(error: Exception) -> Diagnosis:
    """The diagnosis of an error about a peer, if nothing more is known."""
    kind = FailureKind.DEADLOCK if "imed out" in str(error) else FailureKind.LOST
    return Diagnosis(kind=kind, ranks=(), report=f"another rank did not answer: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _print(text: str) -> None:
    """Write to stderr past Python's buffers, whose lock the working thread may hold."""
    with suppress(OSError, ValueError):
        os.write(2 if sys.stderr is None else sys.stderr.fileno(), text.encode())
