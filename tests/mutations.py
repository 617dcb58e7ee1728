"""Plants bugs, one at a time, and names the test that catches each: ``python tests/mutations.py``.

The tree is copied to a scratch folder, so that nothing here changes. First every selection of tests
must pass there without a bug. ``--csrc`` plants the bugs of csrc/, which need a new build of the
extension. Bugs of one group share a build, as different selections test them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]


class Mutation(NamedTuple):
    file: str
    old: str
    new: str
    tests: str  # pytest's arguments; with `-m slow` among them, slow tests
    group: int = 0  # bugs of csrc/ in one group share a build
    level: str = ""  # of vector instructions, where other levels have no such bug


WATCH = "fastplm/models/_watch.py"
CALL = "fastplm/models/_frozen_encoder.py"
STEP = "fastplm/models/_frozen_decoder.py"
FROZEN = "tests/models/test_freeze.py -k"
STEPPED = "tests/models/test_frozen_decoder.py -k"
CALLED = "tests/models/test_frozen_encoder.py -k"
LINEAR = "tests/ops/test_linear.py -k"
INT8 = "tests/ops/test_linear_int8.py -k"
QUANTIZED = "tests/models/test_quantize.py -k"
CONTRACT = "tests/models/test_contract.py -k"
REPLACED = "tests/ops/test_replaced_token_loss.py -k"
EMBEDDED = "tests/ops/test_embedding_layer_norm.py -k"
EMBEDDING = "triton_kernels/embedding_layer_norm.py"
ACTIVATED = "tests/ops/test_bias_gelu.py -k"
ACTIVATION = "triton_kernels/bias_gelu.py"
BIAS = f"{ACTIVATED} 'cpp and shapes'"
ADDED = "csrc/layers/dropout_add_layer_norm.h"
DECODER = "csrc/layers/decoder.cpp"
DTYPES = "tests/compile/test_calls_of_csrc.py -k one_dtype"
MEMORY_BACK = "tests/compile/test_calls_of_csrc.py -k memory_back"
LAYER = "csrc/layers/layer.h"
FEW_ROWS = "csrc/gemm/linear_few_rows.h"
LOSS = "tests/ops/test_linear_cross_entropy.py -k"
HF = "fastplm/hf.py"
RAGGED = "fastplm/models/_ragged.py"
ROWS = "fastplm/nn/_rows.py"
CROSS = "fastplm/ops/_linear_cross_entropy_torch.py"
DISTILLED = "tests/ops/test_linear_distillation.py -k"
NORM = "triton_kernels/dropout_add_layer_norm.py"
OF_ROWS = "triton_kernels/_rows.py"
NORMED = "tests/ops/test_dropout_add_layer_norm.py -k"
DISTIL = "fastplm/ops/_linear_distillation_torch.py"
GIVEN = "triton_kernels/linear_distillation/given.py"
MAXSIM = "fastplm/ops/maxsim.py"
CONTRASTIVE = "fastplm/nn/contrastive.py"
COLLATE = "fastplm/data/_collate.py"
DISTILL_LOSSES = "fastplm/distill/losses.py"
DISTILL = "fastplm/distill/objectives.py"
DISTILLED_LOSSES = "tests/distill/test_losses.py -k"
DISTILLATION = "tests/distill/test_objectives.py -k"
PAIRS = "fastplm/data/pairs.py"
SCORE = "fastplm/inference/score.py"
SCORES = "tests/inference/test_score.py -k"

MUTATIONS = (
    # --- ops: dropout_add_layer_norm
    *(
        Mutation(OF_ROWS, old, new, f"{NORMED} {cases}")
        for old, new, cases in (
            ("zero + (sample >> 32).to(tl.uint32)", "zero", "exactly"),
            ("at += tl.load(position_ptr", "tl.load(position_ptr", "exactly"),
            ("(i * PART // 8 + draw) << 4", "draw << 4", "exactly"),
            ("place // 16 + lane // 16", "place // 16", "exactly"),
            ("(half >= threshold)", "(half > threshold)", "the_threshold"),
            ("if (i + 1) * PART > WIDTH:", "if False:", "shapes"),
        )
    ),
    *(
        Mutation(NORM, old, new, f"{NORMED} {cases}")
        for old, new, cases in (
            ("rstd = tl.where(exists, rstd, 0.0)", "rstd = rstd", "where_no_row"),
            ("dz += dsum[i].to(tl.float32)", "dz += 0.0", "gradient_of_the_sum"),
            (
                "mean = tl.sum(total, 1) / WIDTH\n        new",
                "mean = 0 * rstd\n        new",
                "shapes",
            ),
            ("z = z + (z_i,)", "z = z + (x_i + residual[i].to(tl.float32),)", "dtypes"),
            ("ptrs + 2 * WIDTH", "ptrs + WIDTH", "shapes"),
        )
    ),
    Mutation(
        "fastplm/_autograd.py",
        "if all(place is None or arguments[place] is None for place in self.further):",
        "if True:",
        f"{NORMED} gradient_of_the_sum",
    ),
    # --- ops: attention
    Mutation(
        "triton_kernels/attention/backward.py",
        "            p = tl.where(pairs_allowed(head, at_k < head.length_k, at_q, at_k), p, 0.0)\n",
        "            pass\n",
        "tests/ops/test_attention.py -k 'triton and dense_masks'",
    ),
    Mutation(
        "triton_kernels/attention/backward.py",
        "attn_mask.ptr + b * attn_mask.stride_b + h * attn_mask.stride_h",
        "attn_mask.ptr + b * attn_mask.stride_h + h * attn_mask.stride_b",
        "tests/ops/test_attention.py -m slow -k 'triton and lengths_with_a_dense_mask'",
    ),
    # --- ops: bias_gelu
    Mutation(ACTIVATION, "db += tl.sum(s, 0)", "db = tl.sum(s, 0)", f"{ACTIVATED} groups"),
    Mutation(ACTIVATION, "(p + z * slope)", "p", f"{ACTIVATED} without_a_bias"),
    Mutation(
        ACTIVATION, "tl.where(z < 0.0, q, 1.0 - q)", "1.0 - q", f"{ACTIVATED} 'magnitude and fp16'"
    ),
    Mutation(ACTIVATION, "tl.where(u < 0.0, e * r, r)", "r", f"{ACTIVATED} 'magnitude and tanh'"),
    # --- ops: embedding_layer_norm
    Mutation(
        EMBEDDING,
        "if begins:\n            _add",
        "if True:\n            _add",
        f"{EMBEDDED} by_their_ids",
    ),
    Mutation(EMBEDDING, "(ids == last_id) &", "(ids >= last_id) &", f"{EMBEDDED} by_their_ids"),
    Mutation(EMBEDDING, "& (id != padding_idx)", "", f"{EMBEDDED} padding"),
    Mutation(
        EMBEDDING, "(types == 0)[:, None]", "(types >= 0)[:, None]", f"{EMBEDDED} large_offset"
    ),
    Mutation(EMBEDDING, 'float("nan"))  # a wrong', "0.0)  # a wrong", f"{EMBEDDED} gives_nan"),
    Mutation(
        "fastplm/ops/embedding_layer_norm.py",
        "low < 0 or high >= rows",
        "high >= rows",
        f"{EMBEDDED} does_not_have",
    ),
    # --- ops: gather_rows
    # --- ops: maxsim
    Mutation(
        MAXSIM,
        "match_k = torch.where(later.bool(), match, match_k)",
        "match_k = match",
        "tests/ops/test_maxsim.py -k several_tiles",
    ),
    Mutation(
        MAXSIM,
        "torch.cat([index[:queries] + queries, index[queries:]])",
        "torch.cat([index[:queries], index[queries:]])",
        "tests/ops/test_maxsim.py -m slow -k 'shapes and torch'",
    ),
    Mutation(
        MAXSIM,
        "torch.cat([_wide(query), _wide(key)]).masked_fill_(alone[:, None], 0.0)",
        "torch.cat([_wide(query), _wide(key)])",
        "tests/ops/test_maxsim.py -m slow -k 'shapes and torch'",
    ),
    Mutation(
        MAXSIM,
        "total.sub_(rows.mul_(along)).mul_(scale)",
        "total.mul_(scale)",
        "tests/ops/test_maxsim.py -m slow -k 'shapes and torch'",
    ),
    Mutation(
        "triton_kernels/maxsim.py",
        "tl.where(later, start + at, place)",
        "tl.where(later, at, place)",
        "tests/ops/test_maxsim.py -m slow -k 'shapes and triton'",
    ),
    Mutation(
        "triton_kernels/maxsim.py",
        "return (other > best) |",
        "return (other >= best) |",
        "tests/ops/test_maxsim.py -k 'first_row and triton'",
    ),
    # --- nn: contrastive
    Mutation(
        CONTRASTIVE,
        "share[:, 0] -= used[:, 0].to(loss.dtype)",
        "pass",
        "tests/nn/test_contrastive.py -k all_similarities",
    ),
    Mutation(
        CONTRASTIVE,
        "torch.where(positive >= 0, first[positive.clamp(min=0)], -1)",
        "positive",
        "tests/nn/test_contrastive.py -k all_similarities",
    ),
    Mutation(
        CONTRASTIVE,
        "reverse = self._find(scaled, query, pair, query_id, weight.flatten())",
        "reverse = self._find(scaled, query, pair, query_id)",
        "tests/nn/test_contrastive.py -k all_similarities",
    ),
    # --- ops: losses
    Mutation(
        CROSS,
        "inside = (column >= 0) & (column < chunk.shape[1])",
        "inside = (column >= 0) & (column <= chunk.shape[1])",
        f"{LOSS} 'chunks_and_splits and torch'",
    ),
    Mutation(
        CROSS,
        "log_probability.expm1() + (call.label_smoothing - call.label_smoothing / vocab)",
        "log_probability.expm1() + call.label_smoothing",
        f"{LOSS} 'chunks_and_splits and torch'",
    ),
    Mutation(
        CROSS,
        "statistics.l_i = ((m_c - statistics.m_i).exp() * l_c).sum(0)",
        "statistics.l_i = l_c.sum(0)",
        f"{LOSS} 'chunks_and_splits and torch'",
    ),
    Mutation(
        CROSS,
        "linear_weight[tile].to(dtype).to(rows.dtype)",
        "linear_weight[tile].to(rows.dtype)",
        "tests/test_ops.py -k 'autocast_without'",
    ),
    Mutation(
        CROSS,
        "likeliest.append(logits.argmax(1) + start)",
        "likeliest.append(logits.argmax(1))",
        f"{LOSS} 'argmax and torch'",
    ),
    Mutation(
        DISTIL,
        "scale = call.distillation_weight * call.temperature",
        "scale = call.distillation_weight",
        f"{DISTILLED} 'temperatures and torch'",
    ),
    Mutation(
        DISTIL,
        "mean = _sum_of_tiles(weight * l_c / l_i, mean_c - shift)",
        "mean = _sum_of_tiles(weight * l_c / l_i, mean_c)",
        f"{DISTILLED} 'temperatures and torch'",
    ),
    Mutation(
        DISTIL,
        "divergence = call.beta * teacher + (1 - call.beta) * student",
        "divergence = call.beta * student + (1 - call.beta) * teacher",
        f"{DISTILLED} 'temperatures and torch'",
    ),
    Mutation(
        DISTIL,
        "group = slice(here.start, here.start + teacher.shape[0])",
        "group = slice(0, teacher.shape[0])",
        f"{DISTILLED} 'temperatures and torch'",
    ),
    Mutation(
        "triton_kernels/linear_distillation/tiles.py",
        "shift = (by - (finite(new) - finite(old))) *",
        "shift = by *",
        f"{DISTILLED} 'temperatures and triton'",
    ),
    Mutation(
        "triton_kernels/linear_distillation/tiles.py",
        "(setting.cross_entropy_weight * row.one_over_hard_l)[:, None]",
        "(setting.cross_entropy_weight * row.one_over_l)[:, None]",
        f"{DISTILLED} 'temperatures and triton'",
    ),
    Mutation(
        "triton_kernels/linear_distillation/forward.py",
        "total += moved(total_s, l_s, m_s, m_new, rise, inverse)",
        "total += total_s",
        f"{DISTILLED} 'temperatures and triton'",
    ),
    Mutation(
        GIVEN,
        "rest += total * (finite(m_new) - finite(m)) * inverse_temperature",
        "rest += 0.0",
        f"{DISTILLED} 'given_probabilities and triton'",
    ),
    Mutation(
        GIVEN,
        "here = (p != 0.0) & (index >= start_v)",
        "here = (index >= start_v)",
        f"{DISTILLED} 'given_probabilities and triton'",
    ),
    Mutation(
        GIVEN,
        "d -= (distillation_scale * total)[None, :]",
        "d = 0.0 - (distillation_scale * total)[None, :]",
        f"{DISTILLED} 'given_probabilities and triton'",
    ),
    Mutation(
        GIVEN,
        'tl.where(known | (p == 0.0), p, float("nan"))',
        "p",
        f"{DISTILLED} 'index_outside and triton'",
    ),
    # --- nn
    Mutation(
        ROWS,
        "labels.new_full((1,), IGNORE_INDEX)",
        "labels.new_full((1,), 0)",
        f"{CONTRACT} given_positions",
    ),
    Mutation(
        ROWS,
        "bias = own.bias + bias",
        "bias = own.bias",
        "tests/models/test_bart.py -k bias_of_its_own",
    ),
    Mutation(
        ROWS,
        "(labels != IGNORE_INDEX).sum() / as_normalizer(num",
        "labels.numel() / as_normalizer(num",
        "tests/models/test_bert.py -k next_sentence_shares",
    ),
    Mutation(
        ROWS,
        "return tensor.masked_fill(tensor == 0, 1.0)",
        "return tensor",
        "tests/models/test_bert.py -k no_pair_labelled",
    ),
    Mutation(
        "fastplm/nn/attention.py",
        "torch.cat((past_key, key), 2), torch.cat((past_value, value), 2)",
        "torch.cat((key, past_key), 2), torch.cat((value, past_value), 2)",
        "tests/nn/test_attention.py",
    ),
    # --- models
    Mutation(
        RAGGED,
        "key_mask = values_at(mask.flatten(), positions) & (positions >= 0)",
        "key_mask = None",
        f"{CONTRACT} 'equals and (DoubleHeads or Multiple)'",
    ),
    Mutation(
        ROWS,
        "(~mask).to(torch.uint8).argsort(stable=True)",
        "mask.to(torch.uint8).argsort(stable=True)",
        "tests/models/test_encoder.py -k look_at_values",
    ),
    Mutation(
        ROWS,
        "return order.masked_fill(~mask[order], -1)",
        "return order",
        "tests/models/test_encoder.py -k look_at_values",
    ),
    Mutation(
        RAGGED,
        "slots = positions.new_full((total + 1,), -1)",
        "slots = positions.new_full((total + 1,), 0)",
        "tests/models/test_electra.py -k sees_the_tokens_alone",
    ),
    Mutation(
        RAGGED,
        "F.pad(lengths.cumsum(0), (1, 0))",
        "F.pad(lengths.cumsum(0), (0, 1))",
        f"{CONTRACT} 'equals and BertForMaskedLM'",
    ),
    Mutation(
        RAGGED,
        "max_seqlen = int(lengths.max())",
        "max_seqlen = int(lengths.min())",
        f"{CONTRACT} 'equals and BertForMaskedLM'",
    ),
    Mutation(
        ROWS,
        "count = (targets != IGNORE_INDEX).sum()",
        "count = targets.numel()",
        f"{CONTRACT} either_loss",
    ),
    Mutation(
        "fastplm/models/_heads.py",
        "pair_loss = pair_loss * batch_share(labels, num_items_in_batch)",
        "pass",
        "tests/models/test_bert.py -k next_sentence_shares",
    ),
    Mutation(
        "fastplm/models/_gpt.py",
        "mc_loss = mc_loss * batch_share(labels, num_items_in_batch)",
        "pass",
        "tests/models/test_gpt2.py -k accumulated",
    ),
    # --- data
    Mutation(
        COLLATE,
        "torch.arange(width, device=ids.device) < per_row[:, None]",
        "torch.arange(width, device=ids.device) <= per_row[:, None]",
        "tests/data/test_collators.py",
    ),
    Mutation(
        COLLATE,
        "flat = positions.new_full((input_ids.numel() + 1,), -100)",
        "flat = positions.new_full((input_ids.numel() + 1,), 0)",
        "tests/data/test_collators.py",
    ),
    Mutation(
        COLLATE,
        "hidden = (attention_mask == 0).long()",
        "hidden = (attention_mask != 0).long()",
        "tests/data/test_collators.py",
    ),
    Mutation(
        "fastplm/data/collators.py",
        'no_label = first | (tokens >= batch["cu_seq_lens_q"][-1])',
        'no_label = tokens >= batch["cu_seq_lens_q"][-1]',
        "tests/data/test_collators.py",
    ),
    Mutation(
        "fastplm/data/collators.py",
        "return inside if maskable is None else maskable & inside",
        "return inside",
        "tests/data/test_collators.py",
    ),
    Mutation(
        "fastplm/data/words.py",
        "return ((codes & before) == 0).cumsum(-1)",
        "return ((codes & before) != 0).cumsum(-1)",
        "tests/data/test_words.py",
    ),
    Mutation(
        PAIRS,
        "types[separator + 1 :] = 1",
        "types[separator:] = 1",
        "tests/data/test_pairs.py",
    ),
    Mutation(
        PAIRS,
        "return pair[1], pair[0]",
        "return pair",
        "tests/data/test_pairs.py",
    ),
    Mutation(
        PAIRS,
        "from_second += rest - rest // 2\n    from_first += rest // 2",
        "from_first += rest - rest // 2\n    from_second += rest // 2",
        "tests/data/test_pairs.py",
    ),
    Mutation(
        PAIRS,
        "if self.cuts_a_lone_sentence else stop",
        "if True else stop",
        "tests/data/test_pairs.py",
    ),
    # --- pre-training: presets, FLOPs, objectives
    Mutation(
        "fastplm/pretrain/presets.py",
        "self.rate * (samples / self.samples) ** 0.5",
        "self.rate * (samples / self.samples)",
        "tests/pretrain/test_presets.py",
    ),
    Mutation(
        "fastplm/pretrain/presets.py",
        '"roberta": Family("bytelevel", 50265',
        '"roberta": Family("bytelevel", 30522',
        "tests/pretrain/test_presets.py",
    ),
    Mutation(
        "fastplm/run/flops.py",
        "pairs = _triangles(lengths) if getattr",
        "pairs = _squares(lengths) if getattr",
        "tests/pretrain/test_objectives.py -k 'left_to_right and bert'",
    ),
    Mutation(
        "fastplm/run/budget.py",
        "int(self.flops // (self.stages * flops_a_step)) * self.stages",
        "int(self.flops // flops_a_step)",
        "tests/pretrain/test_stream.py -k budget_of_two_stages",
    ),
    Mutation(
        "fastplm/pretrain/settings.py",
        '"temperature": self.temperature,',
        '"temperature": 1.0,',
        "tests/pretrain/test_objectives.py -k electra_learns",
    ),
    Mutation(
        "fastplm/pretrain/model.py",
        "theirs.is_decoder = ours.is_decoder",
        "pass",
        "tests/pretrain/test_model.py -k second_stage",
    ),
    Mutation(
        "fastplm/pretrain/evaluate.py",
        "kinds = np.maximum(different[first], 1)",
        "kinds = np.maximum(different[second], 1)",
        "tests/pretrain/test_evaluate.py -k ngram",
    ),
    Mutation(
        "fastplm/run/checkpoint.py",
        'argument == "generator" or (where in _LANGUAGE_MODELS and joint.detects)',
        "where in _LANGUAGE_MODELS and joint.detects",
        "tests/run/test_checkpoint.py -k joint_checkpoint",
    ),
    Mutation(
        "fastplm/run/folder.py",
        "old = [] if keep is None else before",
        "old = before[:-1] if keep is None else before",
        "tests/pretrain/test_stream.py -k are_kept",
    ),
    Mutation(
        "fastplm/run/flops.py",
        "return sum(length * (length + 1) // 2 for length in lengths)",
        "return sum(length * length for length in lengths)",
        "tests/run/test_flops.py",
    ),
    Mutation(
        "fastplm/run/flops.py",
        "(_TRAINED if stage is None else _FROZEN) * filled",
        "_TRAINED * filled",
        "tests/run/test_flops.py",
    ),
    Mutation(
        "fastplm/run/optimizer.py",
        "return (least / max(step + 1, least)) ** 0.5",
        "return (least / max(step, least)) ** 0.5",
        "tests/run/test_optimizer.py",
    ),
    Mutation(
        "fastplm/run/losses.py",
        '_PAIR_LOGITS = ("seq_relationship_logits", "sop_logits")',
        '_PAIR_LOGITS = ("seq_relationship_logits",)',
        "tests/pretrain/test_evaluate.py",
    ),
    # --- fine-tuning: rates, scores, pairs, teachers, mixtures
    Mutation(
        "fastplm/finetune/run.py",
        "prepare_task(rates[0][1], choosing=True)",
        "self.task",
        "tests/finetune/test_run.py -k best_rate",
    ),
    Mutation(
        "fastplm/finetune/layers.py",
        "decay ** (top - depth)",
        "decay ** (top - 1 - depth)",
        "tests/finetune/test_layers.py -k rates_by_layer",
    ),
    Mutation(
        "fastplm/finetune/tasks/segments.py",
        "while other.group == example.group:",
        "while other is example:",
        "tests/finetune/tasks/test_segments.py -k 'pairs_of_text and nsp'",
    ),
    Mutation(
        "fastplm/finetune/metrics.py",
        '(this != kind or before in "ES")',
        "(not kind)",
        "tests/finetune/test_metrics.py -k by_hand",
    ),
    Mutation(
        "fastplm/finetune/metrics.py",
        "scorer.score_multi(right, text)",
        "scorer.score(right[0], text)",
        "tests/finetune/test_metrics.py -k several_references",
    ),
    Mutation(
        "fastplm/finetune/losses.py",
        ".sum(-1) * temperature**2",
        ".sum(-1)",
        "tests/finetune/test_losses.py -k predictions_of_the_teacher",
    ),
    Mutation(
        "fastplm/finetune/teacher.py",
        "found = [tuple(x[..., order] for x in each) for each in found]",
        "pass",
        "tests/finetune/test_teacher.py -m slow -k student_of_a_run",
    ),
    Mutation(
        "fastplm/finetune/mixture.py",
        "part[(epoch * count + i) % len(part)]",
        "part[i]",
        "tests/finetune/test_mixture.py -k cap_reads",
    ),
    Mutation(
        "fastplm/pretrain/stream.py",
        "return torch.cuda.is_available() and able and",
        "return torch.cuda.is_available() and",
        "tests/pretrain/test_stream.py -k without_cuda_code",
    ),
    Mutation(
        "fastplm/data/stream.py",
        "drawn = index // self.size % self.copies * self.size + element",
        "drawn = index // self.size * self.size + element",
        "tests/pretrain/test_objectives.py -k static_masks_come",
    ),
    Mutation(
        "fastplm/models/electra_joint.py",
        "advantages = rewards - F.softplus(-logits.detach())",
        "advantages = rewards - F.softplus(logits.detach())",
        "tests/models/test_electra_joint.py -k 'definition and adversarial'",
    ),
    Mutation(
        "fastplm/models/electra_joint.py",
        "rows * hotter,",
        "rows,",
        "tests/models/test_electra_joint.py -k 'definition and adversarial'",
    ),
    Mutation(
        "fastplm/data/stream.py",
        "permute(samples % size, size, seed, samples // size)",
        "permute(samples % size, size, seed, samples % size)",
        "tests/data/test_stream.py",
    ),
    Mutation(
        "fastplm/data/packing.py",
        "ids[ends - 1] = self.sep_token_id",
        "ids[ends - 2] = self.sep_token_id",
        "tests/data/test_packing.py",
    ),
    Mutation(
        "fastplm/data/span_corruption.py",
        "(column < corrupted.input_lengths[:, None]).long()",
        "(column <= corrupted.input_lengths[:, None]).long()",
        "tests/data/test_span_corruption.py",
    ),
    # --- csrc, a build for each group
    Mutation(
        "csrc/gemm/linear_in_place.h",
        "columns % (2 * kQuadColumns) == 0 && depth % kQuad == 0;\n  return",
        "depth % kQuad == 0;\n  return",
        "tests/ops/test_linear.py -k long_slices",
        1,
        "avx2",
    ),
    Mutation(
        "csrc/index/mask_tokens.h",
        "total_ += n <= max_ngram ? kMultiple / n : 0;",
        "total_ += n <= max_ngram ? kMultiple : 0;",
        "tests/ops/test_mask_tokens.py",
        1,
    ),
    Mutation(
        "csrc/index/bart_noise.h",
        "id += special_ids[i] <= id;",
        "id += special_ids[i] < id;",
        "tests/ops/test_bart_noise.py",
        1,
    ),
    Mutation(
        "csrc/index/corrupt_spans.h",
        "const int64_t room = least(noise, n - noise);",
        "const int64_t room = noise;",
        "tests/ops/test_corrupt_spans.py",
        1,
    ),
    Mutation(
        "csrc/index/index.h",
        "if (left > 0) rooms.put(left, true);",
        "rooms.put(left, left > 1);",
        "tests/data/test_index.py",
        1,
    ),
    Mutation(
        "csrc/index/gather_rows.cpp",
        "std::memset(to + slot * row_bytes, 0, row_bytes);",
        "std::memcpy(to + slot * row_bytes, from, row_bytes);",
        "tests/ops/test_gather_rows.py -k cpp",
        1,
    ),
    Mutation(
        "csrc/index/mask_tokens.h",
        "const int64_t quota = wanted < call.capacity ? wanted : call.capacity;",
        "const int64_t quota = wanted;",
        "tests/ops/test_mask_tokens.py",
        2,
    ),
    Mutation(
        "csrc/index/bart_noise.h",
        "word >= span_below.bounds[length]",
        "word >= span_below.bounds[length] / 4 * 5",
        "tests/ops/test_bart_noise.py",
        2,
    ),
    Mutation(
        "csrc/index/corrupt_spans.h",
        "if (of.spans == 0 && of.kept == 1) output[0] = tokens[0];",
        "",
        "tests/ops/test_corrupt_spans.py",
        2,
    ),
    Mutation(
        "csrc/index/index.h",
        "if (tokens(begin, end) >= 2) {",
        "if (tokens(begin, end) >= 1) {",
        "tests/data/test_index.py",
        2,
    ),
    Mutation(
        "csrc/index/gather_rows.cpp",
        "std::memcpy(out, from + by_row.slots[begin] * stride, row_bytes);",
        "std::memcpy(out, from + begin * stride, row_bytes);",
        "tests/ops/test_gather_rows.py -k cpp",
        2,
    ),
    Mutation(
        "csrc/common/philox.h",
        "key1 += 0xBB67AE85;",
        "key1 += 0xBB67AE86;",
        "tests/ops/test_mask_tokens.py",
        3,
    ),
    Mutation(
        "csrc/index/select.h",
        "if (before <= budget && budget < before + inside) {",
        "if (before < budget && budget <= before + inside) {",
        "tests/ops/test_corrupt_spans.py",
        4,
    ),
    Mutation(
        "csrc/index/select.h",
        "emit(first + __builtin_ctzll(bits), found++);",
        "emit(first + __builtin_ctzll(bits), found), found += 2;",
        "tests/ops/test_mask_tokens.py",
        5,
    ),
    Mutation(
        "csrc/attention/attention.h",
        "std::min(seen_, i + shift_ + 1)",
        "std::min(seen_, i + shift_)",
        "tests/ops/test_attention.py -k 'cpp and every_combination'",
        1,
    ),
    Mutation(
        "csrc/layers/replaced_token_loss.h",
        "slope[row] = factor[i];",
        "slope[row] = -factor[i];",
        f"{REPLACED} 'shapes and cpp'",
        2,
    ),
    Mutation(
        "csrc/attention/attention.h",
        "add_by_key(begun, keys, rows, ds, query_, dk);",
        "add_by_key(0, keys, rows, ds, query_, dk);",
        "tests/ops/test_attention.py -k cpp",
        2,
    ),
    Mutation(
        "csrc/attention/attention.h",
        "none = all_masked;",
        "none = false;",
        "tests/ops/test_attention.py -k 'cpp and dense_mask'",
        1,
    ),
    Mutation(
        "csrc/layers/replaced_token_loss.cpp",
        "divisor = divisor == 0.0f ? 1.0f : divisor;",
        "",
        f"{REPLACED} 'no_row_counts and cpp'",
        3,
    ),
    Mutation("csrc/gemm/linear_in_place.h", "k > 0, out", "false, out", f"{LINEAR} few_rows", 6),
    Mutation(
        "csrc/gemm/linear_product.h",
        "other = 1; other < slices",
        "other = 2; other < slices",
        f"{LINEAR} few_rows",
        6,
    ),
    Mutation(
        "csrc/common/tensors.h", "== expected) return;", "== expected || true) return;", DTYPES, 2
    ),
    Mutation(
        "csrc/common/shapes.h",
        "if (size < 0 || size != known)",
        "if (size < 0)",
        "tests/compile/test_calls_of_csrc.py -k memory_of_its_tensors",
        4,
    ),
    Mutation(
        "csrc/common/scratch.h",
        "floats <= kMostOfThread ? of_thread() : new_",
        "of_thread()",
        MEMORY_BACK,
        3,
    ),
    Mutation(
        FEW_ROWS,
        "Depth>(a.at(0) + k",
        "Depth>(a.at(0)",
        f"{LINEAR} few_rows",
        6,
    ),
    Mutation("csrc/gemm/linear_int8.h", "-128 * sum;", "-127 * sum;", f"{INT8} bit_for_bit", 3),
    Mutation("csrc/gemm/linear_int8.h", "    sum += quantum;\n", "", f"{INT8} bit_for_bit", 4),
    Mutation(DECODER, "to(1), to(2), qkv", "to(2), to(1), qkv", f"{STEPPED} error", 6),
    Mutation(LAYER, "scale), bias_of(i)", "scale), nullptr", f"{STEPPED} 8_bits", 6),
    Mutation(DECODER, "scores[t] : kMaskedScore", "scores[t] : 0.0f", f"{STEPPED} error", 6),
    Mutation(
        DECODER,
        "mid[i] *= factor[i]",
        "mid[i] += factor[i]",
        f"{STEPPED} error",
        6,
    ),
    Mutation(
        LAYER,
        "floats(*pair.scale),",
        "floats(*pairs[0]->scale),",
        f"{QUANTIZED} error_of_the_layers",
        4,
    ),
    Mutation(
        "fastplm/nn/linear_int8.py",
        "self.scale = scale.to(self.scale.device)",
        "pass",
        f"{QUANTIZED} 16_bits",
    ),
    Mutation(
        "fastplm/nn/linear_int8.py",
        "self._kept = None  # another",
        "pass  # another",
        f"{QUANTIZED} safetensors",
    ),
    Mutation(
        "fastplm/models/_quantize.py",
        "module._parameters[name].requires_grad_()",
        "pass",
        f"{QUANTIZED} kept_weights",
    ),
    Mutation(
        "fastplm/models/_quantize.py",
        "    inner.requires_grad_(False)",
        "",
        f"{QUANTIZED} training",
    ),
    Mutation("csrc/layers/gelu.h", "x * -0.5f", "x * -0.49f", f"{CALLED} error_is_that", 3),
    Mutation(
        "csrc/layers/encoder.cpp",
        "width, AddResidual{normed, width});",
        "width, AddResidual{query_input, width});",
        f"{CALLED} error_is_that",
        4,
    ),
    Mutation(
        "csrc/layers/encoder.cpp",
        "token.word == padding_id ? padding_id : ++counted",
        "++counted",
        f"{CALLED} from_ids_on",
        2,
    ),
    Mutation(
        "csrc/layers/encoder.cpp",
        "out + b * shown * width",
        "out + b * width",
        f"{CALLED} from_ids_on",
        1,
    ),
    Mutation(
        "csrc/layers/encoder.cpp",
        "padding_id, first_only || pool",
        "padding_id, pool",
        f"{CALLED} left_to_the_modules",
        2,
    ),
    Mutation(
        "csrc/layers/encoder.cpp",
        "if (query_input == x && of_key",
        "if (of_key",
        f"{CALLED} error_is_that",
        5,
    ),
    Mutation(
        "csrc/layers/rms_norm.h",
        "const float along = scale * scale * mean;",
        "const float along = scale * mean;",
        "tests/ops/test_rms_norm.py",
        4,
    ),
    Mutation("csrc/layers/bias_gelu.h", "grad_bias + i) + grad", "grad_bias + i)", BIAS, 2),
    Mutation("csrc/layers/gelu.h", "power * 0.398942280f", "power * 0.3988f", BIAS, 1),
    Mutation(ADDED, "first - before + i", "first + i", f"{NORMED} 'cpp and exactly'", 3),
    Mutation(ADDED, "- mean - normed * along", "- normed * along", f"{NORMED} 'cpp and wide'", 4),
    Mutation(ADDED, "grad = grad + load(grad_sum);", ";", f"{NORMED} 'cpp and of_the_sum'", 5),
    Mutation(
        "csrc/layers/dropout.h",
        "counter.z[lane] = static_cast<uint32_t>(static_cast<uint64_t>(sample) >> 32);",
        "counter.z[lane] = 0;",
        "tests/ops/test_dropout.py",
        5,
    ),
    Mutation(
        "fastplm/models/_ragged.py",
        "rows % seqlen",
        "rows",
        "tests/models/test_dropout.py",
    ),
    Mutation(
        "csrc/layers/dropout.h",
        "& 0xFFFF) - threshold) >> 31",
        "& 0xFFFF) - threshold - 1) >> 31",
        "tests/ops/test_dropout.py",
        5,
    ),
    # --- models: bugs that no test once caught
    Mutation(
        RAGGED,
        "        mask = mask.bool()\n        keep",
        "        keep",
        "tests/models/test_encoder.py -k any_dtype",
    ),
    *(
        Mutation(WATCH, old, new, f"{FROZEN} '{cases}'")
        for old, new, cases in (
            (
                '*("setdefault", "update", "move_to_end"),',
                '*("setdefault",),',
                "written_parameter",
            ),
            ('same = name == "__setitem__" and ', "same = ", "pop"),
            ("if vars(self).get(name, _NOTHING) is value:", "if True:", "eps or train"),
            ('        object.__setattr__(module, "__dict__", watched)\n', "", "shadowed"),
            ('or torch.is_autocast_enabled("cpu")', "", "autocast"),
            ("            or _has_global_hook()\n", "", "run_themselves"),
            ("or tuple(map(_RUNS, self.kinds)) != self.runs", "", "run_themselves"),
            ("            or _functions() != _FUNCTIONS\n", "", "run_themselves"),
            (
                "            torch.is_grad_enabled()\n            or ",
                "            ",
                "run_themselves",
            ),
            ("tuple(map(self.settings.get, _FLAGS)) != self.flags", "False", "configuration"),
            ("(kind_of(self),), dict(vars(self))", "(type(self),), dict(vars(self))", "copies"),
            ("weakref.ref(module)", "lambda: module", "kept_alive"),
            ("held.freeze = held.plan = None", "held.freeze = None", "kept_alive"),
            ('    body["__module__"] = ""', '    body["__module__"] = __name__', "as_before"),
            ('require(all(map(_records, hooks)), "there is a hook")', "", "left_is_said"),
            ('require(known, "the class', 'require(True, "the class', "patched_class"),
        )
    ),
    *(
        Mutation(CALL, old, new, f"{CALLED} {cases}")
        for old, new, cases in (
            ("if rows.key_mask is not None:", "if False:", "left_to_the_modules"),
            ("or not (_is_dense(packed) and _is_dense(last))", "", "unused_slots"),
            ("max(1, int(rows.count_nonzero()))", "rows.numel()", "asked_of_the_tokens"),
            ("return_dict is False or ", "", "tuple"),
            ("if not all(map(_is_dense_on_cpu, given)) or not", "if not", "wrong_input"),
        )
    ),
    *(
        Mutation(STEP, old, new, f"{STEPPED} {cases}")
        for old, new, cases in (
            ('require(len(kinds) == 1, "some of its products are in 8 bits")', "", "both_kinds"),
            ("type(layer) is DynamicLayer", "True", "of_its_own"),
            (' or any("update" in vars(each) for each in (cache, layer))', "", "of_its_own"),
            ("        and _updates() == _UPDATES\n", "", "of_its_own"),
        )
    ),
    Mutation(
        "fastplm/models/_encoder.py",
        "key_mask = mask.bool().flatten()[None]",
        "pass",
        "tests/models/test_encoder.py -k cannot_be_read",
    ),
    Mutation(
        "fastplm/models/_encoder.py",
        "key_mask = encoder_rows.key_mask_row()",
        "pass",
        "tests/models/test_t5.py -k holes",
    ),
    Mutation(
        ROWS,
        "return total / as_normalizer(count, rows.device)",
        "return total / count",
        f"{CONTRACT} without_labels",
    ),
    Mutation(
        "fastplm/models/_encoder.py",
        "return bool(self.config.is_decoder)",
        "return not self.config.is_decoder",
        f"{CONTRACT} 'equals and RobertaForCausalLM'",
    ),
    Mutation(HF, "causal = mask.dim() == 5", "causal = False", "tests/models/test_hf.py -k module"),
    Mutation(
        HF,
        'if attention == "own":',
        "if False:",
        "tests/models/test_survey.py -m slow -k 'a_sample and (mpnet or bloom or deberta)'",
    ),
    Mutation(
        HF,
        "value.dim() > 0 and value.is_floating_point()",
        "False",
        "tests/models/test_hf.py -k unsupported",
    ),
    Mutation(
        HF,
        "return mask.shape[3] == 0 or not torch.jit.is_tracing()",
        "return True",
        "tests/models/test_export.py -k several",
    ),
    Mutation(
        "fastplm/models/_base.py",
        "        if not IS_CHOSEN.get():\n            config =",
        "        if config._attn_implementation is None:\n            config =",
        "tests/models/test_padding.py",
    ),
    Mutation(
        "fastplm/models/dpr.py",
        "attention_mask.bool().to(torch.uint8).argmax(1)",
        "attention_mask.new_zeros(attention_mask.shape[0])",
        "tests/models/test_accelerate.py -k dpr",
    ),
    # --- inference
    Mutation(SCORE, "return places == scored", "return places >= scored", f"{SCORES} pseudo"),
    Mutation(
        SCORE,
        " & (places >= scored)",
        "",
        f"{SCORES} pseudo",
    ),
    Mutation(
        SCORE,
        "(added == 0).nonzero().flatten()",
        "torch.arange(len(ids))",
        f"{SCORES} 'pseudo and loop'",
    ),
    Mutation(
        "fastplm/inference/_encoder.py",
        "from fastplm.models._seq2seq import Stack",
        "from fastplm.models._seq2seq import Stack\nfrom fastplm.study.table import Table",
        "tests/test_layout.py -k laws_of_the_storeys",
    ),
    Mutation(
        "fastplm/_machine.py",
        "from fastplm import _extension",
        "from fastplm import _extension\nfrom fastplm.data.words import word_ids",
        "tests/test_layout.py -k laws_of_the_storeys",
    ),
    Mutation(SCORE, "*(first[1:] - 1), -1", "*first[1:], -1", f"{SCORES} batches_hold"),
    Mutation(
        SCORE,
        "np.repeat(np.cumsum(counts) - counts, counts)",
        "np.repeat(np.cumsum(counts), counts)",
        f"{SCORES} batches_hold",
    ),
    Mutation(
        SCORE,
        "= labels[:, 1:].to(model.device)",
        "= labels[:, :-1].to(model.device)",
        f"{SCORES} decoder",
    ),
    Mutation(SCORE, "        finish()\n    names", "    names", f"{SCORES} pseudo"),
    Mutation(SCORE, "        rows.clear()\n", "", f"{SCORES} several_batches"),
    Mutation(SCORE, "sum(map(len, rows)) >= _HEAD_ROWS", "True", f"{SCORES} several_batches"),
    Mutation(
        "fastplm/inference/_batches.py",
        "module.training = False",
        "pass",
        f"{SCORES} in_training",
    ),
    Mutation(
        "fastplm/inference/embed.py",
        "make_room(of_words)",
        "pass",
        "tests/inference/test_embed.py -k command",
    ),
    Mutation(
        "fastplm/inference/embed.py",
        "totals = self.counts * (self.counts + 1) // 2",
        "totals = self.counts",
        "tests/inference/test_embed.py",
    ),
    Mutation(
        "fastplm/inference/bertscore.py",
        "last[i] >= end",
        "last[i] > end",
        "tests/inference/test_bertscore.py -k encoded_once",
    ),
    Mutation(
        "fastplm/inference/prompt.py",
        "(*ids, *tokens[:-1]), source), len(ids) - 1",
        "(*ids, *tokens[:-1]), source), len(ids)",
        "tests/inference/test_prompt.py -k parent",
    ),
    Mutation(
        "fastplm/inference/_checkpoint.py",
        "expected, bf16, part=part)",
        "expected, bf16, lambda model, name: True, part=part)",
        "tests/inference/test_score_command.py -k one_line",
    ),
    Mutation(
        "fastplm/inference/_batches.py",
        "(most_positions(config), tokenizer.model_max_length)",
        "(None, tokenizer.model_max_length)",
        "tests/inference/test_batches.py",
    ),
    Mutation(
        ROWS,
        """    if reduction == "none":
        normalizer = None
