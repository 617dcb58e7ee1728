"""Which tests ``make test`` runs: of those of ``make test-all`` what a change most often breaks.

``pytest --part quick`` chooses every test that a planted bug names (``planted_bugs.txt``), and of
each other test function the case in the middle of its parameters. It leaves out ``THOROUGH``: what
takes seconds, and is put together of parts that other tests have. ``--part rest`` chooses the rest.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from .mutations import MUTATIONS

#: Files, or functions of a file: how their names begin.
THOROUGH = (
    "tests/benchmarks/test_gpu_report.py",
    "tests/benchmarks/test_peers_cpu.py",
    "tests/benchmarks/test_plots.py::test_the_committed_rows",
    "tests/benchmarks/test_serving.py",
    "tests/compile/test_calls_of_csrc.py",
    "tests/compile/test_compile_cache.py",
    "tests/compile/test_csrc.py::test_kernels_compile",
    "tests/compile/test_csrc_asan.py",
    "tests/compile/test_hazards.py::test_what_",
    "tests/compile/test_kernels_on_threads.py",
    "tests/compile/test_launch.py::test_batches_of_other_sizes",
    "tests/compile/test_launch.py::test_launches_that_share_a_kernel",
    "tests/compile/test_static_report.py::test_no_kernel",
    "tests/compile/test_static_report.py::test_the_machine_code",
    "tests/compile/test_step_model.py",
    "tests/compile/test_triton.py::test_a_thread_makes",
    "tests/compile/test_triton.py::test_every_kernel",
    "tests/compile/test_triton.py::test_kernels_fit",
    "tests/compile/test_triton.py::test_no_spills",
    "tests/compile/test_triton.py::test_products_in_tf32",
    "tests/data/test_sources.py::test_without_the_library",
    "tests/docs/test_examples.py::test_python_of_a_page",
    "tests/docs/test_site.py",
    "tests/models/test_freeze.py::test_compiled_and_exported",
    "tests/models/test_on_cuda.py",
    "tests/ops/test_linear.py::test_the_ends_of_slices",
    "tests/ops/test_linear_distillation.py::test_compiled",
    "tests/pretrain/test_stream.py::test_killed_and_resumed",
    "tests/ptx/test_emulate.py::test_a_product_that_is_not_waited_for",
    "tests/ptx/test_emulate.py::test_distillation",
    "tests/ptx/test_emulate.py::test_kept_logits",
    "tests/ptx/test_emulate.py::test_nan_of_a_teacher",
    "tests/ptx/test_emulate.py::test_sampling",
    "tests/run/test_messages.py::test_a_backend_that_is_none",
    "tests/run/test_messages.py::test_an_empty_variable_is_unset",
    "tests/study/test_cell.py::test_a_cell_by_itself",
    "tests/test_machine.py::test_memory_that_is_kept",
    "tests/test_packaging.py::test_cuda_library",
    "tests/test_packaging.py::test_import_touches",
    "tests/test_packaging.py::test_wheel",
    "tests/test_rules.py::test_a_backend_that_did_not_run_yet",
)

#: Cases that are marked slow and run every day, in the rest: a cheap one of each kind. How their
#: names begin, as those of pages end with a line.
OF_SLOW_LANE = (
    "tests/benchmarks/test_peers.py::test_an_attention_peer_agrees_or_says_why_not[sdpa-plain]",
    "tests/classic/test_train.py::test_resume[quick-thoughts-True]",
    "tests/compile/test_static_report.py::test_dk_and_dv_with_bias_and_dropout_have_no_race",
    "tests/data/test_folder.py::test_files_of_a_cache_are_damaged[wordpiece]",
    "tests/docs/test_commands.py::test_fastplm_of_a_block[docs/bertscore.md:",
    "tests/docs/test_commands.py::test_fastplm_of_a_block[docs/scoring.md:",
    "tests/docs/test_commands.py::test_fastplm_of_a_block[docs/studies.md:",
    "tests/finetune/test_frozen.py::test_a_new_pooler_is_trained",
    "tests/finetune/test_report.py::test_labels_are_announced",
    "tests/finetune/test_trainer.py::test_batches_depend_on_the_seed_alone",
    "tests/models/test_export.py::"
    "test_a_trace_of_a_loss_takes_other_labels[T5ForConditionalGeneration]",
    "tests/models/test_graphs.py::test_one_graph_in_every_class[EsmForMaskedLM-inference]",
    "tests/models/test_graphs.py::test_one_graph_in_every_class[ModernBertModel-inference, unpad]",
    "tests/models/test_hf.py::test_compiled_once_for_all_masks_of_a_shape[bert]",
    "tests/models/test_integration.py::test_a_model_on_the_meta_device[bert]",
    "tests/models/test_padding.py::test_explain_says_why_padding_is_kept[length]",
    "tests/models/test_transforms.py::"
    "test_torch_export_keeps_operators_unless_told_otherwise[BertForSequenceClassification]",
    "tests/models/test_integration.py::"
    "test_compiled_once_for_all_batches_of_a_shape[BertForMaskedLM-30]",
    "tests/nn/test_mlm_head.py::test_the_modules_do_not_import_transformers",
    "tests/ops/test_attention.py::test_length_classes_with_a_bias[cpu-130-dense-cpp]",
    "tests/ops/test_attention.py::test_property[cpp]",
    "tests/ops/test_bias_gelu.py::test_many_rows[cpu-cpp]",
    "tests/ops/test_replaced_token_loss.py::test_rows_of_many_parts[cpu-3 parts-mean-fp32]",
    "tests/pretrain/test_dry_run.py::test_a_dry_run_reads_the_beginning",
    "tests/pretrain/test_every_arch.py::test_further_endings[bert-tiny]",
    "tests/ptx/test_barriers.py::test_a_barrier_that_is_left_out_is_seen[gather_rows-80]",
    "tests/run/test_folder.py::test_overwrite_moves",
    "tests/run/test_interrupt.py::test_handlers_are_set_back",
    "tests/run/test_trainer.py::test_evaluation_does_not_change_the_log",
    "tests/run/test_trainer.py::test_labels_of_pairs_for_a_model_without_a_head_for_them",
    "tests/study/test_study.py::test_a_cell_that_fails_is_named",
    "tests/test_bad_inputs.py::"
    "test_kinds_are_checked_where_a_call_is_compiled[attention-is_causal-yes]",
    "tests/test_graphs.py::test_what_changes_is_not_replayed_as_it_was[set_rate_tensor]",
    "tests/test_ops.py::test_rows_that_are_chosen_in_the_graph_need_one_graph[cpu-attention-auto]",
    "tests/test_outputs.py::test_a_link_stays_and_its_folder_is_moved",
    "tests/test_public_api.py::test_info_in_short",
)


def _named_by_planted_bugs() -> dict[str, list[str]]:
    """By file, the expressions that pytest's ``-k`` has for it; an empty one is the whole file."""
    found: dict[str, list[str]] = {}
    for file, *options in (shlex.split(mutation.tests) for mutation in MUTATIONS):
        if "slow" not in options:
            found.setdefault(file, []).append(options[-1] if options else "")
    return found


def _matches(expression: str, name: str) -> bool:
    """As ``-k`` does: words that the name of a test has, with and, or, not and brackets."""
    words = re.sub(
        r"\b(?!(?:and|or|not)\b)[\w-]+", lambda word: str(word[0].lower() in name), expression
    )
    return not expression or eval(words)


def chosen(names: Iterable[str]) -> set[str]:
    """Those of the names of tests (file::function[case]) that are quick."""
    functions: dict[str, list[str]] = {}
    for name in (name for name in names if not name.startswith(OF_SLOW_LANE)):
        functions.setdefault(name.split("[")[0], []).append(name)
    functions = {
        function: cases
        for function, cases in functions.items()
        if not function.startswith(THOROUGH)
    }
    found = {cases[len(cases) // 2] for cases in functions.values()}
    bugs = _named_by_planted_bugs()
    for function, cases in functions.items():
        for expression in bugs.get(function.split("::")[0], ()):
            found.update(case for case in cases if _matches(expression, case.lower()))
    return found
