"""Every class of every family equals its parent class in Transformers."""

from __future__ import annotations

import inspect
import itertools
import threading

import pytest
import torch
import transformers
from transformers import EncoderDecoderConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

import fastplm
from fastplm import models, ops
from fastplm._backends import record_decisions
from fastplm.errors import ArgumentTypeError, ArgumentValueError
from fastplm.models import _base, _ragged
from fastplm.models._ragged import RaggedBatch
from fastplm.testing import KeptDouble, check_in_fp64

from .conftest import (
    CLASSES,
    CLONED,
    CLONES,
    FAMILIES,
    LABELS,
    LANGUAGE_MODELS,
    LENGTH,
    PADDINGS,
    PREFIXES,
    ROWS,
    VOCABULARY_HEADS,
    config_of,
    every_class,
    every_family,
    gradients,
    has_decoder,
    inputs_of,
    loss_of,
    pair,
    parent_of,
    same,
    small_config,
    takes,
)


def takes_flat_labels(name):
    """Whether the parent of this class takes flat labels."""
    heads = ("MaskedLM", "CausalLM", "LMHeadModel", "TokenClassification", "ForPreTraining")
    return name.endswith(heads) and name != "ElectraForPreTraining"


def test_every_family_has_its_classes():
    found = [name for name in models.__all__ if hasattr(getattr(models, name), "forward")]
    others = {"DebertaV2ForPreTraining", "ElectraForJointPreTraining", "EncoderDecoderModel"}
    assert set(CLASSES | CLONED) == set(found) - others
    assert set(CLASSES.values()) == set(FAMILIES) and set(CLONED.values()) == set(CLONES)


@pytest.mark.parametrize("padding", ["none", "right", "left", "dead row"])
@every_class
def test_equals_its_parent(hold_drop_in, name, padding):
    if name == "GPT2ForQuestionAnswering" and padding == "left":
        pytest.skip("its loss includes padding, which at the left attends to no token")
    hold_drop_in(getattr(models, name), config_of(name), padding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@every_family
def test_the_kernels_are_as_accurate_as_the_parent(hold_drop_in, family, dtype):
    """The kernels run in the dtypes of training; fp64 tests all code around them."""
    name = LANGUAGE_MODELS[family]
    hold_drop_in(getattr(models, name), config_of(name), "right", dtype)


@pytest.mark.parametrize(
    ("padding", "unpad"), [("right", 30), ("left", 30), ("right", False)], ids=str
)
@pytest.mark.parametrize(
    "name", [n for n in CLASSES if n.endswith(("Model", *VOCABULARY_HEADS)) and not has_decoder(n)]
)
def test_a_capacity_or_padding_left_in_changes_nothing(hold_drop_in, name, padding, unpad):
    """24 tokens of a sequence or choice are packed into 30 rows."""
    rows = 90 if unpad and name.endswith("DoubleHeadsModel") else unpad
    if rows and name == "MPNetModel" and padding == "left":
        pytest.skip("the pooler reads the first row, and those between keep their distances")
    ours, config = getattr(models, name), config_of(name)
    hold_drop_in(ours, config, padding, unpad=rows)
    if name.removesuffix("Model") in PREFIXES.values() and unpad:
        mask = PADDINGS[padding]
        hidden = ours(config)(**inputs_of(name, config, mask), unpad=rows)[0]
        # The pooler reads the first row, even if it is padding.
        left_out = hidden[:, 1:][mask[:, 1:] == 0]
        assert not left_out.any(), "rows that are left out are 0"


@every_class
def test_spare_slots_change_nothing(hold_drop_in, spare_slots, name):
    hold_drop_in(getattr(models, name), config_of(name), "right")
    assert any(spare_slots) or name.endswith("QuestionAnswering")


_QUICK_TO_COMPILE = ("DebertaV2ForSequenceClassification", "MPNetForSequenceClassification")


@pytest.mark.parametrize("name", _QUICK_TO_COMPILE)
def test_compiles_as_a_whole(hold, name):
    """Gradients, too. test_graphs.py compiles every class."""
    torch._dynamo.reset()
    config = config_of(name)
    if "SequenceClassification" in name:
        config.problem_type = "single_label_classification"  # else forward changes it
    model, inputs = getattr(models, name)(config), inputs_of(name, config, PADDINGS["right"])
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    hold(model, model, lambda _: {"out": compiled(**inputs)[0]}, lambda m: {"out": m(**inputs)[0]})


@pytest.mark.parametrize("name", _QUICK_TO_COMPILE)
def test_compiles_again_in_a_thread_that_ran_no_model(name):
    """What a thread has for modules must not change between two graphs of a frame."""
    torch._dynamo.reset()
    model, found = getattr(models, name)(config_of(name)).eval(), []
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    ids = torch.randint(4, 16, (2, 9))

    def run():
        with torch.no_grad():
            found.extend(compiled(ids[:, :length]).logits for length in (9, 6))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    expected = [model(ids[:, :length]).logits for length in (9, 6)]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("place", ["base_model", "classifier"])
@pytest.mark.parametrize("name", _QUICK_TO_COMPILE)
def test_another_model_may_run_inside_of_a_head(name, place):
    """As a teacher does in a hook. What the head gives its own model is not for that one."""
    model, teacher = (getattr(models, name)(config_of(name)).eval() for _ in range(2))
    ids, mask, found = torch.randint(4, 16, (2, LENGTH)), torch.ones(2, LENGTH), []
    mask[1, 5:] = 0

    def hook(*_):
        given = dict(input_ids=ids, attention_mask=mask)
        weights = teacher.base_model(**given, output_attentions=True)
        found.append((teacher.base_model(**given)[0], weights[0]))

    expected = model(input_ids=ids, attention_mask=mask).logits
    getattr(model, place).register_forward_pre_hook(hook)
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, expected)
    outside = teacher.base_model(ids, attention_mask=mask)[0]
    for hidden in found[0]:
        assert hidden.shape == outside.shape
        torch.testing.assert_close(hidden[mask.bool()], outside[mask.bool()])


