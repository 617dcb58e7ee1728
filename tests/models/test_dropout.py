"""Training mode: a seed repeats the results of every class, dropout is as strong as the parent's,
and a sample's dropout does not depend on its batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastplm
from fastplm import _extension, hf, models, ops
from fastplm.models import _ragged
from fastplm.nn import Dropout
from fastplm.nn.dropout import _ROWS
from fastplm.testing import FORWARD_FACTOR, GRADIENT_FACTOR, check_error

from .conftest import (
    CLASSES,
    PADDINGS,
    PREFIXES,
    ROWS,
    config_of,
    gradients,
    inputs_of,
    pair,
    same,
)

# The rate of attention dropout is high, so that missing or wrong dropout shows in few runs.
ENCODER: dict[str, Any] = dict(
    initializer_range=0.5, attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.1
)
GPT: dict[str, Any] = dict(initializer_range=0.5, attn_pdrop=0.5, resid_pdrop=0.1, embd_pdrop=0.1)
CHANGES: dict[str, dict[str, Any]] = {
    "albert": ENCODER,
    "bert": ENCODER,
    "mpnet": dict(ENCODER, pad_token_id=0),
    "distilbert": dict(initializer_range=0.5, attention_dropout=0.5, dropout=0.1),
    "deberta_v2": ENCODER,
    "electra": ENCODER,
    "roberta": dict(ENCODER, pad_token_id=0),
    "roberta_prelayernorm": dict(ENCODER, pad_token_id=0),
    "esm": ENCODER,
    "nomic_bert": ENCODER,
    "eurobert": dict(initializer_range=0.5, attention_dropout=0.5),
    "modernbert": dict(
        initializer_range=0.5, attention_dropout=0.5, mlp_dropout=0.1, embedding_dropout=0.1
    ),
    "gpt2": GPT,
    "openai": GPT,
    "bart": dict(init_std=0.5, dropout=0.1, attention_dropout=0.5, pad_token_id=0),
    "t5": dict(dropout_rate=0.4),
}
RUNS = 200
INPUTS = ("input_ids", "attention_mask", "decoder_input_ids", "mc_token_ids")


def config(name: str) -> Any:
    made = config_of(name)
    made.update(CHANGES[CLASSES[name]])
    return made


def batch(name: str) -> dict[str, Any]:
    """A padded batch; it has labels only if the model makes its decoder's input of them."""
    given = inputs_of(name, config(name), PADDINGS["right"])
    labelled = "labels" if name.endswith("ForConditionalGeneration") else ""
    return {k: v for k, v in given.items() if k == labelled or k in INPUTS}


def numbers(outputs: Any) -> Tensor:
    """The first 8 numbers of each output, and the loss."""
    found = [value for value in outputs.values() if isinstance(value, Tensor)]
    return torch.cat([value.flatten()[:8] for value in found])


@pytest.mark.parametrize("name", CLASSES)
def test_the_same_seed_gives_the_same_bits(name):
    model = getattr(models, name)(config(name)).train()
    inputs = batch(name)

    def run(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        out = numbers(model(**inputs))
        return gradients(model, out.sum()) | {"out": out.detach()}

    first, second, third = run(0), run(0), run(1)
    assert same(first, second)
    assert not torch.equal(first["out"], third["out"])
    model.eval()
    with torch.no_grad():
        assert torch.equal(numbers(model(**inputs)), numbers(model(**inputs)))


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("Bert", "GPT2", "T5") else pytest.param(name, marks=pytest.mark.slow)
        for name in PREFIXES.values()
    ],
)
def test_dropout_has_the_parents_mean_and_variance(name):
    """The first two moments of a model's outputs over seeds, each by a two-sample z-test."""
    name = f"{name}Model"
    ours, parent = (model.train() for model in pair(name, config(name)))
    inputs = batch(name)

    def moments(model: nn.Module) -> Tensor:
        runs = []
        with torch.no_grad():
            for seed in range(RUNS):
                torch.manual_seed(seed)
                runs.append(model(**inputs)[0][0].flatten().double())
        values = torch.stack(runs)  # [RUNS, tokens * width]
        gold = copy.deepcopy(ours).eval().double()(**inputs)[0][0].flatten().detach()
        return torch.cat((values, (values - gold).square()), 1)

    mine, theirs = moments(ours), moments(parent)
    spread = ((mine.var(0) + theirs.var(0)) / RUNS).sqrt()
    z = (mine.mean(0) - theirs.mean(0)) / spread
    # The largest of so many numbers exceeds 5 by chance once in ten thousand times.
    assert z.abs().max() < 5, z.abs().max()
    assert (mine.var(0) > 0).all()


