"""The watchdog: when a rank stalls or dies, every rank says where it stood, and ends instead of waiting.

    with watched(joined, folder, progress, timeout_s) as watchdog:
        ...   # steps, which say what they do by `progress`

Two threads of each rank live beside the one that works. One tells the other ranks, on the store that they found
one another on, what this rank is doing (a `Beat`), and reads what they decide; rank 0's looks at all beats, and
makes a diagnosis where one is due. The other looks at the working thread's stack to see whether it waits, and
watches over the first. The first diagnosis holds for all. Each rank writes `rank-N.json` and ends with the exit
code of the kind; of a rank that cannot, rank 0 writes what was last heard.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from braid.console import warn
from braid.engine.progress import Progress
from braid.errors import BraidError, ExitCode, HangError, PeerLostError
from braid.launch.diagnosis import (
    Diagnosis,
    FailureKind,
    Heartbeat,
    Seen,
    Slow,
    diagnose,
    failed,
    lost,
    silence,
    stragglers,
)
from braid.launch.failure_report import FailureReport, write_report
from braid.launch.process import ENDED, ProcessContext, is_everywhere, is_of_others
from braid.launch.stack_probe import Standing, is_waiting, stack_of, standing, stood

BEAT_S = 0.5
BEAT_PER_RANK_S = 1e-4
"""Between two beats; longer with many ranks, so that the store can answer all of them."""

SAMPLE_S = 0.02
"""Between two looks at the working thread."""

STORE_S = 5.0
"""How long one question to the store may take."""

REPORT_S = 1.5
"""How long a rank that is about to end waits until others have written their reports too."""

Result = TypeVar("Result")

MISSED = 4
"""How many beats of all others a rank must miss to be the one that has ended, once somebody has."""


@contextmanager
def watched(
    joined: ProcessContext,
    failures: Path,
    progress: Progress,
    timeout_s: float,
    end: Callable[[int], None] = os._exit,
) -> Iterator[Watchdog | None]:
    """Watch over the thread that calls, until the end of the `with`. Reports go to a folder within `failures`,
    named after the time when this began. With a timeout of 0 nobody watches. `end` is how the process ends."""
    if timeout_s == 0:
        yield None
        return
    watchdog = Watchdog(joined, failures, progress, timeout_s, end)
    progress.watched = True
    watchdog.start()
    try:
        yield watchdog
    except BraidError as error:
        if is_everywhere(error):
            raise
        watchdog.fail_by(error)
    except Exception as error:
        watchdog.fail_by(error)
    finally:
        progress.watched = False
        watchdog.close()


class Watchdog:
    """Of one rank."""

    def __init__(
        self,
        joined: ProcessContext,
        failures: Path,
        progress: Progress,
        timeout_s: float,
        end: Callable[[int], None],
    ) -> None:
        self.rank, self.world = joined.rank, joined.world
        self.progress, self.timeout_s = progress, timeout_s
        self.slow: tuple[Slow, ...] = ()
        """Ranks that others wait for; known to rank 0."""
        self._summed_up = joined.meeting is not None and joined.meeting.summed_up
        self._end, self._host, self._thread = end, socket.gethostname(), threading.get_ident()
        self._beat_s = min(BEAT_S, timeout_s / 10) + self.world * BEAT_PER_RANK_S
        self._root, self._served_by = _reach(joined)
        self._ended = ENDED if joined.meeting is None else f"{ENDED}/{joined.meeting.attempt}"
        self._store = PrefixStore("watchdog" if joined.meeting is None else joined.meeting.round, self._root)
        self._folder = failures / self._named()
        self._closing, self._over = threading.Event(), threading.Lock()
        self._mute = False
        """Whether the store is known not to answer."""
        self._count = self._working = self._samples = 0
        self._device_since: tuple[object, float] = (None, 0.0)
        self._heard: dict[int, tuple[Heartbeat, float]] = {}
        """The last beat of each rank, and when it came."""
        self._answered = self._awake = time.monotonic()
        """When the store last answered; and since when this process has not been suspended."""
        self._compared: dict[int, Heartbeat] = {}
        self._threads = [
            threading.Thread(target=self._tell_and_listen, name="watchdog-beats", daemon=True),
            threading.Thread(target=self._look_at_thread, name="watchdog", daemon=True),
        ]

    def _named(self) -> str:
        """The name of this attempt, which the first to come gives."""
        mine = datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
        return self._store.compare_set("name", "", mine).decode()

    def start(self) -> None:
        self._beat()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Say goodbye, and stop."""
        with self._over:
            self._closing.set()
        for thread in self._threads:
            thread.join(STORE_S)
        self._ask(functools.partial(self._beat, left=True))

    def _ask(self, question: Callable[[], Result]) -> Result | None:
        """What the store answers; None where it is gone or says nothing, and from then on."""
        answers: list[Result] = []

        def ask() -> None:
            with suppress(RuntimeError):
                answers.append(question())

        if not self._mute:
            asking = threading.Thread(target=ask, name="watchdog-question", daemon=True)
            asking.start()
            asking.join(2 * STORE_S)
            self._mute = not answers
        return answers[0] if answers else None

    # ------------------------------------------------------------------------- beside the working thread

    def _look_at_thread(self) -> None:
        """Take samples; and end where the store itself does not answer any more."""
        tick, before = min(SAMPLE_S, self._beat_s), time.monotonic()
        while not self._closing.wait(tick):
            now = time.monotonic()
            if now - before >= self.timeout_s / 2:
                self._awake = now  # nobody is to blame for the time in which all were suspended
            before = now
            self._samples += 1
            self._working += not self._waits()
            silent = now - max(self._answered, self._awake)
            if silent >= self.timeout_s + 2 * self._beat_s:
                self._mute = True
                self._fail(self._store_is_gone(f"has been silent for {silent:.1f} s"))
                return

    def _waits(self) -> bool:
        """Whether the rank is held up by others, as far as can be told at a glance."""
        behind = self.progress.behind()
        if behind is not None and not isinstance(behind.what, str):
            op = behind.what
            return not op.act.computes or (op.phase or "").endswith(("dispatch", "combine"))
        return is_waiting(self._thread)

    def _store_is_gone(self, how: str) -> Diagnosis:
        if self._served_by is None:
            return Diagnosis(
                kind=FailureKind.SILENT, ranks=(), report=f"the launcher, which serves the store, {how}"
            )
        seen = self._seen()
        return replace(lost({self._served_by: how}, seen), kind=FailureKind.SILENT)

    def _tell_and_listen(self) -> None:
        while not self._closing.wait(self._beat_s):
            try:
                self._beat()
                diagnosis = self._decided() or self._look_around()
            except RuntimeError:  # of the store; it may come back, and the other thread counts
                continue
            self._answered = time.monotonic()
            if diagnosis is not None:
                self._fail(diagnosis)
                return

    def _beat(self, *, left: bool = False) -> None:
        self._count += 1
        self._store.set(f"beat/{self.rank}", json.dumps(self.beat(left=left).to_json()))

    def beat(self, *, left: bool = False) -> Heartbeat:
        """Where this rank stands now."""
        now, at = time.monotonic(), self.progress.at
        since = max(at.since, self._awake)
        found = Standing(waits=False)
        behind = self.progress.behind()
        if behind is not None:
            # The host has gone ahead: what counts is what the device has not done.
            key = (behind.step, behind.place)
            if self._device_since[0] != key:
                self._device_since = (key, now)
            at, since = behind, self._device_since[1]
            found = Standing(waits=True, call="its device")
        elif now - since >= self.timeout_s / 2 and self.world > 1:
            found = standing(self._thread)
        return Heartbeat(
            rank=self.rank,
            count=self._count,
            host=self._host,
            step=at.step,
            place=at.place,
            op=str(at.what),
            done=None if at.done is None else str(at.done),
            since_s=now - since,
            waits=found.waits,
            call=found.call,
            group=found.group,
            members=found.members,
            left=left,
            working=self._working,
            samples=self._samples,
        )

    # -------------------------------------------------------------------------------------------- others

    def _decided(self) -> Diagnosis | None:
        """What another rank has found, or what the launcher knows."""
        if self._store.check(["diagnosis"]):
            return Diagnosis.from_json(json.loads(self._store.get("diagnosis")))
        ended = self._ended_by_launcher()
        return self._agreed(lost(ended, self._seen())) if ended else None

    def _ended_by_launcher(self) -> dict[int, str]:
        if not self._root.check([self._ended]):
            return {}
        return {int(rank): how for rank, how in json.loads(self._root.get(self._ended)).items()}

    def _look_around(self) -> Diagnosis | None:
        """Rank 0 looks at all ranks, the others at rank 0."""
        if self.rank == 0:
            self._listen(range(self.world))
            self._compare()
            found = diagnose(self._seen(), self.timeout_s)
        else:
            self._listen((0,))
            found = silence(self._seen(), self.timeout_s)
        return None if found is None else self._agreed(found)

    def _listen(self, ranks: range | tuple[int, ...]) -> None:
        keys = [f"beat/{rank}" for rank in ranks]
        if not self._store.check(keys):
            return  # somebody has not begun
        now = time.monotonic()
        for text in self._store.multi_get(keys):
            beat = Heartbeat.from_json(json.loads(text))
            known = self._heard.get(beat.rank)
            if known is None or known[0].count != beat.count:
                self._heard[beat.rank] = (beat, now)

    def _seen(self) -> dict[int, Seen]:
        now = time.monotonic()
        return {rank: Seen(beat, now - max(when, self._awake)) for rank, (beat, when) in self._heard.items()}

    def _agreed(self, found: Diagnosis) -> Diagnosis:
        """The first diagnosis holds for all ranks."""
        text = self._store.compare_set("diagnosis", "", json.dumps(found.to_json()))
        return Diagnosis.from_json(json.loads(text))

    def _compare(self) -> None:
        """Who is slow: told when it changes."""
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
        """A thread of the watchdog ends the process."""
        with self._over:
            if self._closing.is_set():
                return
            code = diagnosis.kind.exit_code
            where = standing(self._thread) if self.world > 1 else Standing(waits=False)
            report = self._report(diagnosis, code, tuple(stack_of(self._thread)), where)
            self._write(report)
            _print(
                f"braid: rank {self.rank} stood at {report.beat}\n" if self._summed_up else f"braid: {report}\n"
            )
            self._ask(lambda: self._tell_written(diagnosis))
            self._closing.set()
            self._end(code)

    def fail_by(self, error: Exception) -> None:
        """The working thread has met an error that other ranks may not know of: find out what it means, report,
        and raise it, or what is behind it."""
        with self._over:
            self._closing.set()
        stack = tuple(line for entry in traceback.format_exception(error) for line in entry.splitlines())
        of_others = is_of_others(error)
        if of_others:
            found = self._ask(lambda: self._who_is_gone() or _unknown(error)) or self._store_is_gone("is gone")
        else:
            own = failed(self.rank, _first_line(error), {self.rank: Seen(self.beat(), 0.0)})
            found = self._ask(lambda: self._agreed(own)) or own
        code = error.exit_code if isinstance(error, BraidError) else ExitCode.BUG
        if of_others:
            code = found.kind.exit_code
        where = stood(error) if of_others else Standing(waits=False)
        self._write(self._report(found, code, stack, where))
        self._ask(lambda: self._tell_written(found))
        if of_others:
            raise (HangError if code is ExitCode.HANG else PeerLostError)(found.report) from error
        raise error

    def _who_is_gone(self) -> Diagnosis | None:
        """A rank has ended, that is all that is known: the launcher knows which, or another rank knows why, or
        beats stop coming from it. None where nothing is found out."""
        began, deadline = dict[int, int](), time.monotonic() + STORE_S
        while time.monotonic() < deadline:
            self._beat()
            if (known := self._decided()) is not None:
                return known
            self._listen(range(self.world))
            counts = {rank: beat.count for rank, (beat, _) in self._heard.items()}
            began = began or counts
            come = {rank: count - began[rank] for rank, count in counts.items() if rank in began}
            left = {rank for rank, (beat, _) in self._heard.items() if beat.left}
            quiet = {rank for rank, number in come.items() if number == 0 and rank != self.rank} | left
            if quiet and all(number >= MISSED for rank, number in come.items() if rank not in quiet):
                return self._agreed(lost(dict.fromkeys(quiet, "has ended"), self._seen()))
            time.sleep(self._beat_s)
        return None

    def _report(
        self, diagnosis: Diagnosis, code: ExitCode, stack: tuple[str, ...], where: Standing
    ) -> FailureReport:
        beat = self.beat()
        if where.waits:
            beat = replace(beat, **where._asdict())
        return FailureReport(
            world=self.world, process=os.getpid(), diagnosis=diagnosis, exit_code=code, beat=beat, stack=stack
        )

    def _write(self, report: FailureReport) -> None:
        """A report that cannot be written is told of, and no reason to stay."""
        try:
            write_report(self._folder, report)
        except OSError as error:
            _print(f"braid: no report in {self._folder}: {error.strerror}\n")

    def _tell_written(self, diagnosis: Diagnosis) -> None:
        """The first to report also writes for those that are not there to do it. Then all wait for each other:
        whoever starts ranks stops all of them once one has ended."""
        self._store.set(f"report/{self.rank}", "")
        if self._store.add("reports", 1) == 1:
            self._write_for_silent(diagnosis)
        absent = diagnosis.ranks if diagnosis.kind in (FailureKind.LOST, FailureKind.SILENT) else ()
        expected = [f"report/{rank}" for rank in range(self.world) if rank not in absent]
        deadline = time.monotonic() + REPORT_S
        while not self._store.check(expected) and time.monotonic() < deadline:
            time.sleep(SAMPLE_S)

    def _write_for_silent(self, diagnosis: Diagnosis) -> None:
        if diagnosis.kind not in (FailureKind.LOST, FailureKind.SILENT):
            return
        for rank in diagnosis.ranks:
            if self._store.check([f"beat/{rank}"]):
                beat = Heartbeat.from_json(json.loads(self._store.get(f"beat/{rank}")))
                self._write(
                    FailureReport(
                        world=self.world, process=None, diagnosis=diagnosis, exit_code=None, beat=beat
                    )
                )


def _reach(joined: ProcessContext) -> tuple[Store, int | None]:
    """A connection of the watchdog's own, and the rank that serves the store; None where a launcher does."""
    if joined.meeting is None:
        return HashStore(), joined.rank
    store = joined.meeting.reach(timedelta(seconds=STORE_S))
    return store, None if joined.meeting.served else 0


def _unknown(error: Exception) -> Diagnosis:
    kind = FailureKind.DEADLOCK if "imed out" in str(error) else FailureKind.LOST
    return Diagnosis(kind=kind, ranks=(), report=f"another rank did not answer: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _print(text: str) -> None:
    """Past Python's own buffers, which the working thread may be holding."""
    with suppress(OSError, ValueError):
        os.write(2 if sys.stderr is None else sys.stderr.fileno(), text.encode())