@every_family
def test_attention_can_be_set_whatever_the_parents_class_can(family):
    ours = getattr(models, LANGUAGE_MODELS[family])
    parent_of(ours)._can_set_attn_implementation()  # which keeps its answer on the class
    model = ours(config_of(LANGUAGE_MODELS[family]))
    for name in ("eager", "fastplm"):
        model.set_attn_implementation(name)
        assert model.config._attn_implementation == name
    if not ours._supports_sdpa:
        with pytest.raises(ValueError, match="scaled_dot_product_attention"):
            model.set_attn_implementation("sdpa")
        assert model.config._attn_implementation == "fastplm"


@every_class
def test_checkpoints_go_both_ways(round_trip, name):
    round_trip(getattr(models, name), config_of(name))


#: Classes without a parent of their name; their arguments come in the order of these.
RELATIVES = {
    "DebertaV2ForPreTraining": transformers.DebertaV2ForMaskedLM,
    "ElectraForJointPreTraining": transformers.ElectraForPreTraining,
}
MODELS = [name for name in models.__all__ if hasattr(getattr(models, name), "forward")]


@pytest.mark.parametrize("name", MODELS)
def test_arguments_come_in_the_parents_order(name):
    """With the parent's names, kinds and defaults, and what it says of other keywords."""
    ours = getattr(models, name)
    parent = RELATIVES.get(name) or parent_of(ours)
    theirs, found = (
        [*inspect.signature(kind.forward).parameters.values()] for kind in (parent, ours)
    )
    assert theirs.pop().kind is found[-1].kind is inspect.Parameter.VAR_KEYWORD
    for one, other in zip(theirs, found, strict=False):
        assert (one.name, one.kind) == (other.name, other.kind)
        assert one.default == other.default
    said = inspect.signature(parent.forward).parameters["kwargs"].annotation
    assert found[-1].annotation == said


@pytest.mark.parametrize("name", MODELS)
def test_each_argument_may_come_by_position(name):
    if name == "EncoderDecoderModel":
        config = EncoderDecoderConfig.from_encoder_decoder_configs(*[small_config("bert")] * 2)
        config.update(dict(decoder_start_token_id=1, pad_token_id=0))
    elif name == "ElectraForJointPreTraining":
        config = models.ElectraJointConfig.from_discriminator(
            small_config("electra"), generator_size=1.0
        )
    elif name == "DebertaV2ForPreTraining":
        config = small_config("deberta_v2")
    else:
        config = config_of(name)
    model = getattr(models, name)(config).eval()
    like = {"ElectraForJointPreTraining": "ElectraForMaskedLM"}.get(name, name)
    like = "ElectraForPreTraining" if name == "DebertaV2ForPreTraining" else like
    given = inputs_of(like, getattr(config, "discriminator", config), PADDINGS["right"])
    order = inspect.signature((RELATIVES.get(name) or parent_of(type(model))).forward).parameters
    names = [one for one in order if one not in ("self", "kwargs")]
    last = max(names.index(one) for one in given)
    defaults = [order[one].default for one in names[: last + 1]]
    torch.manual_seed(0)
    expected = model(**given)
    torch.manual_seed(0)
    values = [given.get(one, other) for one, other in zip(names, defaults, strict=False)]
    out = model(*values)
    assert same([out[0]], [expected[0]])
    with pytest.raises(TypeError, match="multiple values"):
        model(*values, **{names[0]: values[0]})


#: The arguments that our classes add; their docstrings say what these mean. Others read from a
#: signature which labels, caches and encoders a model takes.
ADDED = {
    *("unpad", "decoder_unpad", "output_rows", "read_rows", "extra_rows", "encoder_rows", "lookup"),
    *("sample_index", "masked_positions", "num_items_in_batch", "num_sequences_in_batch"),
    *("output_logits", "reduction", "exclude_padding", "loss_positions"),
}


def test_a_signature_has_the_parents_names_and_those_of_our_options():
    """This holds for every model, backbones and stacks among them."""
    found = {name: getattr(models, name) for name in CLASSES}
    assert found
    kinds = {
        parent: ours for parent, ours in _base.DROP_INS.items() if "_init_weights" in dir(ours)
    }
    assert len(kinds) > len(found)
    for parent, ours in kinds.items():
        theirs = inspect.signature(parent.forward).parameters
        names = inspect.signature(ours.forward).parameters
        assert theirs.keys() <= names.keys(), ours
        assert names.keys() - theirs.keys() - {"inputs", "kwargs"} <= ADDED, ours
        one, other = [*theirs.values()][-1], [*names.values()][-1]
        if one.kind is one.VAR_KEYWORD:
            assert one.annotation == other.annotation, ours


