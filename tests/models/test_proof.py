"""The proof of ``accelerate``: every head of every family that has no class here, and what each of
them is given."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect

import pytest
import torch
import transformers

import fastplm
import survey_models
from fastplm.errors import UnsupportedError
from fastplm.models import _base, _heads, _like, _proof
from survey_models import Case

#: The families of docs/families.md without a module here whose classes ``accelerate`` makes.
FAMILIES = """
    big_bird bigbird_pegasus blenderbot blenderbot_small layoutlm luke m2m_100 marian markuplm mbart
    megatron_bert mvp pegasus plbart rembert roc_bert roformer splinter tapas trocr xglm xmod
""".split()
#: Fields of configurations beside those of the survey.
FIELDS = {
    "blenderbot_small": {"decoder_start_token_id": 3},
    "tapas": {"type_vocab_sizes": [3, 12, 12, 2, 2, 4, 4]},
    "xmod": {"languages": ["en_XX", "de_DE"]},
}

#: Heads whose parent does not take a text alone, or has other attention: they stay as they are.
REFUSED = """
    BigBirdPegasusModel BigBirdPegasusForConditionalGeneration BigBirdPegasusForQuestionAnswering
    BigBirdPegasusForSequenceClassification LukeForEntityClassification SplinterForPreTraining
    LukeForEntityPairClassification LukeForEntitySpanClassification
""".split()


@functools.cache
def kinds(family: str) -> dict[str, type]:
    """The public models of a family, with and without heads."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    listed = {name: getattr(module, name) for name in module.__all__}
    return {
        name: kind
        for name, kind in listed.items()
        if issubclass(kind, transformers.PreTrainedModel) and "forward" in vars(kind)
    }


EVERY = [(family, name) for family in FAMILIES for name in kinds(family) if name not in REFUSED]
every = pytest.mark.parametrize(("family", "name"), EVERY)


