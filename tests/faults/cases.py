"""The faults that braid promises to survive or to name, each with what happens and the tests that show it.

`python -m tests.faults.cases` writes the table of docs/reliability.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from braid.errors import ExitCode

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- table of tests/faults/cases.py -->", "<!-- end of the table -->"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault."""

    fault: str
    happens: str
    code: ExitCode | None
    """Exit code of the command; None if the run goes on, or nothing that the user started ends."""
    message: str
    """What it says, without backquotes; empty if nothing."""
    tests: tuple[str, ...]
    """As `file::function`, from the folder of tests."""


POOL, WATCH, SAVE = "launch/test_worker_pool.py", "launch/test_watchdog.py", "train/test_async_saving.py"
BROKEN, DAMAGE, SHARDS = "checkpoint/test_interrupted.py", "checkpoint/test_damage.py", "data/test_shards.py"
MEMORY = "train/test_memory_checkpoints.py"
STATE, LOOP, METRICS = "train/test_state.py", "train/test_loop.py", "train/test_metrics.py"

CASES: tuple[Case, ...] = (
    Case(
        fault="a rank is killed in the middle of a step",
        happens="all ranks stop and report; `--restarts` starts them again from the newest checkpoint",
        code=ExitCode.PEER_LOST,
        message="rank 1 on node3 was killed by SIGKILL; last seen at step 3, F0.0",
        tests=(
            f"{WATCH}::test_a_rank_that_is_killed_is_named_and_others_report_for_it",
            f"{POOL}::test_a_training_with_restarts_survives_kill_9_of_any_rank",
        ),
    ),
    Case(
        fault="killed while a checkpoint is saved",
        happens="the one before it stands, and is resumed from",
        code=ExitCode.PEER_LOST,
        message="",
        tests=(
            f"{BROKEN}::test_killed_at_random_moments_of_saving_the_newest_complete_one_always_loads",
            f"{SAVE}::test_killed_at_any_moment_of_saving_and_pruning_the_newest_one_is_whole",
        ),
    ),
    Case(
        fault="killed while a step is saved again",
        happens="the old or the new checkpoint of that step is whole, never a mix",
        code=ExitCode.PEER_LOST,
        message="",
        tests=(
            f"{BROKEN}::test_killed_before_every_file_operation_of_a_re_save_the_old_or_the_new_one_is_whole",
        ),
    ),
    Case(
        fault="a file of a checkpoint is truncated",
        happens="the newest valid checkpoint is used; the damaged one is kept under another name",
        code=None,
        message="skipping a damaged checkpoint: ... resuming from step-00000010",
        tests=(
            f"{DAMAGE}::test_truncated_deleted_or_grown_files_are_found",
            f"{STATE}::test_a_damaged_checkpoint_is_named_and_the_previous_one_used",
        ),
    ),
    Case(
        fault="a bit of a checkpoint is flipped",
        happens="the same; file and tensor are named",
        code=None,
        message="part-00000.safetensors: embed.weight at [0]: checksum mismatch",
        tests=(
            f"{DAMAGE}::test_no_flipped_bit_is_ever_tolerated",
            f"{DAMAGE}::test_a_flipped_bit_names_file_and_tensor",
        ),
    ),
    Case(
        fault="a file of a checkpoint is deleted, its manifest empty or changed",
        happens="the same",
        code=None,
        message="skipping a damaged checkpoint: ...",
        tests=(
            f"{DAMAGE}::test_verify_lists_all_damage",
            f"{DAMAGE}::test_latest_passes_over_damaged_ones_and_says_why",
        ),
    ),
    Case(
        fault="the disk is full during a save",
        happens="nothing partial is left; training continues with the older checkpoint. The last must succeed",
        code=ExitCode.CHECKPOINT,
        message="cannot write ...: needs 1.2 GiB, has 0.3 GiB",
        tests=(
            f"{BROKEN}::test_too_little_space_is_seen_before_anything_is_written",
            f"{BROKEN}::test_a_disk_that_is_full_at_any_sync_leaves_the_old_one_or_the_new_one",
            f"{LOOP}::test_a_save_that_fails_on_the_way_does_not_stop_training",
        ),
    ),
    Case(
        fault="an asynchronous save fails",
        happens="all ranks hear of it after the same step; training continues with the older checkpoint",
        code=None,
        message="training continues with the previous checkpoint",
        tests=(
            f"{SAVE}::test_a_save_that_fails_is_reported_and_the_checkpoint_before_it_stands",
            f"{SAVE}::test_all_ranks_hear_of_a_failed_save_after_the_same_step",
        ),
    ),
    Case(
        fault="SIGTERM",
        happens="all ranks stop after the same step and save; without anything to save they end with 143",
        code=ExitCode.PREEMPTED,
        message="asked to stop by SIGTERM; step 40 of 400 is saved",
        tests=(
            f"{POOL}::test_asked_to_stop_all_ranks_do_and_the_state_is_saved",
            f"{SAVE}::test_a_signal_waits_for_the_save_under_way",
            "faults/test_stopping.py::test_sigterm_while_modules_are_loaded_leaves_nothing_behind",
        ),
    ),
    Case(
        fault="a launcher restarts ranks after one was killed",
        happens="they meet in a new round of the rendezvous, under `--restarts` and torchrun",
        code=None,
        message="rank 1 was killed by SIGKILL; restarting all, 1 of 3 restarts",
        tests=(
            f"{POOL}::test_after_kill_9_all_start_again_meet_and_rank_0_alone_has_the_terminal",
            f"{POOL}::test_under_torchrun_ranks_meet_again_after_kill_9",
            "faults/test_soak.py::test_a_flipped_bit_of_the_newest_checkpoint_and_kill_9_change_no_bit_of_a_run",
            f"{POOL}::test_ranks_of_two_nodes_meet_again_although_only_one_of_them_counts_a_restart",
        ),
    ),
    Case(
        fault="a rank hangs",
        happens="all ranks report and end within `train.stall_timeout_s`",
        code=ExitCode.HANG,
        message="rank 0 on node3 makes no progress and waits for no other rank: step 3, F0.0",
        tests=(
            f"{WATCH}::test_a_rank_that_hangs_in_python_is_named_with_its_stack_and_all_report",
            f"{WATCH}::test_a_rank_that_is_stopped_is_named_and_others_report_for_it",
        ),
    ),
    Case(
        fault="a rank is slow",
        happens="it is named, in `metrics.jsonl` too",
        code=None,
        message="rank 2 on node3 is slow: up to step 43 it worked 5.0 times as long as the median ...",
        tests=(
            f"{WATCH}::test_a_slow_rank_of_a_training_is_told_on_the_console_and_in_the_metrics",
            f"{WATCH}::test_ranks_are_compared_with_those_of_the_same_modules_alone",
        ),
    ),
    Case(
        fault="a gradient on one rank is NaN",
        happens="no weight changes; rank, parameter and micro-batch are named. Too many in a row end the run",
        code=ExitCode.NUMERICS,
        message="before any reduction: head.weight in micro-batch 1 on rank 3",
        tests=(
            "train/test_nonfinite.py::test_rank_parameter_and_micro_batch_are_named_before_a_reduction",
            f"{LOOP}::test_too_many_steps_that_are_not_finite_end_the_run",
        ),
    ),
    Case(
        fault="a spike of the loss or the gradient norm",
        happens="it is reported, and with `train.spikes skip` not applied; the same after a resume",
        code=None,
        message="step 7: a spike of 6 standard deviations: grad_norm 831, above 4.1",
        tests=(
            "train/test_spikes.py::test_a_spike_is_reported_and_skipped_if_asked_for",
            "train/test_spikes.py::test_a_run_that_resumes_decides_as_one_that_was_not_interrupted",
        ),
    ),
    Case(
        fault="settings differ between ranks",
        happens="all ranks refuse at the start",
        code=ExitCode.CONFIG,
        message="optim.lr: 0.0003 on rank 0, 0.001 on rank 1",
        tests=(f"{POOL}::test_ranks_with_different_settings_are_refused",),
    ),
    Case(
        fault="ranks call different collectives",
        happens="with `--check-collectives`, both sides are named with their places before the collective runs",
        code=ExitCode.BUG,
        message="ranks of the group dp_cp call different collectives: ...",
        tests=(
            "launch/test_collective_check.py::"
            "test_both_sides_of_a_mismatch_are_named_with_their_places_and_every_rank_ends",
        ),
    ),
    Case(
        fault="the number of ranks does not fit the mesh",
        happens="refused before a process starts; the nearest numbers that fit are named",
        code=ExitCode.CONFIG,
        message="--world 3 does not fit: ... The nearest that fit: 2 and 4",
        tests=(f"{POOL}::test_a_world_that_does_not_fit_names_the_nearest_that_do_in_one_line",),
    ),
    Case(
        fault="a run resumes on another topology",
        happens="the tensors are the same to the bit, the losses up to rounding",
        code=None,
        message="",
        tests=("topology/test_reshard.py::test_a_run_goes_from_topology_to_topology",),
    ),
    Case(
        fault="a run resumes with another number of data-parallel ranks",
        happens="no sample is skipped or repeated",
        code=None,
        message="",
        tests=("data/test_loader.py::test_resuming_with_other_ranks_loses_no_sample",),
    ),
    Case(
        fault="a run resumes on the same topology",
        happens="the losses are the same to the bit, with dropout too",
        code=None,
        message="",
        tests=(
            f"{LOOP}::test_asked_to_stop_it_saves_and_continues_bit_equal",
            "cli/test_training.py::test_stopped_and_started_again_equals_one_go_bit_for_bit",
        ),
    ),
    Case(
        fault="a bit of a replica's weights flips",
        happens="found within `train.check_copies_every` steps; the rank is named if there are three copies",
        code=ExitCode.NUMERICS,
        message="copies of weights or moments differ before step 300: rank 2, of ranks 0-3: ...",
        tests=("train/test_copies.py::test_a_bit_that_flips_in_a_copy_is_found",),
    ),
    Case(
        fault="a file of a dataset is missing, truncated or damaged",
        happens="refused when it is opened",
        code=ExitCode.DATA,
        message="the file, and what is wrong with it",
        tests=(
            f"{SHARDS}::test_missing_truncated_and_long_files_are_refused_at_opening",
            f"{SHARDS}::test_no_single_flipped_bit_passes",
        ),
    ),
    Case(
        fault="a token id outside the vocabulary",
        happens="all ranks end, on every topology; source, document and offset are named",
        code=ExitCode.DATA,
        message="... is outside the vocabulary of 257 (ids 0 to 256)",
        tests=(
            f"{SHARDS}::test_ids_are_checked_again_when_they_are_read",
            "topology/test_failures.py::test_an_id_out_of_range_is_refused_on_all_ranks_alike",
        ),
    ),
    Case(
        fault="all labels are masked, or a micro-batch is empty",
        happens="loss and gradients are zero, not NaN",
        code=None,
        message="step 3: no token counts in the loss, because all labels are masked",
        tests=(
            "train/test_step.py::test_an_all_masked_batch_has_zero_loss_and_zero_gradient",
            "train/test_run.py::test_a_run_without_a_single_label_says_so",
        ),
    ),
    Case(
        fault="an expert receives no token",
        happens="nothing is wrong; all sizes of an all-to-all come from one exchange of counts",
        code=None,
        message="",
        tests=("nn/test_moe_capacity.py::test_experts_without_tokens_have_no_gradient_at_all",),
    ),
    Case(
        fault="the port of the rendezvous is in use",
        happens="`--world` takes a free one; with MASTER_PORT, the address is named",
        code=ExitCode.CONFIG,
        message="rank 0 cannot serve the store at MASTER_ADDR node0, MASTER_PORT 29500: ...; set another port",
        tests=("launch/test_process.py::test_a_port_in_use_is_named_with_what_to_set",),
    ),
    Case(
        fault="a hostile checkpoint: pickles, paths that lead out, huge headers",
        happens="refused; nothing is executed",
        code=ExitCode.CHECKPOINT,
        message="what is wrong with which file",
        tests=(
            "checkpoint/test_hostile.py::test_nothing_is_ever_unpickled",
            "checkpoint/test_hostile.py::test_a_part_can_only_be_a_plain_name",
            "checkpoint/test_hostile.py::test_a_forged_header_is_refused",
        ),
    ),
    Case(
        fault="a checkpoint of another model",
        happens="refused with the names and shapes that differ",
        code=ExitCode.CHECKPOINT,
        message="the model differs from the one in runs/tiny: ...",
        tests=(f"{STATE}::test_a_checkpoint_of_another_model_is_refused_with_the_names",),
    ),
    Case(
        fault="an unknown setting, or a value of the wrong type",
        happens="refused; the nearest name is suggested",
        code=ExitCode.CONFIG,
        message="did you mean ...?",
        tests=(
            "cli/test_commands.py::test_a_misspelt_field_names_the_nearest_and_exits_2",
            "test_config.py::test_a_value_of_another_type_is_refused_with_what_may_stand_there",
        ),
    ),
)
"""The cases of the specification, in its order."""