@pytest.mark.parametrize("name", [n for n in CLASSES if takes_flat_labels(n)])
def test_labels_may_come_flat(name):
    """Transformers treats flat labels as one sequence."""
    model, parent = pair(name)
    inputs = inputs_of(name, model.config, PADDINGS["right"])
    inputs["labels"] = inputs["labels"].flatten()
    single = {"loss": parent(**inputs).loss.detach()}
    with KeptDouble():
        out = {"loss": model.double()(**inputs).loss.detach()}
        gold = {"loss": parent.double()(**inputs).loss.detach()}
    check_in_fp64(out, gold, single)


@pytest.mark.parametrize(
    "name", [n for n in CLASSES if n.endswith(VOCABULARY_HEADS) and n != "ElectraForPreTraining"]
)
def test_the_loss_gets_the_number_of_labelled_rows_if_known(monkeypatch, name):
    """Given positions and next-token labels tell the number; for masked tokens it is unknown."""
    told = []
    loss = ops.linear_cross_entropy

    def record(rows, *arguments, **options):
        told.append((options["expected_targets"], rows.shape[0]))
        return loss(rows, *arguments, **options)

    monkeypatch.setattr(ops, "linear_cross_entropy", record)
    config = config_of(name)
    model, inputs = getattr(models, name)(config), inputs_of(name, config, None)
    model(**inputs)
    [(expected, rows)] = told
    masked = "masked_positions" in inspect.signature(model.forward).parameters
    assert expected == (None if masked else rows)
    if masked:
        positions = (inputs["labels"].flatten() != -100).nonzero().flatten()
        model(**inputs, masked_positions=positions)
        assert told[1] == (len(positions), len(positions))


def vocabulary_heads(*others):
    """Classes with a loss over the vocabulary."""
    return [name for name in CLASSES if name.endswith((*VOCABULARY_HEADS, *others))]


# --- losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["full", "boolean"])
def test_a_mask_of_ones_or_of_booleans_equals_the_parent(hold_drop_in, padding):
    hold_drop_in(models.BertForMaskedLM, config_of("BertForMaskedLM"), padding)


#: The parents of ESM and DeBERTa multiply embeddings by the mask.
TAKE_FULL_MASKS = [n for n in LANGUAGE_MODELS.values() if not n.startswith(("Esm", "Deberta"))]


@pytest.mark.parametrize("form", ["one for all heads", "of each head", "without heads"])
@pytest.mark.parametrize("name", [n for n in TAKE_FULL_MASKS if not n.startswith("OpenAI")])
def test_a_mask_of_every_token_for_every_token_equals_the_parents(hold, name, form):
    """With such a mask padding cannot be left out. Google's BERT has masks [B, F, T], without H."""
    inputs = inputs_of(name, config_of(name), None)
    of = "decoder_attention_mask" if has_decoder(name) else "attention_mask"
    heads, length = 2 if form == "of each head" else 1, inputs["labels"].shape[1]
    mask = (torch.rand(ROWS, heads, length, length) < 0.6) | torch.eye(length).bool()

    def run(model):
        given = mask[:, 0].long() if form == "without heads" else mask
        return loss_of(**inputs, **{of: given})(model)

    def parent_run(model):
        dtype = next(model.parameters()).dtype
        added = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        return loss_of(**inputs, **{of: added})(model)

    model, parent = pair(name)
    with record_decisions() as decisions:
        run(model)
    dense = [one for one in decisions if one.op == "attention" and "bool[" in one.arguments]
    fused = 0 if name.startswith("MPNet") else 2  # whose own attention runs then
    assert len(dense) == fused, "both layers are fused"
    hold(model, parent, run, parent_run)


@pytest.mark.parametrize("name", ["BertForQuestionAnswering"])
def test_such_a_mask_says_of_no_token_that_it_is_padding(name):
    model, inputs = getattr(models, name)(config_of(name)), inputs_of(name, config_of(name), None)
    mask = torch.ones(ROWS, 1, LENGTH, LENGTH, dtype=torch.bool)
    with pytest.raises(ArgumentValueError, match="`exclude_padding` got True with a mask of shape"):
        model(**inputs, attention_mask=mask, exclude_padding=True)


@pytest.mark.parametrize("name", [n for n in CLASSES if takes(n, "masked_positions")])
def test_given_positions_are_those_of_the_labels(hold, name):
    model, _ = pair(name)
    inputs = inputs_of(name, model.config, PADDINGS["right"])
    positions = (inputs["labels"].flatten() != -100).nonzero().flatten()
    positions = torch.cat((positions, positions.new_full((5,), -1)))
    hold(model, model, loss_of(**inputs, masked_positions=positions), loss_of(**inputs))


