"""fastplm.models.electra against Transformers' ELECTRA, and the joint model against its parts."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch._dynamo.testing
import transformers
from torch import nn
from transformers import ElectraConfig

from fastplm._backends import record_decisions, use_backend
from fastplm._checks import ArgumentTypeError, ArgumentValueError
from fastplm.models import (
    ElectraForCausalLM,
    ElectraForJointPreTraining,
    ElectraForMaskedLM,
    ElectraForMultipleChoice,
    ElectraForPreTraining,
    ElectraJointConfig,
)

from .conftest import LENGTH, PADDINGS, ROWS, eager_parent, in_own_memory, small_config

VOCAB = 37
CONFIG = small_config("electra", embedding_size=16, hidden_size=32, intermediate_size=48)
MASKS = {name: mask for name, mask in PADDINGS.items() if name != "full"}
MASK_ID = 1


def config():
    return copy.deepcopy(CONFIG)


def joint_config(**fields):
    return ElectraJointConfig.from_discriminator(config(), generator_size=0.5, **fields)


def batch(mask=None):
    ids = torch.randint(2, VOCAB, (ROWS, LENGTH))
    chosen = torch.rand(ROWS, LENGTH) < 0.4
    chosen[0, 0] = True
    if mask is not None:
        chosen &= mask.bool()
    labels = ids.masked_fill(~chosen, -100)
    labels[0, 0] = 0
    return ids.masked_fill(chosen, MASK_ID), labels


def kept(tensor, mask):
    return tensor if mask is None else tensor[mask.bool()]


# --- every class ----------------------------------------------------------------------------------


def config_of(ours, **fields):
    changed = config()
    changed.is_decoder = ours is ElectraForCausalLM
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


@pytest.mark.parametrize("ours", [ElectraForMaskedLM, ElectraForPreTraining])
def test_embeddings_of_the_hidden_size_are_not_projected(hold_drop_in, ours):
    wide = config_of(ours, embedding_size=CONFIG.hidden_size)
    assert not hasattr(ours(wide).electra, "embeddings_project")
    hold_drop_in(ours, wide, "right")


@pytest.mark.parametrize("summary", ["last", "mean", "cls_index"])
def test_multiple_choice_with_any_summary_type(hold_drop_in, summary):
    """These read padding as well."""
    ours = ElectraForMultipleChoice
    hold_drop_in(ours, config_of(ours, summary_type=summary), "right")


@pytest.mark.parametrize("given", ["token_type_ids", "position_ids", "inputs_embeds"])
def test_every_input_is_packed(hold, given):
    mask = MASKS["left"]
    ids, labels = batch(mask)
    inputs = {
        "token_type_ids": {"input_ids": ids, "token_type_ids": ids % 2},
        "position_ids": {"input_ids": ids, "position_ids": torch.arange(LENGTH).flip(0)[None]},
        "inputs_embeds": {"inputs_embeds": torch.randn(ROWS, LENGTH, CONFIG.embedding_size)},
    }[given]

    def run(model):
        dtype = next(model.parameters()).dtype
        cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
        return {"loss": model(attention_mask=mask, labels=labels, **cast).loss}

    parent = eager_parent(ElectraForMaskedLM, config())
    hold(ElectraForMaskedLM(config()), parent, run)


# --- the decoder ----------------------------------------------------------------------------------


# --- the two halves -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
@pytest.mark.parametrize("padding", MASKS)
def test_pretraining_equals_its_parent(hold, padding, dtype):
    mask = MASKS[padding]
    ids, _ = batch(mask)
    labels = torch.rand(ROWS, LENGTH) < 0.3

    def run(model, labels, **extra):
        out = model(ids, attention_mask=mask, labels=labels, **extra)
        return {"loss": out.loss, "logits": kept(out.logits, mask)}

    hold(
        ElectraForPreTraining(config()),
        eager_parent(ElectraForPreTraining, config()),
        lambda model: run(model, labels.to(dtype), output_logits=True),
        lambda model: run(model, labels),
    )


def test_pretraining_ignores_labels_of_minus_100(hold):
    ids, _ = batch()
    labels = (torch.rand(ROWS, LENGTH) < 0.3).long()
    mask = MASKS["right"].bool()

    def run(model):
        return {"loss": model(ids, labels=labels.masked_fill(~mask, -100)).loss}

    def parent_run(model):
        logits = model(ids).logits[mask]
        target = labels[mask].to(logits.dtype)
        return {"loss": nn.functional.binary_cross_entropy_with_logits(logits, target)}

    parent = eager_parent(ElectraForPreTraining, config())
    ours = ElectraForPreTraining(config())
    hold(ours, parent, run, parent_run)
    assert ours(ids, labels=labels).logits is None
    assert ours(ids).logits.shape == (ROWS, LENGTH)
    assert ours(ids, labels=torch.full_like(labels, -100)).loss.item() == 0.0


def test_hooks_on_the_detection_layer_are_called(hold):
    """The loss reads its weight; with a hook or an adapter it calls the layer, as the parent."""
    mask = MASKS["right"]
    ids, _ = batch(mask)
    ours, parent = (
        ElectraForPreTraining(config()),
        eager_parent(ElectraForPreTraining, CONFIG),
    )
    for model in (ours, parent):
        layer = model.discriminator_predictions.dense_prediction
        layer.register_forward_hook(lambda _, __, out: 3 * out - 1)

    def run(model):
        return {"loss": model(ids, attention_mask=mask, labels=ids % 2).loss}

    hold(ours, parent, run, run)


def rows_of(module):
    """The shapes of what a module is given, from now on."""
    shapes = []
    module.register_forward_pre_hook(lambda _, arguments: shapes.append(arguments[0].shape[:-1]))
    return shapes


def test_the_discriminators_head_sees_the_tokens_alone():
    mask = MASKS["right"]
    ids, _ = batch(mask)
    model = ElectraForPreTraining(config())
    seen = rows_of(model.discriminator_predictions.dense)
    tokens = int(mask.sum())
    arguments = {"attention_mask": mask, "labels": ids % 2}
    assert model(ids, **arguments).logits is None
    out = model(ids, **arguments, output_logits=True)
    assert seen == [(1, tokens)] * 2
    assert out.logits.shape == (ROWS, LENGTH) and not out.logits[mask == 0].any()
    model(ids, **arguments, unpad=False)
    model(ids, **arguments, unpad=30)
    assert seen[2:] == [(ROWS, LENGTH), (1, 30)]


@pytest.mark.parametrize("extra", [{"output_attentions": True}, {"unpad": False}], ids=str)
def test_pretraining_on_the_padded_path_is_the_same(hold, extra):
    mask = MASKS["right"]
    ids, _ = batch(mask)

    def run(model, **extra):
        out = model(ids, attention_mask=mask, labels=ids % 2, output_logits=True, **extra)
        assert "output_attentions" not in extra or len(out.attentions) == 2
        return {"loss": out.loss, "logits": kept(out.logits, mask)}

    model = ElectraForPreTraining(config())
    hold(model, model, lambda model: run(model, **extra), run)


# --- the joint model ------------------------------------------------------------------------------


class Parts(nn.Module):
    """The objective written with the models of Transformers, their embeddings tied by hand."""

    def __init__(self, config):
        super().__init__()
        self.generator = eager_parent(ElectraForMaskedLM, config.generator)
        self.discriminator = eager_parent(ElectraForPreTraining, config.discriminator)
        theirs = self.discriminator.electra.embeddings
        ours = self.generator.electra.embeddings
        for table in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
            getattr(ours, table).weight = getattr(theirs, table).weight
        self.generator.generator_lm_head.weight = theirs.word_embeddings.weight

    def set_attn_implementation(self, name):
        self.generator.set_attn_implementation(name)
        self.discriminator.set_attn_implementation(name)

    def forward(self, ids, mask, labels, replaced_ids):
        originals = torch.where(labels == -100, ids, labels)
        mlm = self.generator(ids, attention_mask=mask, labels=labels).loss
        replaced = (replaced_ids != originals).long()
        out = self.discriminator(replaced_ids, attention_mask=mask, labels=replaced)
        return mlm, out.loss, out.logits, replaced


@pytest.mark.parametrize("padding", MASKS)
def test_the_joint_loss_is_that_of_its_parts(hold, padding):
    mask = MASKS[padding]
    ids, labels = batch(mask)
    arguments = {
        "attention_mask": mask,
        "labels": labels,
        "sample_index": torch.arange(ROWS),
        "output_replaced_ids": True,
    }
    model = ElectraForJointPreTraining(joint_config())
    with record_decisions() as decisions:
        sampled = model(ids, **arguments)
    used = [decision.op for decision in decisions]
    assert used.count("attention") == 4 and used.count("replaced_token_loss") == 1

    def run(model):
        out = model(ids, **arguments)
        assert torch.equal(out.replaced_ids, sampled.replaced_ids)
        return {"loss": out.loss, "mlm_loss": out.mlm_loss, "rtd_loss": out.rtd_loss}

    def parts_run(parts):
        mlm, rtd, _, _ = parts(ids, mask, labels, sampled.replaced_ids)
        return {"loss": mlm + 50 * rtd, "mlm_loss": mlm, "rtd_loss": rtd}

    hold(model, Parts(joint_config()), run, parts_run)
    changed = sampled.replaced_ids != torch.where(labels == -100, ids, labels)
    assert changed.any() and not changed[labels == -100].any()


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_every_backend_gives_the_joint_loss(hold, backend):
    mask = MASKS["left"]
    ids, labels = batch(mask)

    def run(model):
        index = torch.arange(ROWS)
        out = model(ids, attention_mask=mask, labels=labels, sample_index=index)
        return {"loss": out.loss, "mlm_loss": out.mlm_loss, "rtd_loss": out.rtd_loss}

    def run_on_backend(model):
        with use_backend(backend), record_decisions() as decisions:
            outputs = run(model)
        assert {decision.backend for decision in decisions} == {backend}
        return outputs

    model = ElectraForJointPreTraining(joint_config())
    hold(model, model, run_on_backend, run, in_fp64=backend == "eager")


@pytest.mark.parametrize("padding", ["none", "right"])
def test_the_counts_are_those_of_the_logits(padding):
    mask = MASKS[padding]
    ids, labels = batch(mask)
    model = ElectraForJointPreTraining(joint_config())
    arguments = {
        "attention_mask": mask,
        "labels": labels,
        "sample_index": torch.arange(ROWS),
        "output_replaced_ids": True,
    }
    prediction = model.discriminator.discriminator_predictions.dense_prediction
    with torch.no_grad():
        seen = model(ids, **arguments).replaced_ids
        # Half of the tokens are to be taken for replaced, and none at the very edge.
        logits = kept(model.discriminator(seen, attention_mask=mask).logits, mask)
        prediction.bias -= logits.quantile(0.5)
    parts = Parts(joint_config())
    parts.load_state_dict(model.state_dict())
    out = model(ids, **arguments)
    _, _, logits, replaced = parts(ids, mask, labels, out.replaced_ids)
    flagged, replaced = kept(logits > 0, mask), kept(replaced.bool(), mask)
    assert out.true_positives == (flagged & replaced).sum()
    assert out.predicted_positives == flagged.sum()
    assert out.positives == replaced.sum()
    assert out.correct == (flagged == replaced).sum()
    assert out.total == flagged.numel()
    assert 0 < out.true_positives < out.predicted_positives < out.total


def test_the_embeddings_are_one_and_of_the_discriminators_size():
    model = ElectraForJointPreTraining(joint_config())
    ours, theirs = (part.electra.embeddings for part in (model.generator, model.discriminator))
    assert ours.word_embeddings.weight is theirs.word_embeddings.weight
    assert ours.position_embeddings.weight is theirs.position_embeddings.weight
    assert ours.token_type_embeddings.weight is theirs.token_type_embeddings.weight
    assert model.generator.generator_lm_head.weight is theirs.word_embeddings.weight
    assert ours.LayerNorm.weight is not theirs.LayerNorm.weight
    assert theirs.word_embeddings.weight.shape == (VOCAB, CONFIG.embedding_size)
    assert model.generator.config.hidden_size == CONFIG.hidden_size // 2


def force_samples(model, token):
    with torch.no_grad():
        model.generator.generator_lm_head.bias.fill_(-1e4)
        model.generator.generator_lm_head.bias[token] = 0.0


def test_a_sample_that_equals_the_original_counts_as_original():
    ids, labels = batch()
    labels[labels != -100] = 5
    model = ElectraForJointPreTraining(joint_config())
    force_samples(model, 5)
    out = model(ids, labels=labels, output_replaced_ids=True)
    assert out.positives == 0 and out.total == ROWS * LENGTH
    assert torch.equal(out.replaced_ids, torch.where(labels == -100, ids, labels))
    force_samples(model, 6)
    out = model(ids, labels=labels, output_replaced_ids=True)
    assert out.positives == (labels != -100).sum()
    assert (out.replaced_ids[labels != -100] == 6).all()
    assert torch.equal(out.replaced_ids[labels == -100], ids[labels == -100])


def test_randomly_replaced_tokens_are_restored_first():
    ids, labels = batch()
    ids[labels != -100] = 9
    model = ElectraForJointPreTraining(joint_config())
    force_samples(model, 9)
    out = model(ids, labels=labels)
    assert out.positives == ((labels != -100) & (labels != 9)).sum()


def test_no_gradient_passes_through_the_samples():
    ids, labels = batch()
    gradients = []
    for weight in (0.0, 50.0):
        torch.manual_seed(0)
        model = ElectraForJointPreTraining(joint_config(discriminator_weight=weight))
        model(ids, labels=labels, sample_index=torch.arange(ROWS)).loss.backward()
        gradients.append({n: p.grad for n, p in model.generator.named_parameters()})
    shared = ("word_embeddings", "position_embeddings", "token_type_embeddings")
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]) != any(table in name for table in shared)


def test_accumulated_half_batches_are_one_joint_batch(hold):
    mask = MASKS["right"].flip(0)
    ids, labels = batch(mask)
    index = torch.tensor([11, 5, 2**40, 3])

    def run(model, rows, **counts):
        pieces = [slice(i, i + rows) for i in range(0, ROWS, rows)]
        outs = [
            model(
                ids[piece],
                attention_mask=mask[piece],
                labels=labels[piece],
                sample_index=index[piece],
                **counts,
            )
            for piece in pieces
        ]
        return {name: sum(out[name] for out in outs) for name in ("loss", "mlm_loss", "rtd_loss")}

    counts = {
        "num_items_in_batch": (labels != -100).sum(),
        "num_tokens_in_batch": mask.sum(),
    }
    model = ElectraForJointPreTraining(joint_config())
    hold(model, model, lambda m: run(m, 2, **counts), lambda m: run(m, ROWS))
    labels[:] = -100
    labels[:, :2] = 8
    mask = torch.ones_like(mask)
    hold(model, model, lambda m: run(m, 2, num_items_in_batch=8), lambda m: run(m, ROWS))


# --- sampling -------------------------------------------------------------------------------------


def test_samples_depend_only_on_sample_index_and_position():
    mask = MASKS["right"]
    ids, labels = batch(mask)
    index = torch.tensor([7, 2**33, 1, 4])
    model = ElectraForJointPreTraining(joint_config()).eval()

    def replaced(rows, spare=0):
        pad = (0, spare)
        with torch.no_grad():
            out = model(
                nn.functional.pad(ids[rows], pad),
                attention_mask=nn.functional.pad(mask[rows], pad),
                labels=nn.functional.pad(labels[rows], pad, value=-100),
                sample_index=index[rows],
                output_replaced_ids=True,
            )
        return out.replaced_ids[:, :LENGTH]

    whole = replaced(torch.arange(ROWS))
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(replaced(order), whole[order])
    assert torch.equal(replaced(torch.tensor([1])), whole[1:2])
    seen = mask.bool()
    assert torch.equal(replaced(torch.arange(ROWS), spare=3)[seen], whole[seen])
    first, index[0] = whole[0], 8
    assert not torch.equal(replaced(torch.tensor([0]))[0], first)


def test_samples_without_an_index_differ_from_call_to_call():
    ids, labels = batch()
    model = ElectraForJointPreTraining(joint_config()).eval()
    outs = [model(ids, labels=labels, output_replaced_ids=True).replaced_ids for _ in range(2)]
    assert not torch.equal(*outs)


# --- configuration, checkpoints, training ---------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden", "heads", "size", "generator"),
    [
        (256, 4, 1 / 4, (64, 1, 256)),
        (768, 12, 1 / 3, (256, 4, 1024)),
        (1024, 16, 1 / 4, (256, 4, 1024)),
    ],
)
def test_the_generators_of_the_paper(hidden, heads, size, generator):
    discriminator = ElectraConfig(
        hidden_size=hidden, num_attention_heads=heads, intermediate_size=4 * hidden
    )
    derived = ElectraJointConfig.from_discriminator(discriminator, generator_size=size).generator
    sizes = derived.hidden_size, derived.num_attention_heads, derived.intermediate_size
    assert sizes == generator
    assert derived.num_hidden_layers == discriminator.num_hidden_layers
    assert derived.embedding_size == discriminator.embedding_size


def test_the_joint_checkpoint_resumes(tmp_path):
    ids, labels = batch()
    settings = {"discriminator_weight": 7.0, "temperature": 0.5, "sampling_seed": 3}
    model = ElectraForJointPreTraining(joint_config(**settings)).eval()
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "fastplm-electra-joint"
    assert "_attn_implementation" not in json.dumps(saved)
    back, report = ElectraForJointPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert {name: getattr(back.config, name) for name in settings} == settings
    embeddings = back.discriminator.electra.embeddings
    assert back.generator.generator_lm_head.weight is embeddings.word_embeddings.weight
    assert back.generator.config._attn_implementation == "fastplm"
    for ours, theirs in zip(model.state_dict().items(), back.state_dict().items(), strict=True):
        assert ours[0] == theirs[0] and torch.equal(ours[1], theirs[1])
    index = torch.arange(ROWS)
    pair = model, in_own_memory(back)
    losses = [m(ids, labels=labels, sample_index=index).loss for m in pair]
    assert torch.equal(*losses)


@pytest.mark.parametrize("part", ["generator", "discriminator"])
def test_each_part_loads_in_transformers_with_equal_outputs(hold, tmp_path, part):
    ids, _ = batch()
    joint = ElectraForJointPreTraining(joint_config()).eval()
    # Trained a little, so that nothing is equal by its initialisation.
    optimizer = torch.optim.SGD(joint.parameters(), 0.1)
    joint(ids, labels=batch()[1]).loss.backward()
    optimizer.step()
    getattr(joint, f"save_{part}")(tmp_path)
    auto = {
        "generator": transformers.AutoModelForMaskedLM,
        "discriminator": transformers.AutoModelForPreTraining,
    }[part]
    loaded, report = auto.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    assert type(loaded).__module__.startswith("transformers.")
    state = getattr(joint, part).state_dict()
    assert state.keys() == loaded.state_dict().keys()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, state[name]), name
    mask = MASKS["right"]
    ours = getattr(joint, part)
    hold(
        ours, loaded, lambda m: {"logits": kept(m(ids, attention_mask=mask).logits, mask).detach()}
    )


def test_resize_token_embeddings_keeps_the_sharing(tmp_path):
    model = ElectraForJointPreTraining(joint_config())
    model.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
    ids, labels = batch()
    labels[0, 0] = ids[0, 1] = VOCAB + 2
    assert model(ids, labels=labels).loss.isfinite()
    model.save_discriminator(tmp_path)
    loaded = transformers.ElectraForPreTraining.from_pretrained(tmp_path)
    assert loaded.get_input_embeddings().num_embeddings == VOCAB + 3
    word_embeddings = model.get_input_embeddings().weight
    assert model.generator.generator_lm_head.weight is word_embeddings


def test_compiled_once_for_all_batches_of_a_shape(hold):
    torch._dynamo.reset()
    mask = MASKS["right"]
    model = ElectraForJointPreTraining(joint_config())
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for step in range(2):
        ids, labels = batch(mask)
        positions = (labels.flatten() != -100).nonzero().flatten()
        arguments = {
            "attention_mask": mask.roll(step, 0),
            "labels": labels,
            "masked_positions": nn.functional.pad(positions, (0, 36 - len(positions)), value=-1),
            "sample_index": torch.arange(ROWS) + step,
            "num_items_in_batch": torch.tensor(9 + step),
            "output_replaced_ids": True,
        }
        drawn = model(ids, **arguments).replaced_ids

        def run(model, ids=ids, arguments=arguments, drawn=drawn, **more):
            out = model(ids, **arguments, **more)
            assert torch.equal(out.replaced_ids, drawn)
            return {"loss": out.loss}

        hold(model, model, lambda _, run=run: run(compiled), lambda m, run=run: run(m, unpad=False))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"labels": None}, ArgumentTypeError, "labels"),
        ({"labels": torch.zeros(ROWS, 3, dtype=torch.int64)}, ArgumentValueError, "labels"),
        ({"input_ids": torch.full((ROWS, LENGTH), VOCAB)}, ArgumentValueError, "vocabulary"),
        ({"masked_positions": torch.zeros(3)}, ArgumentTypeError, "masked_positions"),
        ({"sample_index": torch.zeros(ROWS)}, ArgumentTypeError, "sample_index"),
        ({"sample_index": torch.zeros(3).long()}, ArgumentValueError, "sample_index"),
    ],
)
def test_bad_input_raises_a_typed_error(change, error, words):
    ids, labels = batch()
    with pytest.raises(error, match=words):
        ElectraForJointPreTraining(joint_config())(**{"input_ids": ids, "labels": labels, **change})


def test_bad_configurations_raise_typed_errors():
    with pytest.raises(ArgumentValueError, match="generator_size"):
        ElectraJointConfig.from_discriminator(config(), generator_size=1.5)
    mismatched = joint_config()
    mismatched.generator.embedding_size = 8
    with pytest.raises(ArgumentValueError, match="embedding_size"):
        ElectraForJointPreTraining(mismatched)
    ids, _ = batch()
    with pytest.raises(ArgumentValueError, match="labels"):
        ElectraForPreTraining(config())(ids, labels=torch.zeros(ROWS, 2))
