"""fastplm.models.deberta_v2 against Transformers, and DeBERTa-v3's pre-training."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from fastplm._backends import record_decisions
from fastplm.errors import ArgumentValueError, UnsupportedError
from fastplm.models import (
    DebertaV2ForMaskedLM,
    DebertaV2ForPreTraining,
    DebertaV2ForSequenceClassification,
    DebertaV2Model,
    ElectraForJointPreTraining,
    ElectraJointConfig,
)
from fastplm.models.auto import AutoModelForMaskedLM
from fastplm.pretrain.presets import configuration

from .conftest import LENGTH, PADDINGS, ROWS, as_loss, eager_parent, loss_of, small_config

HOLES = torch.tensor([[1] * 9, [1, 0, 1, 1, 0, 0, 1, 0, 0], [1, 1, 0, 1] + [0] * 5, [0, 1, 0] * 3])
MASKS = {"right": PADDINGS["right"], "left": PADDINGS["left"], "holes": HOLES}
#: What configurations of released models have; the first one is that of DeBERTa-v3.
KINDS = {
    "v3": {},
    "own projections": dict(share_att_key=False),
    "one term": dict(pos_att_type="p2c", share_att_key=False, hidden_size=16),
    "no far bucket": dict(position_buckets=40, max_relative_positions=20),
    "each distance": dict(position_buckets=-1, max_relative_positions=5),
    "no norm": dict(norm_rel_ebd="none", position_biased_input=True),
    "absolute": dict(relative_attention=False, position_biased_input=True, type_vocab_size=0),
    "new head": dict(legacy=False),
    "narrow embeddings": dict(embedding_size=8),
}


def config(**changed):
    return small_config("deberta_v2", **changed)


def batch(mask):
    ids = torch.randint(4, 37, (ROWS, LENGTH)).masked_fill(mask == 0, 0)
    chosen = (torch.rand(ROWS, LENGTH) < 0.4) & mask.bool()
    chosen[0, 1] = True
    return dict(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(~chosen, -100))


def test_masked_tokens_between_others_are_the_parents(hold):
    """They depend on the length of the batch, as the parent's do, and on no other text of it."""
    ours = DebertaV2Model(config()).eval()
    parent = eager_parent(DebertaV2Model, ours.config).eval()
    ids = batch(HOLES)["input_ids"]
    between = (HOLES.cumsum(1) > 0) & (HOLES.flip(1).cumsum(1).flip(1) > 0)
    assert (between & ~HOLES.bool()).any()

    def run(model):
        states = model(ids, attention_mask=HOLES).last_hidden_state[between]
        return {"states": states, "loss": as_loss(states)}

    hold(ours, parent, run)


