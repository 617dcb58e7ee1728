"""Every text model of Transformers under fastplm's attention: right, refused, or wrong.

Each model is built tiny, with random weights, and compared with its own eager attention in fp64,
and in fp32, in which the kernels run. The inputs have no padding, or padding at the right, at the
left or scattered; other later tokens, and other values in the padding, must change nothing.
Gradients are compared, too, and the tokens generated from left padding.
``python tools/survey_models.py --markdown docs/families.md`` writes the table, and
``tests/models/test_survey.py`` checks it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

import fastplm
from fastplm import hf
from fastplm.errors import UnsupportedError
from fastplm.models._ragged import padding_of

#: B = T: a mask [B, T] that is wrongly added to scores [B, H, T, T] then raises no error.
VOCAB, SEQLEN, BATCH = 64, 12, 12
#: A model with more parameters is not built: its configuration has sizes that ``SIZES`` misses.
MOST_PARAMETERS = 5_000_000
ROUTES = ("name", "accelerate")
#: The lists of Transformers' Auto classes in which text models stand; the first class is taken.
_TASKS = (
    "MASKED_LM",
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "TEXT_ENCODING",
    "QUESTION_ANSWERING",
    "SEQUENCE_CLASSIFICATION",
)
#: Models with a part of such a name in their configuration do not read text alone.
_NOT_TEXT = ("audio", "vision", "encoder_config", "patcher", "semantic", "esmfold")


#: Models in the lists that need more inputs than the ids of a text.
_OTHER_INPUTS = (
    "fuyu",
    "kimi_linear",
    "layoutlmv2",
    "layoutlmv3",
    "lxmert",
    "musicgen",
    "musicgen_melody",
)


#: Models that write the lowest number of fp64 into fp32, or mix both.
_ONLY_FP32 = ("fsmt", "mra", "xglm")


def _all(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


#: Small values of fields of configurations, by name.
SIZES: dict[str, Any] = {
    **_all("hidden_size d_model n_embd dim emb_dim n_embed embedding_size d_embed", 32),
    **_all("num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers", 2),
    **_all("num_decoder_layers num_encoder_layers", 2),
    **_all("num_attention_heads n_head num_heads n_heads encoder_attention_heads", 4),
    **_all("decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads", 4),
    **_all("num_key_value_heads num_kv_heads", 2),
    **_all("head_dim d_kv attention_head_size d_head v_head_dim", 8),
    **_all("qk_rope_head_dim qk_nope_head_dim rotary_dim", 8),
    **_all("q_lora_rank kv_lora_rank", 16),
    **_all("intermediate_size d_ff ffn_dim n_inner hidden_dim encoder_ffn_dim d_inner", 48),
    **_all("decoder_ffn_dim ffn_hidden_size", 48),
    **_all("moe_intermediate_size shared_expert_intermediate_size", 24),
    **_all("num_experts num_local_experts n_routed_experts", 4),
    **_all("num_experts_per_tok moe_topk top_k num_experts_per_token", 2),
    **_all("max_position_embeddings n_positions n_ctx max_seq_len", 64),
    **_all("sliding_window local_attention attention_chunk_size window_size", 4),
    **_all("attention_window", 4),
    **_all("chunk_size mamba_chunk_size", 4),
    **_all("state_size ssm_state_size mamba_d_state", 8),
    **_all("mamba_head_dim mamba_headdim mamba_d_head linear_head_dim", 8),
    **_all("linear_key_head_dim linear_value_head_dim", 8),
    **_all("mamba_num_heads mamba_n_heads n_mamba_heads", 8),
    **_all("n_groups mamba_n_groups mamba_ngroups", 1),
    **_all("linear_num_key_heads linear_num_value_heads linear_num_heads", 4),
    "vocab_size": VOCAB,
    "type_vocab_size": 2,
}
_TOKENS = {**_all("pad_token_id bos_token_id decoder_start_token_id", 1), "eos_token_id": 2}
_MLA = {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_PER_LAYER = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
_LAST_FULL = {"layer_types": ["linear_attention", "full_attention"]}
#: Fields of single configurations that go together with the small sizes.
SPECIAL: dict[str, dict[str, Any]] = {
    "axk1": {**_MLA, "head_dim": None},
    "axk2": _MLA,
    "bamba": {"attn_layer_indices": [1]},
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"], **_MLA},
    "big_bird": {"attention_type": "original_full"},  # to which it changes for a short text
    "canine": {"num_hash_buckets": 64, "local_transformer_stride": 4, "downsampling_rate": 2},
    "codegen": {"rotary_dim": 4},
    "deepseek_v2": {**_MLA, "num_experts_per_tok": 2},
    "deepseek_v3": {**_MLA, "head_dim": None},
    "deepseek_v32": _MLA,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "esm": {"vocab_size": VOCAB, "mask_token_id": 3, "num_key_value_heads": None},
    "esmc": {"num_key_value_heads": 4},
    "falcon": {"head_dim": None},
    "falcon_h1": {"mamba_d_ssm": 64},
    "funnel": {"num_hidden_layers": None, "block_sizes": [1, 1], "num_decoder_layers": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0, **_PER_LAYER},
    "gemma4_text": {**_PER_LAYER, "per_layer_config": {}},
    "gemma4_unified_text": {**_PER_LAYER, "per_layer_config": {}},
    "glm4_moe_lite": _MLA,
    "glm_moe_dsa": _MLA,
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "led": {"attention_window": [4, 4], "max_encoder_position_embeddings": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": _LAST_FULL,
    "lilt": {"channel_shrink_ratio": 2, "hidden_size": 48, "max_2d_position_embeddings": 64},
    "longcat_flash": {**_MLA, "head_dim": None, "expert_ffn_hidden_size": 24, "zero_expert_num": 2},
    "longformer": {"attention_window": [4, 4]},
    "minicpm3": _MLA,
    "ministral": {"head_dim": 8},
    "mamba2": {"num_heads": 8},
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 32},
    "mistral4": {**_MLA, "rope_parameters": None, "qk_rope_head_dim": 8, "head_dim": 16},
    "mpt": {},
    "nemotron": {"num_key_value_heads": 2},
    "perceiver": {"d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 1},
    "prophetnet": {"num_hidden_layers": None},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"), _LAST_FULL),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), _LAST_FULL),
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"], "is_decoder": False},
    "roc_bert": {"pronunciation_vocab_size": 32, "shape_vocab_size": 32},
    "xlnet": {"max_position_embeddings": None, "n_head": 4},
    "xmod": {"default_language": "en_XX"},
    "youtu": {**_MLA, "head_dim": None},
    "zamba": {"num_hidden_layers": 3},
}


class Case(NamedTuple):
    """A model of the survey: its name in the table, its class, fields beside ``SIZES``."""

    name: str
    kind: type
    fields: dict[str, Any]


class Row(NamedTuple):
    """The result of one route for one model.

    Args:
        verdict: one of ``VERDICTS``.
        why: the first sentence of a refusal or an error, or the checks that failed.
    """

    verdict: str
    why: str = ""


VERDICTS = {
    "drop-in": "a class of fastplm.models, which computes no padding",
    "attention": "Transformers' class with fastplm's attention, equal to its eager attention",
    "refused": "an error says why, and what to do",
    "nothing": "the model has no attention that could change, and a line says so",
    "ignored": "equal, as fastplm was not called: nobody says so",
    "wrong": "other results than with eager attention",
    "error": "an error that does not say what to do",
    "not built": "not tried: the small configuration does not fit the class",
}


def cases() -> Iterator[Case]:
    """Every text model in the Auto classes of Transformers; encoders also as decoders."""
    kinds: dict[str, str] = {}
    for task in _TASKS:
        for name, kind in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            kinds.setdefault(name, kind)
    decoders = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    for name, listed in sorted(kinds.items()):
        kind = getattr(transformers, listed)
        if any(part.startswith(_NOT_TEXT) for part in kind.config_class.sub_configs):
            if name != "esm":
                continue
        if name in _OTHER_INPUTS:
            continue
        yield Case(name, kind, {})
        if name in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and name in decoders:
            decoder = getattr(transformers, decoders[name])
            if decoder is not kind:
                yield Case(f"{name} as decoder", decoder, {"is_decoder": True})


def config_of(case: Case) -> PreTrainedConfig:
    """The small configuration of a case."""
    name, kind = case.name.split()[0], case.kind.config_class
    if name in ("t5gemma", "t5gemma2"):
        part = {**SIZES, **_TOKENS, "layer_types": ["sliding_attention", "full_attention"]}
        parts = {side: part for side in ("encoder", "decoder")}
        return kind(**parts, **_TOKENS, vocab_size=VOCAB, hidden_size=32)
    if name == "encoder-decoder":
        parts = [config_of(Case("bert", transformers.BertModel, {})) for _ in range(2)]
        return transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts, **_TOKENS)
    default, fields = kind(), {}
    for field, value in {**SIZES, **_TOKENS}.items():
        try:
            known = getattr(default, field, None) is not None or field in _TOKENS
        except Exception:  # some configurations have this field only for each layer
            continue
        if known and field not in kind.attribute_map and not _is_read_only(kind, field):
            fields[field] = value
    fields |= SPECIAL.get(name, {}) | case.fields
    return kind(**{field: value for field, value in fields.items() if value is not None})


def _is_read_only(kind: type, field: str) -> bool:
    found = getattr(kind, field, None)
    return isinstance(found, property) and found.fset is None


def build(case: Case, implementation: str) -> PreTrainedModel:
    """A model in fp64, with weights so large that every part of it changes the output."""
    config = config_of(case)
    with contextlib.suppress(AttributeError):
        config._experts_implementation = "eager"  # the other implementations take fp32 alone
    with torch.device("meta"):
        count = sum(p.numel() for p in case.kind(copy.deepcopy(config)).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count} parameters")
    model = case.kind._from_config(config, attn_implementation=implementation).eval()  # type: ignore[attr-defined]
    if case.name not in _ONLY_FP32:
        model = model.double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    return model


def batch(model: PreTrainedModel, mask: Tensor | None, seed: int = 0) -> dict[str, Any]:
    """Random inputs of a model with a mask [B, T]; the inputs of a decoder have no padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCAB, (BATCH, SEQLEN), generator=generator)
    inputs: dict[str, Any] = {"input_ids": ids}
    if mask is not None:
        inputs["attention_mask"] = mask
        padding = padding_of(model.config)
        if padding is not None and padding < VOCAB:
            inputs["input_ids"] = ids.masked_fill(mask == 0, padding)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(5, VOCAB, (BATCH, 7), generator=generator)
    return inputs