@pytest.mark.parametrize("kind", [int, torch.tensor])
@pytest.mark.parametrize(
    "name",
    [n for n in CLASSES if takes(n, "num_items_in_batch") and not n.endswith("DoubleHeadsModel")],
)
def test_accumulated_batches_are_one_batch(hold, name, kind):
    """The batches have unequal numbers of labels, so that a mean of means would be wrong."""
    model, _ = pair(name)
    inputs = inputs_of(name, model.config, PADDINGS["right"])
    labels = inputs["labels"]
    if name.endswith(("CausalLM", "LMHeadModel")) and name != "BartForCausalLM":
        labels = labels[:, 1:]
    counts = {"num_items_in_batch": kind(int((labels != -100).sum()))}
    if takes(name, "num_sequences_in_batch"):
        counts["num_sequences_in_batch"] = kind(ROWS)

    def accumulated(model):
        loss = 0.0
        for rows in (slice(0, 1), slice(1, ROWS)):
            piece = {
                key: value[rows] if isinstance(value, torch.Tensor) else value
                for key, value in inputs.items()
            }
            loss = loss + model(**piece, **counts).loss
        return {"loss": loss}

    hold(model, model, accumulated, loss_of(**inputs))


@pytest.mark.parametrize("name", vocabulary_heads("SequenceClassification", "TokenClassification"))
def test_without_labels_loss_and_gradients_are_0(name):
    model = pair(name)[0].train()
    inputs = inputs_of(name, model.config, PADDINGS["right"])
    for other in ("next_sentence_label", "sentence_order_label", "mc_labels"):
        inputs.pop(other, None)
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    # A classifier's mean over no labels is NaN, like its parent's.
    cases = [{"num_items_in_batch": torch.tensor(7)}]
    if not name.endswith("Classification"):
        cases += [{}, {"num_items_in_batch": 0}]
    if takes(name, "masked_positions"):
        cases.append({"masked_positions": torch.full((3,), -1)})
    head = model.get_output_embeddings() if name.endswith(VOCABULARY_HEADS) else None
    for case in cases + cases:
        model.zero_grad()
        loss = model(**inputs, **case).loss
        loss.backward()
        assert loss.item() == 0.0
        assert not any(grad.any() for grad in gradients(model).values())
        if case is cases[-1] and head is not None:
            # A head with a hook is called; the loss then counts the labels itself.
            head.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("name", vocabulary_heads())
def test_with_labels_logits_are_those_of_the_parent_but_in_training(name):
    """Also where only some of a model's labels are given, in any mode."""
    config = config_of(name)
    config.use_cache = False
    model, parent = pair(name, config)
    inputs = inputs_of(name, model.config, PADDINGS["right"])
    logits = "prediction_logits" if takes(name, "num_sequences_in_batch") else "logits"
    for training in (True, False):
        model.train(training)
        theirs = parent(**inputs, return_dict=False)
        for asked in (True, False, None):
            out = model(**inputs, output_logits=asked)
            assert getattr(out, "past_key_values", None) is None
            if not (not training if asked is None else asked):
                assert getattr(out, logits) is None
                continue
            requested = model(**inputs, output_logits=asked, return_dict=False)
            assert isinstance(requested, tuple)
            assert [value.shape for value in requested] == [value.shape for value in theirs]
            assert requested[0].item() == out.loss.item()


@pytest.mark.parametrize("labelled", ["labels", "pairs"])
@pytest.mark.parametrize("name", ["AlbertForPreTraining", "BertForPreTraining"])
def test_either_loss_alone(hold, name, labelled):
    """The parents have a loss only with both kinds of labels."""
    ours, parent = pair(name)
    inputs = inputs_of(name, ours.config, PADDINGS["right"])
    targets = {"labels": inputs.pop("labels"), ours._pair_label: inputs.pop(ours._pair_label)}
    targets[ours._pair_label][3] = -100
    given = "labels" if labelled == "labels" else ours._pair_label

    def run(model):
        out = model(**inputs, **{given: targets[given]}, output_logits=False)
        assert out.prediction_logits is None
        return {"loss": out.loss, "pairs": out[ours._pair_logits]}

    def parent_run(model):
        out = model(**inputs)
        logits = out.prediction_logits.flatten(0, 1)
        logits = logits if labelled == "labels" else out[ours._pair_logits]
        loss = torch.nn.functional.cross_entropy(logits, targets[given].flatten())
        return {"loss": loss, "pairs": out[ours._pair_logits]}

    hold(ours, parent, run, parent_run)
    assert ours(**inputs, **{given: targets[given]}).prediction_logits is not None
    with pytest.raises(ArgumentValueError, match=f"{name}: `{ours._pair_label}`"):
        ours(**inputs, **{ours._pair_label: torch.zeros(ROWS + 1, dtype=torch.int64)})
    with pytest.raises(ArgumentTypeError, match=f"{name}: `{ours._pair_label}`"):
        ours(**inputs, **{ours._pair_label: torch.zeros(ROWS)})