def stock(family: str, name: str, **more) -> transformers.PreTrainedModel:
    kind = kinds(family)[name]
    decodes = "CausalLM" in name or "LMHead" in name
    fields = FIELDS.get(family, {}) | ({"is_decoder": True} if decodes else {}) | more
    case = Case(kind.config_class.model_type, kind, fields)
    torch.manual_seed(0)
    model = kind(survey_models.config_of(case)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    return model


def pair(family, name, **more):
    theirs = stock(family, name, **more)
    return theirs, fastplm.accelerate(stock(family, name, **more))


def is_made(model) -> bool:
    return any(type(module) in _base.MADE for module in model.modules())


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    values = value if isinstance(value, tuple | list) else ()
    return [one for inner in values for one in tensors(inner)]


def result(model, **inputs):
    """The outputs, or the type of the error."""
    try:
        with torch.no_grad():
            found = model(**inputs)
    except Exception as error:
        return type(error)
    return {name: tensors(value) for name, value in found.items() if tensors(value)}


def assert_alike(theirs, ours, **inputs):
    expected, found = result(theirs, **inputs), result(ours, **inputs)
    if isinstance(expected, type):
        assert isinstance(found, type) and issubclass(found, expected), (found, expected)
        return
    assert expected.keys() == found.keys()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


IDS = torch.arange(4, 28).view(3, 8)
IDS[:, -1] = 2
MASK = torch.tensor([[1] * 8, [1] * 5 + [0] * 3, [0] * 2 + [1] * 6])


@pytest.mark.parametrize(
    ("family", "name"),
    [
        (family, name)
        for family, name in EVERY
        if "decoder_input_ids" in inspect.signature(kinds(family)[name].forward).parameters
    ],
)
def test_an_encoder_decoder_takes_what_its_parent_takes(family, name):
    theirs, ours = pair(family, name)
    assert is_made(ours)
    takes = inspect.signature(theirs.forward).parameters
    labels = IDS.roll(1, 1).masked_fill(IDS % 5 == 0, -100)
    others = IDS.flip(0)[:, :6]
    rows = theirs.get_input_embeddings()(IDS).detach()
    batches = [
        {"input_ids": IDS},
        {"input_ids": IDS, "decoder_input_ids": IDS},
        {"input_ids": IDS, "decoder_input_ids": others},
        {"input_ids": IDS, "decoder_inputs_embeds": rows.flip(0)},
        {"inputs_embeds": rows},
        {"inputs_embeds": rows, "decoder_input_ids": others},
        {"encoder_outputs": (rows,)},
        {},
    ]
    if "labels" in takes and theirs.get_output_embeddings() is not None:
        batches += [{"input_ids": IDS, "labels": labels}]
        batches += [{"input_ids": IDS, "labels": labels, "decoder_input_ids": IDS}]
        batches += [{"input_ids": IDS, "labels": labels, "decoder_inputs_embeds": rows}]
        batches += [{"inputs_embeds": rows, "labels": labels}]
    for batch in batches:
        assert_alike(theirs, ours, **batch, use_cache=False)


# --- each head, and wrong ones --------------------------------------------------------------------


def planted(bug, root):
    """``_leaving``, which gives the last chance to change a class; and whether it did."""
    right, done = _like._leaving, []

    def wrong(ours, left):
        ours, forward = right(ours, left), ours.forward
        outer = issubclass(ours, type(root))
        stack = issubclass(ours, (_like._Backbone, _like._Stack))
        sides = issubclass(ours, _like._DecodesIds)

        def without_mask(self, **inputs):
            return forward(self, **inputs | {"attention_mask": None})

        def other_rows(self, **inputs):
            outputs = forward(self, **inputs)
            outputs.last_hidden_state = outputs.last_hidden_state.roll(1, -2)
            return outputs

        def undropped(self, **inputs):
            rates = [
                (one, key, rate) for _, one, key in _proof._rates(self) if (rate := vars(one)[key])
            ]
            for one, key, _ in rates:
                vars(one)[key] = 0.0
            outputs = forward(self, **inputs)
            for one, key, rate in rates:
                vars(one)[key] = rate
            return outputs

        def other_labels(self, *, labels=None, **inputs):
            return forward(self, labels=None if labels is None else labels.roll(1, -1), **inputs)

        def other_head(self, *args, **inputs):
            outputs = forward(self, *args, **inputs)
            for key in ("logits", "start_logits", "pooler_output", "last_hidden_state"):
                if outputs.get(key) is not None:
                    outputs[key] = outputs[key] * 1.01
                    break
            return outputs

        changed = {}
        if bug == "mask dropped" and (sides if root.config.is_encoder_decoder else stack):
            changed = {"forward": without_mask}
        elif bug == "other rows" and stack:
            changed = {"forward": other_rows}
        elif bug == "other dropout" and stack:
            changed = {"forward": undropped}
        elif bug == "other shift" and sides:
            changed = {"_default_decoder_ids": lambda self, ids: ids}
        elif bug == "other shift" and issubclass(ours, _heads.LanguageModel):
            changed = {"forward": other_labels}
        elif bug == "other head" and outer:
            changed = {"forward": other_head}
        done.extend(changed)
        return type(ours)(ours.__name__, (ours,), changed) if changed else ours

    return wrong, done


BUGS = "mask dropped", "other rows", "other dropout", "other shift", "other head"


def check_bugs(monkeypatch, family, name):
    for bug in BUGS:
        model = stock(family, name)
        wrong, done = planted(bug, model)
        with monkeypatch.context() as patch:
            patch.setattr(_like, "_leaving", wrong)
            with contextlib.suppress(UnsupportedError):
                fastplm.accelerate(model)
        made = [type(one).__name__ for one in model.modules() if isinstance(one, _like._Named)]
        assert not (done and is_made(model)), (bug, made)
        assert done or bug in ("other shift", "other head"), bug


@pytest.mark.slow
@every
def test_wrong_classes_are_not_proved(monkeypatch, family, name):
    check_bugs(monkeypatch, family, name)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("rembert", "RemBertForMultipleChoice"),
        ("roc_bert", "RoCBertForMaskedLM"),
        ("megatron_bert", "MegatronBertForCausalLM"),
        ("mbart", "MBartForConditionalGeneration"),
        ("mbart", "MBartForSequenceClassification"),
    ],
)
def test_a_sample_of_wrong_classes_is_not_proved(monkeypatch, family, name):
    check_bugs(monkeypatch, family, name)