# --- the batch does not matter --------------------------------------------------------------------

needs_csrc = pytest.mark.skipif(
    _extension.lacks("dropout_rows", "CPU") is not None, reason="csrc/ is not there"
)
#: Classes with dropout of tokens and of whole sequences.
SPLIT = [
    f"{PREFIXES[family]}{head}"
    for family, heads in {
        "bert": ("ForMaskedLM", "ForPreTraining", "ForSequenceClassification"),
        "roberta": ("ForMaskedLM", "ForTokenClassification", "ForSequenceClassification"),
        "roberta_prelayernorm": ("ForMaskedLM", "ForSequenceClassification"),
        "esm": ("ForMaskedLM",),
        "nomic_bert": ("ForMaskedLM",),
        "modernbert": ("ForMaskedLM",),
        "distilbert": ("ForMaskedLM", "ForSequenceClassification"),
        "mpnet": ("ForMaskedLM", "ForSequenceClassification"),
        "albert": ("ForMaskedLM", "ForPreTraining"),
        "electra": ("ForMaskedLM", "ForSequenceClassification"),
        "openai": ("LMHeadModel",),
        "gpt2": ("LMHeadModel", "ForTokenClassification"),
        "bart": ("ForConditionalGeneration",),
        "t5": ("ForConditionalGeneration",),
    }.items()
    for head in heads
]
DROPS = ("_dropout_prob", "_pdrop", "classifier_dropout", "attention_dropout", "mlp_dropout")
DROPS += ("embedding_dropout",)
ALL_DROP = {
    "bart": dict(dropout=0.2, activation_dropout=0.2, attention_dropout=0.2, encoder_layerdrop=0.3),
    "t5": dict(dropout_rate=0.2),
    "distilbert": dict(dropout=0.2, attention_dropout=0.2, seq_classif_dropout=0.2),
}