@pytest.mark.parametrize(
    "name", [n for n in CLASSES if n.endswith(("LMHeadModel", "DoubleHeadsModel"))]
)
def test_labels_on_padding_count(hold, name):
    """Padding has labels, as with labels=input_ids."""
    ours, parent = pair(name)
    mask = PADDINGS["right"]
    ids = torch.randint(4, ours.config.vocab_size, (ROWS, LENGTH)).masked_fill(mask == 0, 0)
    hold(ours, parent, loss_of(input_ids=ids, attention_mask=mask, labels=ids))


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("given", ["ids", "inputs_embeds"])
@pytest.mark.parametrize("name", [n for n in LANGUAGE_MODELS.values() if takes(n, "position_ids")])
def test_token_types_positions_and_embeddings_of_the_user(hold, name, given, padding):
    ours, parent = pair(name)
    inputs = inputs_of(name, ours.config, PADDINGS[padding])
    kinds = getattr(ours.config, "type_vocab_size", ours.config.vocab_size)
    inputs["token_type_ids"] = torch.randint(kinds, (ROWS, LENGTH))
    inputs["position_ids"] = torch.arange(LENGTH).flip(0)[None]
    ids = inputs.pop("input_ids")
    if given == "ids":
        hold(ours, parent, loss_of(ids, **inputs))
        return

    def run(model):
        return {"loss": model(inputs_embeds=model.get_input_embeddings()(ids), **inputs).loss}

    hold(ours, parent, run)
    embeds = [model.get_input_embeddings()(ids).detach() for model in (ours, parent)]
    for model, rows in zip((ours, parent), embeds, strict=True):
        model(inputs_embeds=rows.requires_grad_(), **inputs).loss.backward()
    torch.testing.assert_close(*(rows.grad for rows in embeds))
    with pytest.raises(ValueError, match="exactly one|both"):
        ours(ids, inputs_embeds=embeds[0])


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize(
    "name", [f"{n}ForSequenceClassification" for n in ("Albert", "Bert", "Electra", "OpenAIGPT")]
)
def test_positions_of_a_changed_buffer(hold, name, padding):
    """Classifiers compute the first rows only, with positions of their own."""
    ours, parent = pair(name)
    tables = [
        [m for m in each.modules() if "position_ids" in m._buffers] for each in (ours, parent)
    ]
    for module in itertools.chain(*tables):
        module.position_ids = module.position_ids.roll(3, -1)
    inputs = inputs_of(name, ours.config, PADDINGS[padding])
    hold(ours, parent, loss_of(**inputs))


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
@pytest.mark.parametrize(
    "name", [n for n in CLASSES if n.endswith("SequenceClassification") and n[:2] != "T5"]
)
def test_other_classification_losses_equal_the_parents(hold, name, problem):
    width = 1 if problem == "regression" else LABELS
    ours, parent = pair(name, config_of(name, problem_type=problem, num_labels=width))
    inputs = inputs_of(name, ours.config, PADDINGS["right"])
    inputs["labels"] = torch.rand(ROWS, width).round()
    hold(ours, parent, loss_of(**inputs))


@pytest.mark.parametrize(
    "name", ["GPT2ForSequenceClassification", "OpenAIGPTForSequenceClassification"]
)
def test_classification_without_a_padding_token_takes_one_sequence(name):
    config = config_of(name)
    config.pad_token_id = None
    ours, parent = pair(name, config)
    ids = torch.randint(4, config.vocab_size, (ROWS, LENGTH))
    torch.testing.assert_close(ours(input_ids=ids[:1]).logits, parent(ids[:1]).logits)
    for each, error in ((parent, ValueError), (ours, ArgumentValueError)):
        with pytest.raises(error, match="pad"):
            each(input_ids=ids)


# --- decoders -------------------------------------------------------------------------------------

DECODERS = ("BertLMHeadModel", "ElectraForCausalLM", "RobertaForCausalLM")
SOURCE_MASK = torch.tensor([[1] * 3 + [0] * 4, [1] * 7, [0] * 6 + [1], [1] * 5 + [0] * 2])


@pytest.mark.parametrize("states_are", ["padded", "packed", "padded, their mask unreadable"])
@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("name", (*DECODERS, "GPT2LMHeadModel"))
def test_cross_attention_with_two_paddings_equals_the_parents(
    hold, monkeypatch, name, padding, states_are
):
    """Reading a mask is not possible while a CUDA graph is captured."""
    packed = states_are == "packed"
    if states_are.endswith("unreadable"):
        monkeypatch.setattr(_ragged, "values_can_be_read", lambda mask: False)
    ours, parent = pair(name, config_of(name, add_cross_attention=True))
    inputs, mask = inputs_of(name, ours.config, PADDINGS[padding]), PADDINGS[padding]
    shown = slice(None) if mask is None else mask.bool()
    # The values of padding must have no effect.
    states = torch.randn(ROWS, 7, ours.config.hidden_size)
    states = states.masked_fill(SOURCE_MASK[..., None] == 0, 1e6)
    rows = RaggedBatch.of(SOURCE_MASK)

    def run(model, packed=False, **extra):
        given = states.to(model.dtype)
        if packed:
            extra |= {"encoder_hidden_states": rows.pack_rows(given), "encoder_rows": rows}
        else:
            extra |= {"encoder_hidden_states": given, "encoder_attention_mask": SOURCE_MASK}
        out = model(**inputs, **extra)
        return {"loss": out.loss, "logits": out.logits[shown]}

    hold(ours, parent, lambda model: run(model, packed, output_logits=True), run)