# --- further inputs -------------------------------------------------------------------------------


def seen(found, mask):
    """Without what stands at padding."""
    if isinstance(found, type):
        return found
    return {
        name: [_proof._of_tokens(name, one, mask) for one in values]
        for name, values in found.items()
    }


HEADS = """
    ForSequenceClassification ForMultipleChoice ForMaskedLM ForCausalLM ForQuestionAnswering
    ForConditionalGeneration ForTokenClassification
""".split()


@every
def test_every_head_is_reached_and_each_input_has_its_effect(family, name):
    theirs, ours = pair(family, name)
    inner = theirs.base_model
    assert is_made(ours)
    if name.endswith(tuple(HEADS)) and name != "LukeForMaskedLM":  # which masks entities, too
        assert type(ours) in _base.MADE
    given = _proof._choices(theirs, {"input_ids": IDS})
    if "decoder_input_ids" in inspect.signature(theirs.forward).parameters:
        given["decoder_input_ids"] = IDS
    plain = [tensors(model(**given, return_dict=False)) for model in (theirs, ours)]
    torch.testing.assert_close(plain[1], plain[0], rtol=1e-4, atol=1e-4)
    if theirs.config.is_encoder_decoder:  # whose inputs are above
        classifies = name.endswith("ForSequenceClassification")
        assert classifies == isinstance(ours, _like.LastEosClassification)
        return
    names = inspect.signature(theirs.forward).parameters
    within = inspect.signature(inner.forward).parameters
    for more, values in _proof._further(theirs, 7).items():
        models = (theirs, ours) if more in names else (inner, ours.base_model)
        if more not in names and more not in within:
            continue
        for mask in (None, torch.tensor(_proof._MASKS[0])):
            ids = torch.arange(4, 44).view(5, 8)
            given = {"input_ids": ids, "attention_mask": mask} | values
            if mask is not None:
                given["input_ids"] = ids.masked_fill(mask == 0, 1)
            given = _proof._without_ids(given, more)
            given = {key: one for key, one in given.items() if one is not None}
            given = _proof._choices(models[0], given)
            mask = given.get("attention_mask")
            expected, found = (seen(result(model, **given), mask) for model in models)
            if isinstance(expected, type):
                assert isinstance(found, type) and issubclass(found, expected), more
            else:
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=more)


def wrappers():
    for family in FAMILIES:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        names = (name for name in vars(module) if name.endswith("DecoderWrapper"))
        yield from ((module, name) for name in names if family != "bigbird_pegasus")


@pytest.mark.parametrize(
    ("module", "name"), list(wrappers()), ids=lambda one: str(one).split(".")[-1]
)
def test_the_decoder_of_a_wrapper_is_replaced(module, name):
    """A wrapper hands on all that it is given, and has no embeddings of its own."""
    kind = getattr(module, name)
    fields = {"is_decoder": True, "is_encoder_decoder": False}
    case = Case(kind.config_class.model_type, kind, fields)
    torch.manual_seed(0)
    theirs = kind(survey_models.config_of(case)).eval()
    ours = fastplm.accelerate(copy.deepcopy(theirs))
    assert type(ours.decoder) in _base.MADE
    for mask in (None, MASK):
        ids = IDS if mask is None else IDS.masked_fill(mask == 0, 1)
        found, expected = (
            model(ids, attention_mask=mask, use_cache=False)[0] for model in (ours, theirs)
        )
        tokens = torch.ones_like(IDS).bool() if mask is None else mask.bool()
        torch.testing.assert_close(found[tokens], expected[tokens])