def _masks() -> dict[str, Tensor | None]:
    columns = torch.arange(SEQLEN)
    lengths = torch.tensor([[SEQLEN], [7], [4]]).repeat(BATCH // 3, 1)
    scattered = torch.ones(BATCH, SEQLEN, dtype=torch.long)
    scattered[1::3, [2, 5, 6, 11]] = 0
    scattered[2::3, [1, 9]] = 0
    return {
        "no padding": None,
        "right padding": (columns < lengths).long(),
        "left padding": (columns >= SEQLEN - lengths).long(),
        "scattered padding": scattered,
    }


def scores(model: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
    """The first output with a row for each token, or for each sequence."""
    if "use_cache" in model.config.to_dict():
        inputs = {**inputs, "use_cache": False}
    with _exact(model):
        outputs = model(**inputs)
    for name in ("logits", "prediction_logits", "start_logits", "last_hidden_state"):
        if isinstance(outputs.get(name), Tensor):
            return outputs[name]
    return next(value for value in outputs.values() if isinstance(value, Tensor))


class _Double(TorchFunctionMode):
    """Conversions to fp32 give fp64: eager attention computes its softmax in fp32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = [torch.float64 if value is torch.float32 else value for value in args]
        named = {
            name: torch.float64 if value is torch.float32 else value
            for name, value in (kwargs or {}).items()
        }
        return func(*wide, **named)


def _exact(model: PreTrainedModel) -> contextlib.AbstractContextManager:
    """A context in which a model in fp64 rounds nothing to fp32."""
    double = next(model.parameters()).dtype is torch.float64
    return _Double() if double else contextlib.nullcontext()


def _real(out: Tensor, mask: Tensor | None) -> Tensor:
    """The rows of real tokens; all rows if the output has another length."""
    if mask is None or out.shape[:2] != mask.shape:
        return out
    return out[mask.bool()]


def _differ(ours: Tensor, theirs: Tensor, least: float) -> bool:
    if ours.shape != theirs.shape:
        return True
    finite = theirs.isfinite()
    if not torch.equal(finite, ours.isfinite()):
        return True
    ours, theirs = ours[finite], theirs[finite]  # eager gives NaN where it adds two lowest numbers
    if ours.numel() == 0:
        return False
    return bool((ours - theirs).abs().max() > least * theirs.abs().max().clamp(min=1e-6))


def failures(ours: PreTrainedModel, theirs: PreTrainedModel) -> Iterator[str]:
    """The checks in which ``ours`` is not what the same model gives with eager attention."""
    # The rounding of fp64 is 2e-16; an ignored mask changes the outputs by more than 1e-3.
    least = 1e-7 if next(theirs.parameters()).dtype is torch.float64 else 1e-4
    for name, mask in _masks().items():
        inputs = batch(theirs, mask)
        with torch.no_grad():
            expected, found = (_real(scores(m, inputs), mask) for m in (theirs, ours))
        if _differ(found, expected, least):
            yield name
        if mask is None:
            later = dict(inputs)
            field = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
            later[field] = inputs[field].clone()
            later[field][:, -3:] = 5 + (later[field][:, -3:] + 7) % (VOCAB - 5)
            with torch.no_grad():
                again = [_real(scores(m, later), None) for m in (theirs, ours)]
            if again[0].shape[:2] == inputs[field].shape:
                before = [
                    _differ(a[:, :-3], b[:, :-3], least)
                    for a, b in zip(again, (expected, found), strict=True)
                ]
                if before[1] and not before[0]:
                    yield "sees later tokens"
            if _differ(again[1], again[0], least):
                yield "later tokens"
        else:
            hidden = dict(inputs)
            moved = 5 + (inputs["input_ids"] + 7) % (VOCAB - 5)
            hidden["input_ids"] = torch.where(mask.bool(), inputs["input_ids"], moved)
            with torch.no_grad():
                again = [_real(scores(m, hidden), mask) for m in (theirs, ours)]
            if _differ(again[1], again[0], least):
                yield f"{name}, other values in it"
    if _differ(*(_gradients(m) for m in (ours, theirs)), least=100 * least):
        yield "gradients"
    if not _generates_alike(ours, theirs):
        yield "generation from left padding"
    if next(ours.parameters()).dtype is torch.float64 and not _fits_in_fp32(ours, theirs):
        yield "fp32"


def _gradients(model: PreTrainedModel) -> Tensor:
    mask = _masks()["right padding"]
    model.zero_grad()
    out = _real(scores(model, batch(model, mask)), mask)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return torch.cat(found)


def _generates_alike(ours: PreTrainedModel, theirs: PreTrainedModel) -> bool:
    if not theirs.can_generate():
        return True
    mask = _masks()["left padding"]
    inputs = batch(theirs, mask)
    inputs.pop("decoder_input_ids", None)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    try:
        with torch.no_grad(), _exact(theirs):
            expected = theirs.generate(**inputs, **options)  # type: ignore[operator]
    except Exception:  # what eager cannot do is no check
        return True
    with torch.no_grad(), _exact(ours):
        found = ours.generate(**inputs, **options)  # type: ignore[operator]
    return torch.equal(found, expected)


@contextlib.contextmanager
def _counted() -> Iterator[Counter]:
    """Counts the calls of fastplm's attention."""
    counts: Counter = Counter()
    interface = transformers.AttentionInterface()
    kept = {name: interface[name] for name in (hf.NAME,)}

    def counting(name: str, function: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return run

    for name, function in kept.items():
        transformers.AttentionInterface.register(name, counting(name, function))
    try:
        yield counts
    finally:
        for name, function in kept.items():
            transformers.AttentionInterface.register(name, function)


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """What Transformers' logger says inside."""
    said: list[str] = []
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("transformers", "fastplm")]
    for one in loggers:
        one.addHandler(handler)
    try:
        yield said
    finally:
        for one in loggers:
            one.removeHandler(handler)


def survey(case: Case, route: str) -> Row:
    """What ``route`` makes of a model: "name" (``attn_implementation``) or "accelerate"."""
    theirs = build(case, "eager")
    failed: list[str] = []
    with _counted() as counts, _warnings() as said:
        try:
            if route == "name":
                ours = build(case, hf.NAME)
                ours.load_state_dict(theirs.state_dict())
            else:
                ours = fastplm.accelerate(copy.deepcopy(theirs))
            failed += failures(ours, theirs)
        except UnsupportedError as error:
            return Row("refused", _first_line(error))
        except Exception as error:
            if not failed:
                return Row("error", _first_line(error))
            failed.append(_first_line(error))
    if failed:
        return Row("wrong", ", ".join(failed))
    if any(type(part).__module__.startswith("fastplm.models") for part in _models_in(ours)):
        return Row("drop-in")
    if counts.total():
        return Row("attention")
    return Row("nothing" if any("changes nothing" in line for line in said) else "ignored")


def _models_in(model: PreTrainedModel) -> list[PreTrainedModel]:
    """A model, and those in it, such as the one without head."""
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def _fits_in_fp32(ours: PreTrainedModel, theirs: PreTrainedModel) -> bool:
    """Whether the error of fp32, in which the kernels run, is at most ten times that of eager."""
    mask = _masks()["right padding"]
    inputs = batch(theirs, mask)
    with torch.no_grad():
        gold = _real(scores(theirs, inputs), mask)
        narrow = [_real(scores(m.float(), inputs), mask).double() for m in (theirs, ours)]
    finite = torch.stack([gold, *narrow]).isfinite().all(0)
    if not finite.any():
        return True
    gold, *narrow = (one[finite] for one in (gold, *narrow))
    base, error = ((one - gold).abs().max() for one in narrow)
    return bool(error <= 10 * base + 1e-6 * gold.abs().max())


def _first_line(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0]
    return text if isinstance(error, UnsupportedError) else f"{type(error).__name__}: {text[:90]}"


def rows(only: list[str], routes: tuple[str, ...] = ROUTES) -> dict[str, dict[str, Row]]:
    """The table: the rows of each model, by route. A model that cannot be built has its error."""
    table: dict[str, dict[str, Row]] = {}
    for case in cases():
        if only and case.name not in only:
            continue
        try:
            scores(build(case, "eager"), batch(build(case, "eager"), None))
        except Exception as error:
            table[case.name] = dict.fromkeys(routes, Row("not built", _first_line(error)))
        else:
            table[case.name] = {route: survey(case, route) for route in routes}
        print(case.name, table[case.name], flush=True)
        gc.collect()
    return table


def markdown(table: dict[str, dict[str, Row]]) -> str:
    """The table as a page of the documentation."""
    built = {name: row for name, row in table.items() if row["name"].verdict != "not built"}
    lines = [_HEAD.format(version=transformers.__version__, count=len(built))]
    lines += ["| verdict | meaning | by name | by accelerate |", "|---|---|---|---|"]
    counts = {route: Counter(row[route].verdict for row in built.values()) for route in ROUTES}
    for verdict, meaning in VERDICTS.items():
        if verdict != "not built":
            found = " | ".join(str(counts[route][verdict]) for route in ROUTES)
            lines.append(f"| {verdict} | {meaning} | {found} |")
    lines += ["", "| model | by name | by accelerate |", "|---|---|---|"]
    for name, row in built.items():
        lines.append(f"| {name} | {' | '.join(_cell(row[route]) for route in ROUTES)} |")
    missing = [name for name in table if name not in built]
    lines += ["", f"Not tried, as no small model of them was built: {', '.join(missing)}.", ""]
    return "\n".join(lines)


_HEAD = """# Other model families

Made by `python tools/survey_models.py --markdown docs/families.md` with Transformers {version}:
what becomes of the {count} text models that its Auto classes list, made small with random weights.
*By name* is `attn_implementation="fastplm"`; *by accelerate* is `fastplm.accelerate(model)`.
Each is compared in fp64 with its own eager attention: without padding, with padding at the right,
at the left and scattered, with other later tokens, with other values in the padding, its gradients,
what it generates from left padding, and in fp32. Where the last column says drop-in, every head of
the family is one that reads a text alone (`tests/models/test_proof.py`): not LUKE's heads of
entities, Splinter's pre-training, Whisper with its encoder, and BigBird-Pegasus with its encoder,
whose attention is sparse.
"""


def _cell(row: Row) -> str:
    if row.verdict != "refused":
        return row.verdict
    argument = re.search(r"attn_implementation='fastplm': `(\w+)`", row.why)
    return f"refused: `{argument[1]}`" if argument else "refused: its own attention"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="*", help="names of models; default: all")
    parser.add_argument("--markdown", type=Path, help="write the page of all models here")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    table = rows(args.only)
    for route in ROUTES:
        print(route, dict(Counter(row[route].verdict for row in table.values())))
    if args.markdown:
        args.markdown.write_text(markdown(table))


if __name__ == "__main__":
    main()