@pytest.mark.parametrize("name", DECODERS)
def test_a_cache_continues_the_positions(hold, name):
    model, _ = pair(name)
    inputs = inputs_of(name, model.config, None)
    ids = inputs["input_ids"]

    def in_two_pieces(model):
        first = model(input_ids=ids[:, :4], use_cache=True)
        out = model(input_ids=ids[:, 4:], past_key_values=first.past_key_values)
        return {"logits": torch.cat((first.logits, out.logits), 1).detach()}

    def whole(model):
        return {"logits": model(input_ids=ids).logits.detach()}

    hold(model, model, in_two_pieces, whole)
    assert model(**inputs).past_key_values is None, "with labels, only on request"
    assert model(**inputs, use_cache=True).past_key_values is not None


@pytest.mark.parametrize("padding", [None, "right", "left"])
@pytest.mark.parametrize("name", [*DECODERS, "GPT2LMHeadModel", "BartForCausalLM"])
def test_labels_beside_a_cache_equal_the_parents(hold, name, padding):
    """As in prefix tuning, where what the cache holds is trained."""
    ours, parent = pair(name)
    inputs = inputs_of(name, ours.config, None if padding is None else PADDINGS[padding])
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    seen = None if mask is None else mask[:, :3]
    rest = {"input_ids": ids[:, 3:], "labels": inputs["labels"][:, 3:].clone()}
    rest["attention_mask"] = mask

    def run(model):
        first = model(input_ids=ids[:, :3], use_cache=True, attention_mask=seen)
        return {"loss": model(**rest, past_key_values=first.past_key_values).loss}

    hold(ours, parent, run)


def replaced_forward(layer):
    """Change what a layer returns; the result undoes it."""
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: other(forward(*args, **kwargs))
    return lambda: vars(layer).pop("forward")


def forward_hook(layer):
    return layer.register_forward_hook(lambda *given: other(given[-1])).remove


def other(out):
    """Change the first tensor of what a module returns."""
    if isinstance(out, (tuple, list)):
        return type(out)((other(out[0]), *out[1:]))
    tensor = isinstance(out, torch.Tensor) and out.is_floating_point()
    return 1.5 * out + out.square() / 8 if tensor else out  # a softmax would not see a constant


@pytest.mark.parametrize("change", [forward_hook, replaced_forward])
@every_class
def test_every_module_that_the_parent_calls_may_be_changed(name, change):
    """Each hook and replaced ``forward`` changes the loss as in the parent."""
    ours, parent = pair(name)
    padding = "none" if name == "ModernBertForQuestionAnswering" else "right"
    inputs, called = inputs_of(name, ours.config, PADDINGS[padding]), {}
    hooks = [
        layer.register_forward_hook(lambda *_, path=path: called.setdefault(path))
        for path, layer in parent.named_modules()
    ]
    parent(**inputs)
    for hook in hooks:
        hook.remove()
    # Fused attention has no weights, and a model returns a class of its own.
    paths = [path for path in called if path and not path.endswith(("attn_dropout", ".dropout"))]
    paths = [p for p in paths if not isinstance(parent.get_submodule(p), PreTrainedModel)]
    for path in paths:
        results = []
        for model in (ours, parent):
            undo = change(model.get_submodule(path))
            with torch.no_grad():
                out = model(**inputs)
            undo()
            results.append(next(out[key] for key in ("loss", "last_hidden_state") if key in out))
        if results[0].dim():  # of tokens
            results = [result[:, 0] for result in results]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5, msg=f"{name}: {path}")


def seen_by_a_hook(model, path, inputs):
    """What a module returns, in each of its calls."""
    seen: list[torch.Tensor] = []
    hook = model.get_submodule(path).register_forward_hook(
        lambda _, __, out: seen.append(out if torch.is_tensor(out) else out[0])
    )
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return seen


@every_class
def test_hooks_see_the_parents_rows_when_these_are_asked_for(name):
    """As docs/faq.md says: ``unpad=False`` keeps padding, and with hidden states the last layer
    computes all rows."""
    ours, parent = pair(name)
    inputs = inputs_of(name, ours.config, PADDINGS["right"])
    asked = {**inputs, "unpad": False, "output_hidden_states": True}
    kinds = GradientCheckpointingLayer, torch.nn.Embedding
    for path in [path for path, one in parent.named_modules() if isinstance(one, kinds)]:
        if path.endswith("relative_attention_bias"):
            continue  # the op reads the table, where the parent looks up all pairs of tokens
        found = seen_by_a_hook(ours, path, asked)
        expected = seen_by_a_hook(parent, path, inputs)
        assert [one.shape for one in found] == [one.shape for one in expected], path
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one[:, 0], other[:, 0], rtol=1e-4, atol=1e-5, msg=path)


# --- generation -----------------------------------------------------------------------------------

