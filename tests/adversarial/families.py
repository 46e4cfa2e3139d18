"""The families of hostile cases, how many of each were tried by hand once, and the tests that hold them now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

CHECK_OF_TABLE = "tests/adversarial/test_families.py"


@dataclass(frozen=True)
class Family:
    name: str
    noted: int
    """Cases of the first attack, which was made by hand; 0 for what has come since."""
    tests: tuple[str, ...]
    """Beginnings of node ids, below ``tests/``. Every parameter set of such a test is a case."""
    counts: bool = False
    """Whether tests hold several cases each, whose number they record as the property ``cases``."""

    def holds(self, node: str) -> bool:
        path = node.removeprefix("tests/")
        return any(path == test or path.startswith((f"{test}[", f"{test}::")) for test in self.tests)


def tests(file: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{file}::test_{name}" for name in names) or (file,)


FAMILIES = (
    Family("readers: files", 62, (*tests("adversarial/test_readers.py", "a_hostile_file"),
                                  *tests("corpus/test_readers.py", "every_refusal_has_its_reason"))),
    Family("readers: Parquet", 9, tests(
        "corpus/test_hostile_files.py", "parquet_that_decodes_to_far_more_than_its_size_stays_small_in_memory",
        "values_of_a_dictionary_limit_the_rows_that_are_decoded_at_once",
        "a_parquet_bomb_is_counted_and_the_rest_is_built",
        "small_text_does_not_vouch_for_another_column_with_the_same_path")),
    Family("readers: odd files", 18, tests("adversarial/test_readers.py", "an_odd_file_beside_a_good_one")),
    Family("readers: FIFO", 1, tests(
        "corpus/test_hostile_files.py", "fifos_sockets_and_devices_are_counted_not_opened",
        "a_file_that_becomes_a_fifo_after_it_was_listed_does_not_hang",
        "a_fifo_put_in_place_between_the_check_and_the_open_does_not_hang")),
    Family("readers: complexity", 18, (
        *tests("adversarial/test_readers.py", "four_times_the_size_takes_about_four_times_as_long"),
        *tests("adversarial/test_patterns.py", "patterns_take_linear_time", "the_largest_inputs_take_linear_time"))),
    Family("recipes", 13, tests("recipe/test_hostile.py", "a_hostile_recipe_is_refused_with_its_position")),
    Family("overrides", 14, tests("recipe/test_hostile.py", "a_hostile_override_is_refused")),
    Family("sinks", 1, tests("track/test_sinks.py", "what_is_not_a_sink_class_is_refused_and_never_called")),
    Family("tokenizer: timings", 45, tests(
        "adversarial/test_tokenizer.py", "encoding_takes_time_in_proportion_to_the_text")),
    Family("tokenizer: special tokens", 3, tests("tokenizer/test_safety.py", "no_text_becomes_a_special_token")),
    Family("tokenizer: forged chat", 28, tests("adversarial/test_tokenizer.py", "no_message_makes_a_marker")),
    Family("tokenizer: split over messages", 1, tests(
        "tokenizer/test_safety.py", "a_marker_split_over_messages_and_fields_is_text")),
    Family("tokenizer: corrupt files", 12, tests(
        "tokenizer/test_damage.py", "a_damaged_definition_is_refused_by_name",
        "a_file_that_is_not_json_is_refused_by_name", "a_pattern_that_backtracks_without_end_is_an_error")),
    Family("store and checkpoint damage", 19, (
        *tests("tokens/test_damage.py", "a_damaged_shard_stops_training_before_the_first_step",
               "evaluation_refuses_a_damaged_validation_split", "a_damaged_manifest_is_reported",
               "a_manifest_with_a_damaged_entry_is_reported"),
        *tests("checkpoint/test_foreign_checkpoints.py", "damaged_metadata_is_one_line_that_names_it",
               "a_few_bytes_of_metadata_do_not_keep_a_reader_busy"))),
    Family("pickles and code by command", 12, (
        *tests("adversarial/test_poisoned.py", "a_command_runs_nothing_of_what_it_is_given"),
        *tests("checkpoint/test_foreign_checkpoints.py", "no_command_runs_what_a_checkpoint_brings",
               "no_command_unpickles_a_weight", "training_does_not_resume_from_it",
               "every_other_name_is_refused_by_its_name"))),
    Family("server: requests", 24, (
        *tests("track/test_server.py", "without_the_key_nothing_is_given", "no_address_leads_outside_the_runs",
               "a_number_of_points_that_cannot_be_is_refused", "an_unusual_range_is_empty_or_all",
               "a_step_that_cannot_be_is_refused"),
        *tests("adversarial/test_network.py", "only_names_of_this_machine_are_answered"))),
    Family("server: slow and many clients", 2, tests(
        "adversarial/test_network.py", "slow_and_many_clients_do_not_keep_others_waiting")),
    Family("server: pages", 2, (
        *tests("track/test_page.py", "it_follows_a_run_within_two_seconds_and_text_stays_text"),
        *tests("track/test_server.py", "a_report_stands_alone_and_text_stays_text"),
        *tests("adversarial/test_network.py", "a_page_from_elsewhere_reads_nothing_even_with_the_key"))),
    Family("records", 39, tests(
        "track/test_hostile.py", "a_bad_line_is_counted_and_the_lines_after_it_are_read",
        "an_unusual_line_is_not_damage", "a_damaged_index_is_not_used", "a_damaged_file_beside_the_record_is_named")),
    Family("records: live", 2, tests(
        "track/test_hostile.py", "every_bad_line_at_once_on_a_page_of_two_runs",
        "a_line_over_the_limit_is_skipped_once_and_not_read_again")),
    Family("ssh addresses", 17, tests(
        "adversarial/test_network.py", "a_hostile_address_becomes_no_option_and_no_command")),
    Family("ssh remotes", 8, tests(
        "track/test_hostile_ssh.py", "an_invalid_response_is_a_read_error_of_that_run",
        "reported_sizes_are_not_trusted", "more_than_was_asked_for_is_refused", "names_are_shown_and_not_obeyed")),
    Family("rendezvous: noise", 64, tests("adversarial/test_network.py", "noise_gets_no_answer_and_leaves_no_trace")),
    Family("rendezvous: code execution", 2, (
        *tests("adversarial/test_network.py", "the_exploit_of_the_rendezvous_runs_no_code"),
        *tests("elastic/test_rendezvous.py", "unauthenticated_clients_run_no_code_and_do_not_disturb",
               "an_impostor_of_the_rendezvous_is_not_trusted"))),
    Family("emitted job files", 3, tests(
        "elastic/test_job_files.py", "the_slurm_script_quotes_and_is_written",
        "the_slurm_script_gives_the_nodes_a_secret", "an_indexed_job_for_kubernetes")),
    Family("credentials", 4, tests("test_redact.py")),
    Family("kill -9", 10, (
        *tests("train/test_kill.py", "sigkill_at_random_steps_and_resume_is_bitwise_the_uninterrupted_run"),
        *tests("tokenizer/test_training.py", "after_a_kill_the_same_call_resumes_to_the_same_bytes"),
        *tests("corpus/test_resume.py", "killed_at_random_moments_it_ends_with_the_same_bytes"),
        *tests("corpus/test_s3.py", "killed_at_random_moments_it_ends_with_the_same_bytes"),
        *tests("corpus/test_fetch.py", "a_killed_download_resumes_and_two_at_once_are_refused")), counts=True),
    Family("disk full", 6, tests("test_disk_full.py")),
    Family("new: API server and chat page", 0, (
        "serve/test_hostile.py", *tests("serve/test_page.py", "without_the_key_it_says_where_the_key_is",
                                        "the_page_loads_nothing_from_elsewhere_and_cannot_be_framed"),
        *tests("serve/test_schema.py", "no_random_request_is_a_server_error"))),
    Family("new: sandboxes", 0, ("sandbox/test_sandbox.py", "sandbox/test_system_calls.py", "sandbox/test_answers.py")),
    Family("new: fetch", 0, (
        *tests("corpus/test_fetch_hub.py", "a_hostile_name_downloads_nothing", "a_damaged_listing_is_an_error",
               "content_that_is_not_as_listed_is_refused_and_removed", "a_size_that_is_not_as_listed_is_refused",
               "an_endless_answer_is_read_up_to_the_listed_size", "a_listing_that_does_not_end_is_an_error"),
        *tests("corpus/test_fetch.py", "names_in_urls_do_not_lead_out", "an_untrusted_certificate_is_refused"),
        *tests("corpus/test_fetch_parts.py", "a_damaged_journal_is_discarded"))),
    Family("new: PDF, DOCX, EPUB, 7z, RAR", 0, tests(
        "corpus/test_document_files.py", "a_folder_of_every_format_is_built_and_every_hostile_file_is_named",
        "damaged_files_raise_nothing_but_reasons", "a_parser_that_hangs_or_crashes_takes_only_its_file_with_it",
        "a_parser_sees_no_credentials", "nothing_leads_out_of_a_7z_or_rar",
        "a_page_that_would_take_hours_is_one_broken_record")),
    Family("new: code that a recipe names", 0, ("recipe/test_imported_code.py",)),
    Family("new: found by fuzzing", 0, ("adversarial/test_found.py",)),
    Family("new: peer replicas", 0, tests(
        "checkpoint/test_replica_server.py", "a_peer_with_another_secret_gets_and_leaves_nothing",
        "a_server_that_does_not_know_the_secret_is_not_trusted", "a_rank_takes_only_what_was_agreed_on",
        "a_state_that_does_not_match_its_checksum_or_layout_is_rejected",
        "frames_that_are_cut_short_forged_or_replayed_end_the_connection",
        "blocks_that_are_changed_or_replayed_are_refused")),
    Family("new: another user of the machine", 0, ("adversarial/test_second_user.py",)),
    Family("new: port scan", 0, ("adversarial/test_ports.py",)),
    Family("new: supply chain", 0, (
        "test_supply_chain.py",
        *tests("test_workflow.py", "actions_are_pinned_by_commit_and_no_job_has_secrets_or_may_write"))),
)  # fmt: skip


@dataclass
class Tally:
    cases: int = 0
    survived: int = 0
    skipped: int = 0


def files(families: Iterable[Family] = FAMILIES) -> list[str]:
    return sorted({f"tests/{test.partition('::')[0]}" for family in families for test in family.tests})


def table(tallies: dict[str, Tally]) -> str:
    lines = ["| family | noted | cases | survived | skipped |", "|---|--:|--:|--:|--:|"]
    total = Tally()
    for family in FAMILIES:
        tally = tallies[family.name]
        lines.append(f"| {family.name} | {family.noted or ''} | {tally.cases} | {tally.survived} | {tally.skipped} |")
        total = Tally(total.cases + tally.cases, total.survived + tally.survived, total.skipped + tally.skipped)
    noted = sum(family.noted for family in FAMILIES)
    return "\n".join([*lines, f"| **all** | {noted} | {total.cases} | {total.survived} | {total.skipped} |"])