""",
        "",
        f"{CONTRACT} loss_of_each",
    ),
    # --- distillation
    Mutation(
        DISTILL_LOSSES,
        "distance, grad = distance.where(inside, 0), grad.where(inside[..., None], 0)",
        "pass",
        f"{DISTILLED_LOSSES} relations",
    ),
    Mutation(
        DISTILL_LOSSES,
        "student, teacher = student.where(keys, lowest), teacher.where(keys, lowest)",
        "pass",
        f"{DISTILLED_LOSSES} relations",
    ),
    Mutation(
        DISTILL_LOSSES,
        "first.shape[-1] ** 0.5\n\n\ndef _relation",
        "1\n\n\ndef _relation",
        f"{DISTILLED_LOSSES} relations",
    ),
    Mutation(
        DISTILL_LOSSES,
        "(grad @ b, grad.transpose(-1, -2) @ a)",
        "(grad @ b, grad @ a)",
        f"{DISTILLED_LOSSES} relations",
    ),
    Mutation(
        DISTILL_LOSSES,
        "return _sum(crossed - own, mask) * temperature**2",
        "return _sum(crossed - own, mask)",
        f"{DISTILLED_LOSSES} detections",
    ),
    Mutation(
        DISTILL,
        "parts = self.parts(student, teacher, None if whole else batch.mask)",
        "parts = self.parts(student, teacher, None)",
        f"{DISTILLATION} tinybert",
    ),
    Mutation(
        DISTILL,
        "teacher.hidden_states[index + 1]",
        "teacher.hidden_states[index]",
        f"{DISTILLATION} tinybert",
    ),
    Mutation(
        DISTILL,
        "layer = self.settings.teacher_layer or len(layers_of(self.teacher))",
        "layer = len(layers_of(self.teacher))",
        f"{DISTILLATION} minilm",
    ),
    Mutation(
        "fastplm/finetune/features.py",
        "return states.masked_fill(~kept, 0).sum(1) / kept.sum(1).clamp(min=1)",
        "return states.mean(1)",
        f"{DISTILLATION} multilingual",
    ),
    Mutation(
        DISTILL, "joint.config.stage = 2", "joint.config.stage = None", f"{DISTILLATION} electra"
    ),
    Mutation(
        "fastplm/distill/run.py",
        'return self._in_step["num_tokens_in_batch"]',
        "return None",
        "tests/distill/test_run.py -k accumulated -m slow",
    ),
    Mutation(
        "fastplm/distill/run.py",
        'name: None if path is None else f"files whose hash is {hash_of_model(path)}"',
        "name: None",
        "tests/distill/test_run.py -k resumed -m slow",
    ),
    Mutation(
        "fastplm/distill/models.py",
        "new[target] = old[source]",
        "pass",
        "tests/distill/test_models.py -k vocabularies",
    ),
)


def scratch_copy(folder: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    )
    built = [str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "fastplm").glob("_C*")]
    for name in (*listed.stdout.split("\n"), *built):
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
    # An installation has the kernels there. Python searches the working directory first.
    (folder / "fastplm" / "triton_kernels").symlink_to("../triton_kernels")


def run_tests(folder: Path, tests: str, level: str = "") -> str:
    """The first test that fails, or nothing."""
    command = f"{sys.executable} -m pytest -x -q -p no:cacheprovider"
    command += f" -m 'not gpu and not slow' {tests}"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"ATEN_CPU_CAPABILITY": level} if level else {}
    found = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True
    )
    if found.returncode == 0:
        return ""
    if found.returncode >= 128:  # killed by a signal
        crashed = re.search(r"tests/\S+, line \d+ in test_\w+", found.stderr.replace('"', ""))
        return f"a crash: {crashed[0] if crashed else 'somewhere'}"
    if "ImportError while loading conftest" in found.stderr + found.stdout:
        return "an error at import"
    if found.returncode not in (1, 2):
        raise SystemExit(f"{command}\n{found.stdout}{found.stderr}")
    failed = re.search(r"^(?:FAILED|ERROR) ([^\n]*?)(?: - |$)", found.stdout, re.M)
    return failed[1] if failed else "an error at collection"


def plant(folder: Path, mutation: Mutation) -> None:
    path = folder / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise SystemExit(f"{mutation.file}: {mutation.old!r} is there {text.count(mutation.old)}x")
    path.write_text(text.replace(mutation.old, mutation.new))


def restore(folder: Path, mutation: Mutation) -> None:
    shutil.copy2(REPOSITORY / mutation.file, folder / mutation.file)


def build(folder: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(command, cwd=folder, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csrc", action="store_true", help="those of csrc/, which are built")
    parser.add_argument("--only", default="", help="those whose file has this in its name")
    arguments = parser.parse_args()
    chosen = [m for m in MUTATIONS if bool(m.group) == arguments.csrc and arguments.only in m.file]
    survived = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scratch_copy(folder)
        for tests in sorted({mutation.tests for mutation in chosen}):
            if failed := run_tests(folder, tests):
                raise SystemExit(f"{failed} fails with no bug planted")
        for group in sorted({mutation.group for mutation in chosen}):
            together = [mutation for mutation in chosen if mutation.group == group]
            if group:
                for mutation in together:
                    plant(folder, mutation)
                build(folder)
            for mutation in together:
                if not group:
                    plant(folder, mutation)
                caught = run_tests(folder, mutation.tests, mutation.level)
                survived += not caught
                line = " ".join(mutation.old.split())
                print(f"{mutation.file}: {line[:60]}\n    {caught or 'SURVIVED'}", flush=True)
                if not group:
                    restore(folder, mutation)
            if group:
                for mutation in together:
                    restore(folder, mutation)
    print(f"{len(chosen) - survived} of {len(chosen)} planted bugs are caught")
    return int(survived > 0)


if __name__ == "__main__":
    raise SystemExit(main())