CROSSED = [
    ("fastplm", name)
    for name in """
        BertLMHeadModel BertModel RobertaForCausalLM ElectraForCausalLM CamembertForCausalLM
        XLMRobertaForCausalLM XLMRobertaXLForCausalLM ErnieForCausalLM Data2VecTextForCausalLM
        RobertaPreLayerNormForCausalLM GPT2LMHeadModel BartForCausalLM
    """.split()
] + [
    (family, name)
    for family, name in EVERY
    if "CausalLM" in name
    and "encoder_hidden_states" in inspect.signature(kinds(family)[name].forward).parameters
]


@pytest.mark.parametrize(("family", "name"), CROSSED)
def test_cross_attention_obeys_the_encoders_mask_as_the_parent_does(family, name):
    """Without a cache and with one: what a model learns is what it generates with."""
    fields = {"is_decoder": True, "add_cross_attention": True}
    if family == "fastplm":
        kind = getattr(transformers, name)
        case = Case(kind.config_class.model_type, kind, fields)
        torch.manual_seed(0)
        theirs = kind(survey_models.config_of(case)).eval()
        ours = fastplm.accelerate(copy.deepcopy(theirs))
    else:
        theirs, ours = pair(family, name, **fields)
        assert is_made(ours)
    config = theirs.config
    width = getattr(config, "cross_attention_hidden_size", None) or config.hidden_size
    states = torch.randn(3, 6, width, generator=torch.Generator().manual_seed(3))
    padded = torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [0] * 2 + [1] * 4])
    for keys in (None, padded):
        for mask in (None, MASK):
            given = {"encoder_hidden_states": states, "encoder_attention_mask": keys}
            ids = IDS if mask is None else IDS.masked_fill(mask == 0, 1)
            expected, found = (in_two(model, ids, mask, given) for model in (theirs, ours))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def in_two(model, ids, mask, given):
    """The rows of tokens in one call, and in two with a cache."""
    tokens = torch.ones_like(ids).bool() if mask is None else mask.bool()
    part, found = None if mask is None else mask[:, :3], []
    # Some parents take states of as many rows as tokens alone, or keep the first keys of both
    # attentions in one place.
    with torch.no_grad(), contextlib.suppress(RuntimeError):
        found += [model(ids, attention_mask=mask, use_cache=False, **given)[0][tokens]]
        first = model(ids[:, :3], attention_mask=part, use_cache=True, **given)
        cache = {_base.CACHE: first[_base.CACHE]}
        second = model(ids[:, 3:], attention_mask=mask, **cache, **given)
        found += [torch.cat((first[0], second[0]), 1)[tokens]]
    return found


def test_the_cells_of_a_table_count_their_own_positions():
    """TAPAS begins to count anew in each cell that the token types give."""
    theirs, ours = pair("tapas", "TapasForSequenceClassification")
    types = torch.zeros(3, 8, 7, dtype=torch.int64)
    types[:, 3:, 0] = 1
    types[:, 3:, 1] = torch.tensor([1, 1, 2, 2, 2])
    types[1:, 3:, 2] = torch.tensor([1, 1, 1, 2, 2])
    for mask in (None, MASK):
        given = {"input_ids": IDS, "attention_mask": mask, "token_type_ids": types}
        torch.testing.assert_close(ours(**given).logits, theirs(**given).logits)


def test_sparse_attention_stays_sparse():
    """BigBird's becomes full for good at the first short text, as those of the proof are."""
    model = stock("bigbird_pegasus", "BigBirdPegasusModel", attention_type="block_sparse")
    with contextlib.suppress(UnsupportedError):
        fastplm.accelerate(model)
    assert model.encoder.attention_type == "block_sparse"