@pytest.mark.parametrize("padding", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_equal_the_parents(hold, kind, padding):
    sizes = dict(hidden_size=24 if "hidden_size" not in KINDS[kind] else 16)
    made = config(**sizes, **{k: v for k, v in KINDS[kind].items() if k != "hidden_size"})
    if kind == "one term":  # 8 * 2 has a root
        made.pooler_hidden_size = 16
    if kind == "absolute":
        made.num_attention_heads = 2
    inputs = batch(MASKS[padding])
    ours = DebertaV2ForMaskedLM(made)
    with record_decisions() as decisions:
        ours(**inputs, output_logits=False)
    ran = {one.op for one in decisions}
    assert ("disentangled_attention" in ran) == (kind != "absolute")
    hold(ours, eager_parent(DebertaV2ForMaskedLM, made), loss_of(**inputs))


@pytest.mark.parametrize("padding", MASKS)
def test_only_rows_between_the_first_and_last_token_are_computed(padding):
    model, mask = DebertaV2Model(config()), MASKS[padding]
    seen = []
    model.encoder.layer[0].intermediate.register_forward_hook(
        lambda _, given, __: seen.append(given[0].shape[:2].numel())
    )
    model(batch(mask)["input_ids"], attention_mask=mask)
    spans = [row.nonzero().flatten() for row in mask]
    assert seen == [sum(int(span[-1] - span[0]) + 1 for span in spans)]


def test_the_last_layer_computes_the_rows_that_are_read(hold):
    made, inputs = config(), batch(MASKS["right"])
    model, seen = DebertaV2ForMaskedLM(made).train(), []
    last = model.deberta.encoder.layer[-1].output.dense
    last.register_forward_hook(lambda _, given, __: seen.append(given[0].shape[:-1].numel()))
    model(**inputs)
    assert seen == [int((inputs["labels"] != -100).sum())]
    last._forward_hooks.clear()
    hold(model, eager_parent(DebertaV2ForMaskedLM, made), loss_of(**inputs))


def test_the_parent_computes_a_model_with_a_convolution(hold):
    made, inputs = config(conv_kernel_size=3, conv_act="gelu"), batch(MASKS["right"])
    ours, parent = DebertaV2ForMaskedLM(made), eager_parent(DebertaV2ForMaskedLM, made)
    with record_decisions() as decisions:
        hold(ours, parent, loss_of(**inputs))
    assert not any(one.op == "disentangled_attention" for one in decisions)


def test_the_loss_of_texts_by_default(hold):
    """In fp32 as in the parent, with the labels of a configuration that names no problem."""
    made = config(problem_type=None, num_labels=3)
    ours = DebertaV2ForSequenceClassification(made).eval()
    parent = eager_parent(DebertaV2ForSequenceClassification, made).eval()
    parent.load_state_dict(ours.state_dict())
    inputs = batch(MASKS["right"]) | {"labels": torch.tensor([0, 2, 1, 2])}
    found = [model(**inputs) for model in (ours, parent)]
    for name in ("loss", "logits"):
        torch.testing.assert_close(*(getattr(one, name) for one in found))


def test_dropout_is_that_of_packed_and_padded_rows():
    made = config(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.2)
    model, inputs = DebertaV2ForMaskedLM(made).train(), batch(MASKS["right"])
    index, losses = torch.tensor([3, 2**40, 0, 17]), []
    for unpad in (None, 30):
        torch.manual_seed(0)
        losses.append(model(**inputs, sample_index=index, unpad=unpad).loss)
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("padding", MASKS)
def test_labels_of_padding_count(hold, padding):
    """In the parent a masked token attends to all tokens alike."""
    made, inputs = config(), batch(MASKS[padding])
    inputs["labels"] = torch.randint(4, 37, (ROWS, LENGTH))
    hold(DebertaV2ForMaskedLM(made), eager_parent(DebertaV2ForMaskedLM, made), loss_of(**inputs))


def test_a_capacity_reads_no_value_and_refuses_a_label_of_padding():
    model = DebertaV2ForMaskedLM(config()).eval()
    inputs = batch(MASKS["right"]) | {"output_logits": False}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs, unpad=30).loss, model(**inputs).loss)
    row, column = (MASKS["right"] == 0).nonzero()[0]
    inputs["labels"][row, column] = 5
    with pytest.raises(RuntimeError, match="a masked token of DeBERTa has a label"):
        compiled(**inputs, unpad=30)


@pytest.mark.parametrize("legacy", [True, False])
def test_the_weights_may_be_those_of_a_functional_call(legacy):
    model = DebertaV2ForMaskedLM(config(legacy=legacy)).eval()
    weights = {name: 2 * one.detach() for name, one in model.named_parameters()}
    inputs = batch(MASKS["right"])
    found = torch.func.functional_call(model, weights, kwargs=inputs).loss
    model.load_state_dict(weights, strict=False)
    torch.testing.assert_close(found, model(**inputs).loss)


def test_the_name_stays_refused_in_transformers_and_auto_classes_are_drop_ins():
    with pytest.raises(UnsupportedError, match="its attention does not go through"):
        transformers.AutoModel.from_config(config(), attn_implementation="fastplm")
    assert type(AutoModelForMaskedLM.from_config(config())) is DebertaV2ForMaskedLM


# --- pre-training ---------------------------------------------------------------------------------


def joint(sharing, family="deberta-v2", **options):
    if family == "electra":
        of = small_config("electra", embedding_size=24, hidden_size=24)
    else:
        of = config(legacy=False, num_hidden_layers=2)
    made = ElectraJointConfig.from_discriminator(
        of, generator_size=0.5, embedding_sharing=sharing, **options
    )
    return ElectraForJointPreTraining(made)


def words(part):
    return part.get_input_embeddings().weight