SEARCHES = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 10},
}
CACHES = {
    "no cache": {"use_cache": False},
    "dynamic cache": {"use_cache": True},
    "static cache": {"cache_implementation": "static", "use_cache": True, "disable_compile": True},
}
GENERATE = (*DECODERS, "BartForCausalLM", "OpenAIGPTLMHeadModel", "GPT2LMHeadModel")
GENERATE += ("BartForConditionalGeneration", "T5ForConditionalGeneration")


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize(
    ("name", "padding", "cache"),
    [
        (name, padding, cache)
        for name in GENERATE
        for padding in (("right", "left") if has_decoder(name) else ("left",))
        for cache in CACHES
        if cache != "static cache" or name in GENERATE[-3:]
        if cache != "dynamic cache" or not name.startswith("OpenAIGPT")
    ],
)
def test_generation_gives_the_parents_tokens(name, padding, cache, search):
    changed = {}
    if name.startswith("T5"):
        # With a tied head or small weights, all tokens would be equal.
        changed = {"tie_word_embeddings": False, "scale_decoder_outputs": False}
        changed |= {"is_gated_act": True, "dense_act_fn": "gelu_new", "initializer_factor": 3.0}
    config = config_of(name) if not changed else small_config("t5", **changed)
    inputs = inputs_of(name, config, PADDINGS[padding])
    options = {"max_new_tokens": 8, "eos_token_id": None, "forced_eos_token_id": None}
    options |= {**CACHES[cache], **SEARCHES[search]}
    prompt = {key: inputs[key] for key in ("input_ids", "attention_mask")}

    def generate(model):
        torch.manual_seed(0)
        return model.generate(**prompt, **options)[:, -8:]

    for _ in range(20):  # some random weights repeat one token
        ours, parent = pair(name, config)
        expected = generate(parent)
        if expected.unique().numel() > 2:
            break
    else:
        pytest.fail("no model generates different tokens")
    assert expected.shape == (ROWS, 8)
    assert torch.equal(generate(ours), expected)


@pytest.mark.parametrize("name", [*LANGUAGE_MODELS.values(), "BertLMHeadModel", "BartForCausalLM"])
def test_the_loss_of_each_label_adds_up_to_the_mean(name):
    """The gradients add up, too: both reductions add the same numbers."""
    model, _ = pair(name)
    inputs = inputs_of(name, model.config, PADDINGS["right"])
    mean = model(**inputs).loss
    expected = gradients(model, mean)
    each = model(**inputs, reduction="none").loss
    labelled = inputs["labels"] != -100
    if name.endswith("LMHeadModel"):
        labelled = labelled[:, 1:]  # each token is predicted from those before it
    assert each.shape == (int(labelled.sum()),) and each.dtype is torch.float32
    assert torch.equal(each.sum() / len(each), mean)
    assert torch.equal(model(**inputs, reduction="none", num_items_in_batch=7).loss, each)
    found = gradients(model, each.sum() / len(each))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    with pytest.raises(ArgumentValueError, match="`reduction` got 'sum'; expected mean | none"):
        model(**inputs, reduction="sum")


def test_the_loss_of_each_label_comes_in_the_order_of_the_positions():
    model, parent = pair("BertForMaskedLM")
    inputs = inputs_of("BertForMaskedLM", model.config, PADDINGS["right"])
    labels = inputs["labels"]
    positions = torch.cat(
        ((labels.flatten() != -100).nonzero().flatten().flip(0), torch.tensor([-1]))
    )
    given = {"masked_positions": positions, "reduction": "none"}
    single = {"loss": _loss_at(parent, inputs, positions[:-1])}
    with KeptDouble():
        loss = model.double()(**inputs, **given).loss
        gold = {"loss": _loss_at(parent.double(), inputs, positions[:-1])}
    assert loss[-1] == 0
    check_in_fp64({"loss": loss[:-1].detach()}, gold, single)


def _loss_at(parent, inputs, positions):
    logits = parent(**{key: value for key, value in inputs.items() if key != "labels"}).logits
    targets = inputs["labels"].flatten()[positions]
    rows = logits.detach().flatten(0, 1)[positions]
    return torch.nn.functional.cross_entropy(rows, targets, reduction="none")


@pytest.mark.parametrize("name", TAKE_FULL_MASKS)
def test_full_masks_are_read_by_what_they_mean_or_refused(name):
    model, _ = pair(name)
    ids = torch.randint(4, 37, (2, LENGTH))
    seen = torch.ones(2, LENGTH, LENGTH, dtype=torch.bool).tril()
    given = {"decoder_input_ids": ids} if has_decoder(name) else {}

    def run(mask):
        with torch.no_grad():
            return model(ids, attention_mask=mask, **given).logits

    expected = run(seen[:, None])
    for dtype in (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32):
        assert torch.equal(run(seen.to(dtype)), expected)
        if not dtype.is_floating_point:
            assert torch.equal(run(seen[:, None].to(dtype)), expected)
    for lowest in (-torch.inf, torch.finfo(torch.float32).min, -1e4):
        added = torch.zeros(seen.shape).masked_fill(~seen, lowest)
        for mask in (added, added[:, 2]):
            with pytest.raises(ArgumentValueError, match="attention_mask.*mask == 0"):
                run(mask)
        torch.testing.assert_close(run(added[:, None]), expected)
    for mask in (-(~seen).long(), -(~seen).long()[:, None]):
        with pytest.raises(ArgumentValueError, match="attention_mask.*mask == 0"):
            run(mask)