FINDINGS: tuple[Case, ...] = (
    Case(
        fault="all checkpoints are damaged",
        happens="nothing is changed, unless `--start-over` keeps them under other names and starts anew",
        code=ExitCode.CHECKPOINT,
        message="all checkpoints in ... are damaged: the run is left unchanged",
        tests=("cli/test_training.py::test_a_run_whose_checkpoints_are_all_damaged_is_left_as_it_is",),
    ),
    Case(
        fault="a replica diverges",
        happens="found by sums of bits, and named by majority",
        code=ExitCode.NUMERICS,
        message="copies of weights or moments differ ...",
        tests=(
            "train/test_copies.py::test_any_flipped_bit_changes_the_sum",
            "train/test_copies.py::test_the_minority_is_whoever_disagrees_with_more_than_half",
        ),
    ),
    Case(
        fault="a finite spike on one rank",
        happens="ranks decide as one process does",
        code=None,
        message="a spike of 6 standard deviations",
        tests=("train/test_spikes.py::test_ranks_decide_as_one_process",),
    ),
    Case(
        fault="`generate RUN` or `--init RUN` with a damaged newest checkpoint",
        happens="the newest valid one is used, aloud",
        code=None,
        message="skipping a damaged checkpoint: ... using ... instead, which is older",
        tests=("cli/test_convert.py::test_a_damaged_checkpoint_is_passed_over_aloud",),
    ),
    Case(
        fault="the step that exceeds `train.max_skipped`",
        happens="it is in `metrics.jsonl` too",
        code=ExitCode.NUMERICS,
        message="6 steps in a row were not finite",
        tests=(f"{LOOP}::test_too_many_skipped_steps_are_noticed_one_step_late",),
    ),
    Case(
        fault="files that claim enormous shapes",
        happens="refused before memory is allocated for them",
        code=ExitCode.CHECKPOINT,
        message="the limit that is exceeded",
        tests=(
            "train/test_untrusted_shapes.py::test_a_model_is_bounded_by_the_tensors_that_are_there",
            "test_pattern.py::test_a_pattern_that_no_memory_holds_is_refused",
            "cli/test_commands.py::test_enormous_settings_are_refused_in_few_words_and_without_torch",
            "cli/test_commands.py::test_a_tensor_that_no_machine_can_address_is_refused",
        ),
    ),
    Case(
        fault="a manifest with impossible counters, a state that is not finite",
        happens="the one is not loaded, the other not saved (7)",
        code=ExitCode.CHECKPOINT,
        message="... is of no possible run",
        tests=(
            f"{STATE}::test_a_manifest_with_counters_that_no_run_has_is_refused",
            f"{STATE}::test_a_state_that_is_not_finite_is_not_saved",
        ),
    ),
    Case(
        fault="a collective of another shape or dtype than the group's",
        happens="named by `--check-collectives`, also before training",
        code=ExitCode.BUG,
        message="this rank runs all_reduce of [2, 4] float32 as collective 0, another one ...",
        tests=("launch/test_collective_check.py::test_before_training_a_mismatch_is_an_error_of_braid_too",),
    ),
    Case(
        fault="`metrics.jsonl` is a folder, the run's folder is deleted, weights of an import are NaN",
        happens="an error that says what to change, or the folder is made again",
        code=ExitCode.CONFIG,
        message="runs/tiny/metrics.jsonl cannot be written: Is a directory",
        tests=(
            f"{METRICS}::test_a_file_that_cannot_be_written_is_a_setting_to_change",
            f"{METRICS}::test_a_folder_that_is_deleted_under_the_run_is_made_again",
            "cli/test_convert.py::test_weights_that_are_not_finite_are_not_imported",
            "cli/test_convert.py::test_a_link_that_leads_out_of_the_folder_is_not_followed",
        ),
    ),
    Case(
        fault="a rank is refused before it joins; a machine that is too busy",
        happens="the rank tells the others, which end with its exit code; time without a processor is no stall",
        code=ExitCode.CONFIG,
        message="rank 1: invalid settings: 1 problem",
        tests=(
            f"{POOL}::test_a_rank_that_is_refused_before_it_joins_ends_the_others_with_its_reason",
            f"{WATCH}::test_time_without_a_processor_and_before_the_watch_is_no_stall",
        ),
    ),
    Case(
        fault="a rank does not come back",
        happens="with `--min-world` the run goes on with fewer, and takes it back when it returns",
        code=None,
        message="going on with 2 ranks instead of 4; out of service: slot 3",
        tests=(
            "launch/test_elastic.py::test_a_run_that_loses_a_slot_goes_on_with_fewer_and_takes_it_back",
            "launch/test_elastic.py::test_under_torchrun_ranks_that_do_not_fit_wait_and_end_with_the_others",
        ),
    ),
    Case(
        fault="the disk has no checkpoint, or an older one than `train.memory_save_every`",
        happens="ranks that start again resume from shared memory, theirs or that of a neighbouring machine",
        code=None,
        message="resuming from the checkpoint of step-00000040 in memory, ...",
        tests=(
            f"{MEMORY}::test_after_a_crash_training_goes_on_from_what_is_left_in_memory",
            f"{MEMORY}::test_a_launcher_starts_ranks_again_from_memory_and_leaves_nothing_there",
        ),
    ),
    Case(
        fault="the log is on a full disk",
        happens="the run goes on, and ends with its own exit code",
        code=None,
        message="",
        tests=("test_console.py::test_a_log_on_a_full_disk_ends_no_run",),
    ),
    Case(
        fault="a line of metrics, samples or launches is written in part (a full disk, a killed process)",
        happens="what there is of it is removed, or is a line of its own; no line after it is lost",
        code=None,
        message="cannot write runs/tiny/metrics.jsonl: No space left on device",
        tests=(
            "train/test_json_lines.py::test_metrics_of_a_full_disk_are_whole_lines",
            "train/test_json_lines.py::test_a_line_after_one_that_was_cut_off_is_a_line_of_its_own",
        ),
    ),
    Case(
        fault="a checkpoint is a link to another place",
        happens="it is read, replaced and pruned as others; what the link leads to stays",
        code=None,
        message="",
        tests=(f"{DAMAGE}::test_checkpoints_that_are_links_to_another_place_are_saved_again_and_pruned",),
    ),
)
"""What was found beside them."""


def table(cases: Sequence[Case]) -> list[str]:
    lines = ["| | fault | what happens | exit | message |", "|---|---|---|---|---|"]
    for number, case in enumerate(cases, 1):
        code = "" if case.code is None else int(case.code)
        message = f"`{case.message}`" if case.message else ""
        lines.append(f"| {number} | {case.fault} | {case.happens} | {code} | {message} |")
    return lines


def section() -> str:
    """The tables, as they stand in docs/reliability.md."""
    return "\n".join([BEGIN, *table(CASES), "", "And beside these:", "", *table(FINDINGS), END])


def replaced(page: str) -> str:
    """A page with its tables replaced by those of this file."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{PAGE} has no {BEGIN} ... {END}"
    return before + section() + after


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text()))