@pytest.mark.parametrize("padding", MASKS)
@pytest.mark.parametrize("family", ["electra", "deberta-v2"])
def test_gradient_disentangled_sharing_is_its_definition(hold, family, padding):
    """The discriminator reads E.detach() + Delta; E is trained by the generator alone."""
    model = joint("gdes", family)
    nn.init.normal_(words(model.discriminator), std=0.3)
    inputs = batch(MASKS[padding])
    inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["labels"] != -100, 1)
    inputs["sample_index"] = torch.tensor([3, 2**40, 0, 17])
    replaced = model(**inputs, output_replaced_ids=True).replaced_ids
    originals = torch.where(inputs["labels"] == -100, inputs["input_ids"], inputs["labels"])
    seen = MASKS[padding].bool()

    def by_hand(model):
        generator, discriminator = model.generator, model.discriminator
        mlm = generator(
            inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=inputs["labels"]
        ).loss
        table = words(generator).detach() + words(discriminator)
        hidden = discriminator.base_model(
            inputs_embeds=nn.functional.embedding(replaced, table, padding_idx=0),
            attention_mask=inputs["attention_mask"],
        ).last_hidden_state
        scores = discriminator.logits(discriminator.features(hidden))[seen]
        targets = (replaced != originals)[seen].to(scores.dtype)
        rtd = nn.functional.binary_cross_entropy_with_logits(scores, targets)
        return {"loss": mlm + 50 * rtd}

    def run(model):
        out = model(**inputs, output_replaced_ids=True)
        assert torch.equal(out.replaced_ids, replaced)
        return {"loss": out.loss}

    hold(model, model, run, by_hand)


@pytest.mark.parametrize("sharing", ["none", "embeddings", "all", "gdes"])
def test_sharing_of_two_debertas(sharing):
    made = dict(generator_size=1.0) if sharing == "all" else dict(generator_size=0.5)
    model = ElectraForJointPreTraining(
        ElectraJointConfig.from_discriminator(config(), embedding_sharing=sharing, **made)
    )
    assert len(model.generator.deberta.encoder.layer) == 2 * made["generator_size"]
    shared = words(model.generator) is words(model.discriminator)
    assert shared == (sharing in ("embeddings", "all"))
    if sharing == "gdes":
        assert not words(model.discriminator).any() and words(model.generator).any()
    inputs = batch(MASKS["right"])
    model(**inputs).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("family", ["electra", "deberta-v2"])
def test_a_saved_discriminator_has_the_sum_of_the_tables(tmp_path, family):
    model = joint("gdes", family)
    nn.init.normal_(words(model.discriminator), std=0.3)
    table = words(model.generator) + words(model.discriminator)
    model.save_pretrained(tmp_path / "both")
    again = ElectraForJointPreTraining.from_pretrained(tmp_path / "both").eval()
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    model.save_discriminator(tmp_path / "one")
    kind = transformers.DebertaV2Model if family == "deberta-v2" else transformers.ElectraModel
    theirs = kind.from_pretrained(tmp_path / "one").eval()
    torch.testing.assert_close(words(theirs), table)
    mask, ids = MASKS["right"], batch(MASKS["right"])["input_ids"]
    both = (again.whole_discriminator().base_model, theirs)
    ours, expected = (
        one.double()(ids, attention_mask=mask).last_hidden_state[mask.bool()] for one in both
    )
    torch.testing.assert_close(ours, expected)


def test_gdes_needs_tables_of_one_size():
    narrow = config(embedding_size=8)
    with pytest.raises(ArgumentValueError, match="generator.embedding_size"):
        ElectraJointConfig(
            generator=narrow.to_dict(),
            discriminator=config().to_dict(),
            embedding_sharing="gdes",
        )


def test_a_discriminator_learns_which_tokens_were_replaced():
    model = DebertaV2ForPreTraining(config()).train()
    inputs = batch(MASKS["right"])
    inputs["labels"] = (inputs["labels"] != -100).long()
    step, losses = torch.optim.Adam(model.parameters(), 1e-2), []
    for _ in range(30):
        step.zero_grad()
        losses.append(model(**inputs).loss)
        losses[-1].backward()
        step.step()
    assert losses[-1] < losses[0] / 3


def test_the_presets_are_two_debertas():
    for size in ("tiny", "small", "base"):
        made = configuration(f"deberta-v3-{size}", vocab_size=1000)
        one, other = made.generator, made.discriminator
        assert one.num_hidden_layers * 2 == other.num_hidden_layers
        assert one.hidden_size == other.hidden_size and other.position_buckets == 256