@pytest.mark.parametrize("padding", ["right", "left", "full"])
@every_class
def test_one_mask_may_be_that_of_all_sequences(name, padding):
    """With labels in training, with labels in evaluation, and without them."""
    config = config_of(name)
    model = getattr(models, name)(config)
    mask = PADDINGS[padding][1:2]
    inputs = inputs_of(name, config, None)
    lead = inputs["input_ids"].shape[:-1]
    cases = [inputs, {key: value for key, value in inputs.items() if "label" not in key}]
    for given, training in itertools.product(cases, (True, False)):
        model.train(training)
        for argument in ("attention_mask", "decoder_attention_mask"):
            if not takes(name, argument):
                continue
            target = given.get("decoder_input_ids", given.get("labels", given["input_ids"]))
            length = LENGTH if argument == "attention_mask" or target.dim() < 2 else target.shape[1]
            one = mask[:, :length].view(*(1 for _ in lead), length)
            every = one.expand(*lead, length).contiguous()
            try:
                expected = model(**{**given, argument: every})
            except ValueError as error:
                assert "decoder_input" in str(error) or "input_ids or" in str(error)
                continue
            found = model(**{**given, argument: one})
            assert same(
                *(
                    [v for v in each.values() if isinstance(v, torch.Tensor)]
                    for each in (found, expected)
                )
            )


@torch.no_grad()
@pytest.mark.parametrize("name", [*DECODERS, "BartForCausalLM", "GPT2LMHeadModel"])
def test_one_mask_may_be_that_of_all_sequences_after_a_cache(name):
    model = pair(name)[0]
    ids, mask = torch.randint(4, 37, (ROWS, LENGTH)), PADDINGS["left"][1:2]

    def run(mask):
        cache = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True).past_key_values
        return model(ids[:, 5:], attention_mask=mask, past_key_values=cache).logits

    assert torch.equal(run(mask), run(mask.expand(ROWS, -1)))


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@torch.no_grad()
@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
@pytest.mark.parametrize("name", [*TAKE_FULL_MASKS, *DECODERS, "BartForCausalLM"])
def test_an_additive_mask_of_another_dtype_is_converted(name, dtype):
    """Also numbers below the lowest of the model's dtype, where a query sees no key."""
    model = pair(name)[0].to(dtype)
    ids = torch.randint(4, 37, (2, LENGTH))
    added = torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(torch.rand(LENGTH, LENGTH) < 0.5, -3.0)
    given = {"decoder_input_ids": ids} if has_decoder(name) else {}
    for argument in ("attention_mask", *(["decoder_attention_mask"] if given else [])):
        expected = model(ids, **given, **{argument: added.to(dtype)}).logits
        for other in FLOATS:
            mask = added.to(other, copy=True)
            assert torch.equal(model(ids, **given, **{argument: mask}).logits, expected)
            mask[:, :, 3] = torch.finfo(other).min
            assert model(ids, **given, **{argument: mask}).logits.isfinite().all()


@pytest.mark.parametrize("labelled", [False, True])
@every_class
def test_output_rows_are_positions_or_first(name, labelled):
    """Backbones say so; a head that chooses the rows itself takes none from the caller."""
    model, _ = pair(name)
    inputs = inputs_of(name, model.config, PADDINGS["right"])
    far = PADDINGS["right"].numel()
    wrong = ["last", "First", 3, torch.zeros(2), torch.zeros(1, 2).long()]
    wrong += [torch.tensor([0, -2]), torch.tensor([9 * far])]
    if name.endswith(("SequenceClassification", "MultipleChoice", "NextSentencePrediction")):
        wrong.append(torch.zeros(2, dtype=torch.int64))
    if not labelled:
        inputs = {key: one for key, one in inputs.items() if "label" not in key}
        if name.endswith("ConditionalGeneration"):
            inputs["decoder_input_ids"] = inputs["input_ids"]
    elif name.endswith(VOCABULARY_HEADS) and name != "ElectraForPreTraining":
        wrong += ["first", torch.zeros(2, dtype=torch.int64)]
    for training, given in itertools.product((False, True), wrong):
        with pytest.raises((ArgumentTypeError, ArgumentValueError), match="`output_rows` got"):
            model.train(training)(**inputs, output_rows=given)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("family", ["albert", "bert", "electra", "roberta"])
def test_a_layers_own_chunks_keep_padding(family, training):
    """Transformers cuts a layer's rows into chunks, of which there must be a whole number."""
    pairs = [model.train(training) for model in pair(LANGUAGE_MODELS[family])]
    mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])  # 14 tokens
    ids, found = torch.randint(4, 37, mask.shape), []
    for model in pairs:
        for module in model.modules():
            if "chunk_size_feed_forward" in vars(module):
                module.chunk_size_feed_forward = 3
        found.append(model(ids, attention_mask=mask).logits[mask.bool()])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", LANGUAGE_MODELS.values())
def test_a_weight_that_is_an_attribute_of_its_module_is_obeyed(name):
    """Also in a model that is frozen: it thaws."""
    ours, parent = pair(name)
    fastplm.freeze(ours)
    mask = PADDINGS["right"]
    given = {"input_ids": torch.randint(4, 37, mask.shape), "attention_mask": mask}
    if has_decoder(name):
        given["decoder_input_ids"] = given["input_ids"]

    @torch.no_grad()
    def run(model):
        return model(**given).logits[mask.bool()]

    run(ours)
    for path, module in parent.named_modules():
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        both = module, ours.get_submodule(path)
        for each in both:
            vars(each)["weight"] = 2 * weight.detach()
        torch.testing.assert_close(run(ours), run(parent), rtol=1e-4, atol=1e-4)
        for each in both:
            del vars(each)["weight"]