def of_samples(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model with every dropout on, and a batch padded at the right, with a loss of each label."""
    family = CLASSES[name]
    made = config_of(name)
    own = ALL_DROP.get(family)
    if own is None:
        own = {key: 0.2 for key in made.to_dict() if key.endswith(DROPS)}
        own["initializer_range"] = 0.2
    made.update(own | ({"pad_token_id": 0} if family.startswith("roberta") else {}))
    if "SequenceClassification" in name:
        made.problem_type = "single_label_classification"
    given = inputs_of(name, made, PADDINGS["right"])
    return getattr(models, name)(made).train(), given


def step(name: str, model: nn.Module, batch: dict, parts: list, index: Tensor, **options: Any):
    """(summed loss of each sample, gradients) of a step over parts of a batch."""
    model.zero_grad()
    total = torch.zeros(())
    labels = {key: batch[key] for key in batch if "label" in key}
    for part in parts:
        torch.manual_seed(5)  # each part of a step begins with the same seed
        given = {key: value[part] for key, value in batch.items() if isinstance(value, Tensor)}
        counts = {"num_items_in_batch": (labels["labels"] != -100).sum()}
        if len(labels) > 1:
            counts["num_sequences_in_batch"] = torch.tensor(len(index))
        loss = model(**given, **counts, **options, sample_index=index[part]).loss
        loss.backward()
        total = total + loss.detach()
    return total, {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@needs_csrc
@pytest.mark.parametrize("name", SPLIT)
def test_a_sample_drops_the_same_in_every_batch(name):
    """A step's losses and gradients are the same packed or padded, accumulated, or reordered."""
    torch.manual_seed(0)
    model, batch = of_samples(name)
    index = 2**40 + torch.arange(ROWS) * 7
    rows = torch.arange(ROWS)
    padded = {"unpad": False}
    if name.endswith("ForConditionalGeneration"):
        padded["decoder_unpad"] = False
    loss, grads = step(name, model, batch, [rows], index)
    runs = {
        "packed": (loss, grads),
        "padded": step(name, model, batch, [rows], index, **padded),
        "halves": step(name, model, batch, list(rows.chunk(2)), index),
        "halves, padded": step(name, model, batch, list(rows.chunk(2)), index, **padded),
        "one each": step(name, model, batch, list(rows.split(1)), index),
        "reversed": step(name, model, batch, [rows.flip(0)], index),
    }
    model.gradient_checkpointing = False
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        runs["checkpointed"] = step(name, model, batch, list(rows.chunk(2)), index)
        model.gradient_checkpointing_disable()
    with fastplm.use_backend("eager"):
        bases = [step(name, model, batch, parts, index) for parts in ([rows], rows.chunk(2))]
        exact, gold = step(name, copy.deepcopy(model).double(), batch, [rows], index)
    for what, (found, grads) in runs.items():
        check_error(f"{what}: loss", found, exact, [base for base, _ in bases], FORWARD_FACTOR)
        assert grads.keys() <= gold.keys()
        for key, value in grads.items():
            held = [of_base[key] for _, of_base in bases]
            check_error(f"{what}: {key}", value, gold[key], held, GRADIENT_FACTOR, [*gold.values()])
    other, _ = step(name, model, batch, [rows], index + 1)
    assert (other - loss).abs() > 2e-4 * loss.abs(), "other samples drop something else"


@needs_csrc
@pytest.mark.parametrize("name", SPLIT)
def test_every_dropout_of_a_training_step_knows_its_rows(name, monkeypatch):
    """No dropout is drawn by the place in the tensor, by PyTorch's function or fastplm's."""
    model, batch = of_samples(name)
    index = torch.arange(ROWS)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("drawn by the place in the tensor")

    monkeypatch.setattr(torch.nn.functional, "dropout", refuse)
    monkeypatch.setattr("fastplm.nn.dropout.DROPOUT.layer", refuse)
    for unpad in (None, False):
        step(name, model, batch, [torch.arange(ROWS)], index, unpad=unpad)
    assert _ROWS.get() is None


@needs_csrc
@pytest.mark.parametrize("name", ["BertForMaskedLM", "T5ForConditionalGeneration"])
def test_the_reference_drops_the_same(name):
    model, batch = of_samples(name)
    index = torch.arange(ROWS)
    loss, _ = step(name, model, batch, [torch.arange(ROWS)], index)
    with fastplm.use_backend("eager", "dropout", "attention"):
        found, _ = step(name, model, batch, [torch.arange(ROWS)], index)
    torch.testing.assert_close(found, loss)


@needs_csrc
def test_packed_sequences_are_their_samples():
    """Rows that the caller packed have the same dropout as in a padded batch."""
    model, batch = of_samples("BertForMaskedLM")
    model = model.bert
    mask, index = batch["attention_mask"].bool(), torch.arange(ROWS) + 50
    ids = batch["input_ids"]
    lengths = mask.sum(1)
    offsets = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    longest = int(lengths.max())
    torch.manual_seed(1)
    padded = model(ids, attention_mask=mask.long(), sample_index=index).last_hidden_state[mask]
    torch.manual_seed(1)
    packed = model(
        ids[mask][None],
        position_ids=(mask.cumsum(1) - 1)[mask][None],
        cu_seq_lens_q=offsets,
        cu_seq_lens_k=offsets,
        max_length_q=longest,
        max_length_k=longest,
        sample_index=index,
    ).last_hidden_state[0]
    torch.testing.assert_close(packed, padded)


def test_a_sample_index_is_of_each_sequence():
    model, batch = of_samples("BertForMaskedLM")
    for wrong in (torch.arange(ROWS + 1), torch.arange(ROWS).float(), 3):
        with pytest.raises((ValueError, TypeError), match="sample_index"):
            model(**batch, sample_index=wrong)


@needs_csrc
def test_a_users_layer_draws_as_before():
    """A layer that passes no rows on could not repeat their dropout under checkpointing."""
    model, batch = of_samples("BertForMaskedLM")
    layer = model.bert.encoder.layer[0]
    seen = []
    layer.output.dropout.register_forward_hook(lambda *_: seen.append(_ROWS.get()))
    model(**batch)
    layer.__class__ = type("Own", (type(layer).__mro__[3],), {})
    assert isinstance(layer.output.dropout, Dropout)
    model(**batch)
    assert seen[0] is not None and seen[1] is None


@needs_csrc
@pytest.mark.parametrize("family", ["bart", "t5"])
def test_a_packed_decoder_of_one_row(family):
    """The decoder's self-attention, with one query, is not taken for cross-attention."""
    name = f"{PREFIXES[family]}ForConditionalGeneration"
    model = getattr(models, name)(config_of(name)).train()
    ids, mask = torch.randint(5, 20, (1, 9)), torch.tensor([[1, 1] + [0] * 7])
    labels = torch.tensor([[5] + [-100] * 6])
    packed = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    padded = model(input_ids=ids[:, :2], labels=labels, decoder_unpad=False).loss
    torch.testing.assert_close(packed, padded)


# --- seeds that a model draws at once, as on a GPU ------------------------------------------------


@pytest.fixture
def one_draw(monkeypatch):
    monkeypatch.setattr(_ragged, "ONE_DRAW", ("cpu",))


def seeds_of(monkeypatch, run):
    """The seeds of all calls of attention in ``run()``."""
    seen: list[Any] = []
    kept = ops.disentangled_attention
    monkeypatch.setattr(
        ops,
        "disentangled_attention",
        lambda *args, **options: seen.append(options["seed"]) or kept(*args, **options),
    )
    for name in ("attention", "attention_varlen"):
        inner = getattr(hf, name)

        def call(*args: Any, inner: Any = inner, **options: Any) -> Tensor:
            seen.append(options["seed"])
            return inner(*args, **options)

        monkeypatch.setattr(hf, name, call)
    run()
    return [None if seed is None else int(seed) for seed in seen]


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("unpad", [None, False])
def test_every_layer_has_a_seed_of_its_own(monkeypatch, one_draw, name, unpad):
    model = getattr(models, name)(config(name)).train()
    inputs = batch(name) | ({} if unpad is None else {"unpad": unpad})
    if "QuestionAnswering" in name or "MultipleChoice" in name or "Double" in name:
        inputs.pop("unpad", None)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False  # a decoder with a cache is not told of seeds
    seeds = seeds_of(monkeypatch, lambda: model(**inputs))
    assert None not in seeds and len(set(seeds)) == len(seeds) > 1


@pytest.mark.parametrize("name", PREFIXES.values())
def test_seeds_are_drawn_at_once_without_dropout_of_attention(monkeypatch, one_draw, name):
    if name in ("EuroBert", "ModernBert"):
        pytest.skip("no other dropout of its layers needs a seed of the model")
    settings = config(f"{name}Model")
    for field in ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout"):
        if hasattr(settings, field):
            setattr(settings, field, 0.0)
    settings.use_cache = False
    drawn, inner = [], _ragged.Rows.draw_seeds

    def draw_seeds(rows, *args):
        inner(rows, *args)
        drawn.append(rows.seeds)

    monkeypatch.setattr(_ragged.Rows, "draw_seeds", draw_seeds)
    getattr(models, f"{name}Model")(settings).train()(**batch(f"{name}Model"))
    assert drawn and None not in drawn


#: DeBERTa's layers have no number but their place.
@pytest.mark.parametrize("name", [name for name in PREFIXES.values() if name != "DebertaV2"])
def test_two_layers_of_one_number_draw_their_own(monkeypatch, one_draw, name):
    """As in a model that the user has made deeper by copies of its layers."""
    model = getattr(models, f"{name}Model")(config(f"{name}Model")).train()
    inputs = batch(f"{name}Model")
    stacks = [
        part
        for part in (getattr(model, "encoder", None), getattr(model, "decoder", None), model)
        for part in (getattr(part, one, None) for one in ("layer", "layers", "block", "h"))
        if part is not None
    ]
    if not stacks:
        pytest.skip("its layers are counted, not numbered")
    for stack in stacks:
        stack.append(copy.deepcopy(stack[0]))
    numbered = hasattr(stacks[0][0], "ln_1") is False or name == "GPT2"
    numbered = numbered and name not in ("MPNet", "Esm", "NomicBert")  # counted, too
    seeds = seeds_of(monkeypatch, lambda: model(**inputs))
    assert (set(seeds) == {None}) == numbered


@pytest.mark.parametrize("name", SPLIT)
def test_one_draw_repeats_in_checkpoints_and_packed(one_draw, name):
    """The seed decides; a padded batch, a packed and a checkpointed one drop the same."""
    model = getattr(models, name)(config(name)).train()
    inputs = batch(name) | inputs_of(name, model.config, PADDINGS["right"])

    def run(seed: int, **options: Any) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        loss = model(**inputs, **options).loss
        return gradients(model, loss) | {"loss": loss.detach()}

    first, again, other = run(0), run(0), run(1)
    assert same(first, again) and not torch.equal(first["loss"], other["loss"])
    if "Sequence" not in name:  # whose rows of the last layer are counted anew
        torch.testing.assert_close(run(0, unpad=False)["loss"], first["loss"])
    for reentrant in (False, True) if model.supports_gradient_checkpointing else ():
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        assert same(run(0), first)
