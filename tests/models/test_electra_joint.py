"""The joint model's options, each against its definition in terms of Transformers' models."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
import transformers
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from transformers import Trainer, TrainingArguments

from fastplm._checks import ArgumentTypeError, ArgumentValueError, UnsupportedError
from fastplm.models import ElectraForJointPreTraining, ElectraJointConfig, electra_joint
from fastplm.nn import TokenMasker
from fastplm.reference.linear_cross_entropy import sample_ref
from fastplm.reference.philox import Stream, draw
from fastplm.testing import FORWARD_FACTOR, check_error, check_in_fp64

from .conftest import in_own_memory, small_config

VOCAB, ROWS, LENGTH, MASK_ID = 37, 4, 9, 1
MASK = torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [1] * 8 + [0], [1] * 3 + [0] * 6])
INDEX = torch.tensor([3, 2**40, 0, 17])
COUNTS = torch.arange(VOCAB) % 5  # some tokens never occur

#: Every option once; what they do not name is the default.
OPTIONS = {
    "default": {},
    "no sharing": {"embedding_sharing": "none"},
    "all shared": {"embedding_sharing": "all"},
    "ELECTRA 15%": {"objective": "rtd_masked"},
    "replace MLM": {"objective": "replace_mlm"},
    "all-tokens MLM": {"objective": "all_tokens_mlm"},
    "unigram": {"generator_type": "unigram"},
    "first stage": {"stage": 1, "embedding_sharing": "none"},
    "second stage": {"stage": 2, "embedding_sharing": "none"},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def joint_config(**options):
    encoder = small_config("electra", embedding_size=16, hidden_size=32, intermediate_size=48)
    equal = options.get("embedding_sharing") == "all" or options.get("stage")
    return ElectraJointConfig.from_discriminator(
        encoder, generator_size=1 if equal else 0.5, **options
    )


def build(**options):
    model = ElectraForJointPreTraining(joint_config(**options))
    if model.generator is None:
        model.set_token_counts(COUNTS)
    return model


def batch(mask=MASK):
    ids = torch.randint(2, VOCAB, (ROWS, LENGTH))
    chosen = (torch.rand(ROWS, LENGTH) < 0.4) & mask.bool()
    chosen[:, 0] = True  # every row has labels, and different numbers of them
    return ids.masked_fill(chosen, MASK_ID), ids.masked_fill(~chosen, -100)


class Reference(nn.Module):
    """The objectives as the paper writes them: all logits, plain losses, boolean indexing."""

    def __init__(self, config):
        super().__init__()
        self.config = config

        def plain(kind, config):
            return kind._from_config(copy.deepcopy(config), attn_implementation="eager")

        generator, discriminator = transformers.ElectraForMaskedLM, transformers.ElectraForMaskedLM
        if config.objective.startswith("rtd"):
            discriminator = transformers.ElectraForPreTraining
        if config.generator_type == "model":
            self.generator = plain(generator, config.generator)
        else:
            self.register_buffer("token_counts", COUNTS)
        self.discriminator = plain(discriminator, config.discriminator)
        if config.objective == "all_tokens_mlm":
            self.copy_head = nn.Linear(config.discriminator.hidden_size, 1)
        if config.generator_type == "model" and config.embedding_sharing != "none":
            ours, theirs = self.generator.electra, self.discriminator.electra
            if config.embedding_sharing == "all":
                self.generator.electra = theirs
            for table in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
                getattr(ours.embeddings, table).weight = getattr(theirs.embeddings, table).weight
            self.generator.generator_lm_head.weight = theirs.embeddings.word_embeddings.weight

    def set_attn_implementation(self, name):
        self.discriminator.set_attn_implementation(name)
        if self.config.generator_type == "model":
            self.generator.set_attn_implementation(name)

    def forward(self, ids, mask, labels, index):
        config, chosen = self.config, labels != -100
        if config.generator_type == "unigram":
            mlm, samples = None, self.unigram_samples(index)
        else:
            with torch.set_grad_enabled(config.stage != 2):
                logits = self.generator(ids, attention_mask=mask).logits
                mlm = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            samples = sample_ref(
                logits.flatten(0, 1),
                torch.eye(VOCAB, dtype=logits.dtype),
                labels.flatten(),
                temperature=config.temperature,
                seed=config.sampling_seed,
                sample_index=index.repeat_interleave(LENGTH),
                position=torch.arange(LENGTH).repeat(ROWS),
            ).view(ROWS, LENGTH)
        if config.stage == 1:
            return {"loss": mlm, "mlm_loss": mlm}, ids
        originals = torch.where(chosen, labels, ids)
        replaced_ids = torch.where(chosen, samples, ids)
        loss = self.discriminator_loss(ids, mask, chosen, originals, replaced_ids)
        name = "rtd_loss" if config.objective.startswith("rtd") else "discriminator_mlm_loss"
        parts = {name: loss}
        if mlm is not None:
            parts["mlm_loss"] = mlm
        if mlm is not None and config.stage is None:
            loss = mlm + config.discriminator_weight * loss
        return {"loss": loss, **parts}, replaced_ids

    def discriminator_loss(self, ids, mask, chosen, originals, replaced_ids):
        objective, seen = self.config.objective, mask.bool()
        out = self.discriminator(replaced_ids, attention_mask=mask, output_hidden_states=True)
        logits = out.logits
        if objective.startswith("rtd"):
            seen = chosen if objective == "rtd_masked" else seen
            replaced = (replaced_ids != originals).to(logits.dtype)
            return F.binary_cross_entropy_with_logits(logits[seen], replaced[seen])
        if objective == "replace_mlm":
            return F.cross_entropy(logits[chosen], originals[chosen])
        copies = self.copy_head(out.hidden_states[-1]).sigmoid()
        one_hot = F.one_hot(replaced_ids, VOCAB).to(logits.dtype)
        probabilities = copies * one_hot + (1 - copies) * logits.softmax(-1)
        picked = probabilities.gather(-1, originals[..., None]).squeeze(-1)
        return -picked[seen].log().mean()

    def unigram_samples(self, index):
        samples = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        total = int(COUNTS.sum())
        tokens = torch.arange(VOCAB).repeat_interleave(COUNTS)  # the corpus, sorted
        for row in range(ROWS):
            for position in range(LENGTH):
                word, *_ = draw(
                    self.config.sampling_seed,
                    Stream.SAMPLE,
                    sample_index=int(index[row]),
                    position=position,
                )
                samples[row, position] = tokens[(2 * int(word) + 1) * total >> 33]
        return samples


def run(model, ids, labels, mask=MASK, index=INDEX, **arguments):
    return model(ids, attention_mask=mask, labels=labels, sample_index=index, **arguments)


def losses(outputs):
    return {name: value for name, value in outputs.items() if name.endswith("loss")}


# --- the losses -----------------------------------------------------------------------------------


@every_option
def test_losses_and_gradients_equal_the_definition(hold, options):
    ids, labels = batch()
    model, reference = build(**options), Reference(joint_config(**options))
    reference.load_state_dict(model.state_dict())
    drawn = reference(ids, MASK, labels, INDEX)[1]

    def ours(model):
        out = run(model, ids, labels, output_replaced_ids=True)
        if out.replaced_ids is not None:
            assert torch.equal(out.replaced_ids, drawn)
        return losses(out)

    def theirs(reference):
        outputs, replaced_ids = reference(ids, MASK, labels, INDEX)
        assert torch.equal(replaced_ids, drawn)
        return outputs

    hold(model, reference, ours, theirs)


@every_option
def test_only_trained_parameters_get_gradients(options):
    model = build(**options)
    run(model, *batch()).loss.backward()
    reached = {n for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    names = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    stage = options.get("stage")
    frozen = {n for n in names if n.startswith("generator.") and stage == 2}
    frozen |= {n for n in names if n.startswith(("discriminator.", "copy_head")) and stage == 1}
    assert reached == names - frozen
    if options.get("generator_type") == "unigram":
        assert model.generator is None and not any(n.startswith("generator.") for n in names)


def operations(loss):
    """The names of the backward functions behind a loss."""
    found, open_ends = set(), [loss.grad_fn]
    while open_ends:
        function = open_ends.pop()
        if function is not None and function not in found:
            found.add(function)
            open_ends += [following for following, _ in function.next_functions]
    return [function.name() for function in found]


def test_lookup_and_head_of_the_generator_have_one_gradient():
    ids, labels = batch()
    joint = build()
    for loss in (run(joint, ids, labels).loss, joint.generator(ids, labels=labels).loss):
        assert operations(loss).count("_TiedEmbeddingBackward") == 1
    untied = build(stage=2, embedding_sharing="none")
    assert "_TiedEmbeddingBackward" not in operations(run(untied, ids, labels).loss)


@every_option
def test_padding_does_not_matter(options):
    ids, labels = batch()
    model = build(**options)
    padding = MASK == 0
    whole = run(model, ids, labels)
    other = run(model, ids.masked_fill(padding, 7), labels.masked_fill(padding, 9))
    for name, value in losses(whole).items():
        assert torch.equal(value, other[name]), name
    assert "total" not in whole or whole.total == other.total


@pytest.mark.parametrize("unpad", [False, 30])
@every_option
def test_leaving_padding_out_changes_nothing(hold, options, unpad):
    ids, labels = batch()
    model = build(**options)
    drawn = run(model, ids, labels, output_replaced_ids=True).replaced_ids

    def otherwise(model):
        out = run(model, ids, labels, output_replaced_ids=True, unpad=unpad)
        assert drawn is None or torch.equal(out.replaced_ids, drawn)
        return losses(out)

    hold(model, model, otherwise, lambda model: losses(run(model, ids, labels)))


@every_option
def test_only_needed_rows_are_computed(options):
    """Padding nowhere, and in the last layer what a loss reads."""
    ids, labels = batch()
    model = build(**options)
    seen = {}
    for name in ("generator", "discriminator"):
        if getattr(model, name) is None:
            continue
        for number, layer in enumerate(getattr(model, name).electra.encoder.layer):
            layer.intermediate.register_forward_pre_hook(
                lambda _, rows, key=(name, number): seen.update({key: rows[0].shape[:-1].numel()})
            )
    run(model, ids, labels)
    tokens, chosen = int(MASK.sum()), int((labels != -100).sum())
    by_label = options.get("objective") in ("rtd_masked", "replace_mlm")
    expected = {("discriminator", 0): tokens, ("discriminator", 1): chosen if by_label else tokens}
    if options.get("stage") == 1:
        expected = {}
    if model.generator is not None:
        expected |= {("generator", 0): tokens, ("generator", 1): chosen}
    assert seen == expected


@every_option
def test_slots_without_a_label_do_not_matter(hold, options):
    ids, labels = batch()
    model = build(**options)
    found = (labels.flatten() != -100).nonzero().flatten()
    # Unused slots, and slots of tokens without label, in padding and elsewhere.
    others = torch.tensor([-1, LENGTH + 7, int((labels[0] == -100).nonzero()[0]), -1])
    positions = torch.cat((others[:2], found, others[2:]))
    values = torch.cat((torch.full((2,), -100), labels.flatten()[found], torch.full((2,), -100)))
    drawn = run(model, ids, labels, output_replaced_ids=True).replaced_ids
    for given in (labels, values):  # by token, or by slot as ops.mask_tokens gives them

        def with_slots(model, given=given):
            out = run(model, ids, given, masked_positions=positions, output_replaced_ids=True)
            assert drawn is None or torch.equal(out.replaced_ids, drawn)
            return losses(out)

        hold(model, model, with_slots, lambda m: losses(run(m, ids, labels)))


@every_option
def test_accumulated_half_batches_are_one_batch(hold, options):
    ids, labels = batch()
    labels[2] = -100  # unequal numbers of labels, and halves of unequal length
    ids[2] = 5
    model = build(**options)

    def halves(model, **counts):
        outs = [
            losses(run(model, ids[rows], labels[rows], MASK[rows], INDEX[rows], **counts))
            for rows in (slice(0, 3), slice(3, 4))
        ]
        return {name: sum(out[name] for out in outs) for name in outs[0]}

    counts = {"num_items_in_batch": (labels != -100).sum(), "num_tokens_in_batch": MASK.sum()}
    hold(model, model, lambda m: halves(m, **counts), lambda m: losses(run(m, ids, labels)))


@every_option
def test_a_batch_without_labels_has_finite_gradients(options):
    ids, _ = batch()
    model = build(**options)
    out = run(model, ids, torch.full_like(ids, -100), output_replaced_ids=True)
    out.loss.backward()
    assert out.loss.isfinite() and all(
        p.grad.isfinite().all() for p in model.parameters() if p.grad is not None
    )
    assert out.replaced_ids is None or torch.equal(out.replaced_ids, ids)


def flatten_heads(model, *, copy_bias=0.0, detection_bias=0.0):
    """Every softmax is uniform and every score the same, so that losses can be worked out."""
    with torch.no_grad():
        for part in (model.generator, model.discriminator):
            if part is None:
                continue
            if hasattr(part, "generator_lm_head"):
                part.generator_predictions.LayerNorm.weight.zero_()
                part.generator_predictions.LayerNorm.bias.zero_()
                part.generator_lm_head.bias.zero_()
            else:
                prediction = part.discriminator_predictions.dense_prediction
                prediction.weight.zero_()
                prediction.bias.fill_(detection_bias)
        if hasattr(model, "copy_head"):
            model.copy_head.weight.zero_()
            model.copy_head.bias.fill_(copy_bias)


@pytest.mark.parametrize("objective", electra_joint.OBJECTIVES)
def test_losses_equal_values_computed_by_hand(objective):
    # Three tokens and one of padding; two are chosen, and replaced by 5: one was a 5 before.
    ids = torch.tensor([[8, MASK_ID, MASK_ID, 3]])
    labels = torch.tensor([[-100, 5, 6, -100]])
    mask = torch.tensor([[1, 1, 1, 0]])
    model = ElectraForJointPreTraining(
        joint_config(objective=objective, generator_type="unigram")
    ).double()
    model.set_token_counts(torch.zeros(VOCAB, dtype=torch.int64).index_fill(0, torch.tensor(5), 9))
    copied = 0.75
    flatten_heads(model, copy_bias=math.log(3), detection_bias=math.log(1 / 3))
    out = model(ids, attention_mask=mask, labels=labels, output_replaced_ids=True)
    assert out.replaced_ids.tolist() == [[8, 5, 5, 3]]
    replaced, original = math.log(4), math.log(4 / 3)  # "replaced" with probability 1/4
    expected = {
        "rtd": (original + original + replaced) / 3,
        "rtd_masked": (original + replaced) / 2,
        "replace_mlm": math.log(VOCAB),
        "all_tokens_mlm": -(
            2 * math.log(copied + (1 - copied) / VOCAB) + math.log((1 - copied) / VOCAB)
        )
        / 3,
    }[objective]
    truth = torch.tensor(expected, dtype=torch.float64)
    check_error("loss", out.loss.detach(), truth, [truth], FORWARD_FACTOR)
    if objective.startswith("rtd"):
        judged = 3 if objective == "rtd" else 2
        counts = (out.total, out.positives, out.predicted_positives, out.correct)
        assert counts == (judged, 1, 0, judged - 1)


@pytest.mark.parametrize("logit", [-1e4, -50.0, 0.0, 50.0, 1e4])
def test_the_copy_mechanism_neither_overflows_nor_underflows(logit):
    ids, labels = batch()
    model = build(objective="all_tokens_mlm")
    with torch.no_grad():
        model.copy_head.bias.fill_(logit)
        model.discriminator.generator_lm_head.bias[labels[0, 0]] = -1e4
    out = run(model, ids, labels)
    out.loss.backward()
    assert out.loss.isfinite() and model.copy_head.bias.grad.isfinite()
    assert all(p.grad.isfinite().all() for p in model.discriminator.parameters())


@every_option
def test_the_loss_decreases(options):
    torch.manual_seed(0)  # few steps of so small a model are a draw
    model = build(**options)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # losses begin near those of a guess
                parameter.mul_(0.3)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    ids, labels = batch()
    curves = []
    for step in range(30):
        out = run(model, ids, labels, index=INDEX + step)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curves.append(losses(out))
    trained = set(curves[0])
    if options.get("stage") == 2:
        trained -= {"mlm_loss"}
        assert all(torch.equal(out["mlm_loss"], curves[0]["mlm_loss"]) for out in curves)
    for name in trained:
        curve = torch.stack([out[name].detach() for out in curves])
        assert curve[-5:].mean() < 0.95 * curve[:5].mean(), (name, curve)


# --- curves ---------------------------------------------------------------------------------------

STEPS = 20


def train(model, forward):
    """The losses of twenty steps of AdamW, and what the discriminator saw in each."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-6, weight_decay=0.01)
    generator = torch.Generator().manual_seed(1)
    curve, seen = [], []
    for step in range(STEPS):
        ids = torch.randint(2, VOCAB, (ROWS, LENGTH), generator=generator)
        chosen = (torch.rand(ROWS, LENGTH, generator=generator) < 0.3) & MASK.bool()
        labels = ids.masked_fill(~chosen, -100)
        outputs, replaced_ids = forward(
            model, ids.masked_fill(chosen, MASK_ID), labels, INDEX + step
        )
        optimizer.zero_grad()
        outputs["loss"].backward()
        optimizer.step()
        curve.append(outputs["loss"].detach())
        seen.append(replaced_ids[MASK.bool()])
    return torch.stack(curve), torch.stack(seen)


@pytest.mark.parametrize(
    "name",
    [
        *("default", "second stage"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("all shared", "all-tokens MLM")),
    ],
)
def test_twenty_steps_give_the_losses_of_transformers(name):
    # Seeds under which no uniform number lies within rounding of a boundary between two tokens:
    # then all runs draw the same replacements, which is asserted.
    options = OPTIONS[name]
    torch.manual_seed(1)
    model = build(**options)

    def ours(model, ids, labels, index):
        out = run(model, ids, labels, index=index, output_replaced_ids=True)
        return out, out.replaced_ids

    def theirs(model, ids, labels, index):
        return model(ids, MASK, labels, index)

    def reference(dtype):
        plain = Reference(joint_config(**options))
        plain.load_state_dict(model.state_dict())
        return train(plain.to(dtype), theirs)

    gold, drawn = reference(torch.float64)
    single, _ = reference(torch.float32)
    out, ours_drawn = train(model.double(), ours)
    assert torch.equal(ours_drawn, drawn)
    check_in_fp64({"loss": out}, {"loss": gold}, {"loss": single})
    assert out[-1] != out[0]


# --- samples --------------------------------------------------------------------------------------


def test_samples_are_those_of_the_reference_at_their_counters():
    ids, labels = batch()
    model = build(temperature=0.7, sampling_seed=5)
    out = run(model, ids, labels, output_replaced_ids=True)
    generator = model.generator
    rows = generator.generator_predictions(generator.electra(ids, MASK).last_hidden_state)
    expected = sample_ref(
        rows.flatten(0, 1),
        generator.generator_lm_head.weight,
        labels.flatten(),
        linear_bias=generator.generator_lm_head.bias,
        temperature=0.7,
        seed=5,
        sample_index=INDEX.repeat_interleave(LENGTH),
        position=torch.arange(LENGTH).repeat(ROWS),
    ).view(ROWS, LENGTH)
    assert torch.equal(out.replaced_ids, torch.where(labels == -100, ids, expected))


def test_unigram_samples_have_the_frequencies_of_the_corpus():
    rows = 4000
    model = build(generator_type="unigram")
    ids = torch.full((rows, 5), MASK_ID)
    counters = electra_joint._counters(ids, torch.arange(5 * rows), torch.arange(rows))
    samples = model._draw_by_frequency(torch.zeros(5 * rows, dtype=torch.int64), counters)
    counts = samples.bincount(minlength=VOCAB).double()
    assert not counts[COUNTS == 0].any()
    expected = (COUNTS / COUNTS.sum() * counts.sum()).double()
    occurs = COUNTS > 0
    statistic = ((counts - expected) ** 2 / expected)[occurs].sum()
    freedom = torch.tensor((int(occurs.sum()) - 1) / 2, dtype=torch.float64)
    assert torch.special.gammaincc(freedom, statistic / 2) > 1e-4


def test_unigram_counts_of_any_corpus():
    model = build(generator_type="unigram")
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    counts[[4, 9]] = torch.tensor([2**43, 2**43])  # more than 32 bits
    model.set_token_counts(counts)
    targets = torch.zeros(200, dtype=torch.int64)
    samples = model._draw_by_frequency(targets, (torch.arange(200), torch.zeros_like(targets)))
    assert set(samples.tolist()) == {4, 9}
    model.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
    assert model.token_counts.tolist() == [*counts.tolist(), 0, 0, 0]


# --- no wait for the device -----------------------------------------------------------------------


class Step(nn.Module):
    """Masking and model: from original ids to the loss."""

    def __init__(self, model, unpad=None):
        super().__init__()
        self.unpad = unpad
        self.masker = TokenMasker(VOCAB, MASK_ID, mask_replace_prob=1.0, random_replace_prob=0.0)
        self.model = model

    def set_attn_implementation(self, name):
        self.model.set_attn_implementation(name)

    def forward(self, ids, mask, index):
        masked = self.masker(ids, mask.bool(), index)
        return self.model(
            masked.input_ids,
            attention_mask=mask,
            labels=masked.labels,
            masked_positions=masked.positions,
            sample_index=index,
            output_replaced_ids=True,
            unpad=self.unpad,
        )


def trace(options, device, planted=None, unpad=None):
    """Masking, forward, backward and optimizer on fake tensors, which have no values."""
    with FakeTensorMode(), torch.device(device):
        model = ElectraForJointPreTraining(joint_config(**options))
        step = Step(model, unpad)
        ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        out = step(ids, torch.ones_like(ids), torch.arange(ROWS))
        out.loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()  # AdamW of torch 2.11 makes real tensors
        if planted is not None:
            planted(out)
    return out


# On the meta device all ops run their references, and nothing takes a short cut that is there for
# CPU tensors alone; on the CPU the fused operators show their fake implementations.
@pytest.mark.parametrize("device", ["meta", "cpu"])
@every_option
def test_a_training_step_reads_no_tensor_value(options, device):
    out = trace(options, device)
    assert out.loss.shape == () and out.loss.device.type == device


@pytest.mark.parametrize("name", ["default", "ELECTRA 15%", "all-tokens MLM"])
def test_a_training_step_with_a_capacity_reads_no_tensor_value(name):
    assert trace(OPTIONS[name], "meta", unpad=30).loss.shape == ()


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(
    "planted",
    [
        lambda out: out.loss.item(),
        lambda out: out.replaced_ids.nonzero(),
        lambda out: out.replaced_ids[out.replaced_ids > 3],
        lambda out: bool(out.total > 0),
    ],
    ids=["item", "nonzero", "boolean index", "if"],
)
def test_reading_a_value_fails_under_fake_tensors(planted, device):
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        trace({}, device, planted)


def check_compiled(hold, options, backend, unpad=None):
    torch._dynamo.reset()
    step = Step(build(**options), unpad)
    ids = torch.randint(2, VOCAB, (ROWS, LENGTH))
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    drawn = step(ids, MASK, INDEX).replaced_ids

    def check(out):
        assert drawn is None or torch.equal(out.replaced_ids, drawn)
        return losses(out)

    hold(
        step,
        step,
        lambda _: check(compiled(ids, MASK, INDEX)),
        lambda m: losses(m(ids, MASK, INDEX)),
    )
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "name",
    [
        *("replace MLM", "unigram", "second stage"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("ELECTRA 15%", "all-tokens MLM", "first stage")
        ),
    ],
)
def test_a_traced_step_equals_eager(hold, name):
    check_compiled(hold, OPTIONS[name], "aot_eager")


@pytest.mark.parametrize(
    "name", ["default", pytest.param("all-tokens MLM", marks=pytest.mark.slow)]
)
def test_a_traced_step_with_a_capacity_equals_eager(hold, name):
    check_compiled(hold, OPTIONS[name], "aot_eager", unpad=30)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_a_compiled_step_equals_eager(hold, name):
    check_compiled(hold, OPTIONS[name], "inductor")


def device_batches(count):
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        ids = torch.randint(2, VOCAB, (ROWS, LENGTH), generator=generator)
        yield ids.cuda(), INDEX.cuda() + ROWS * number


@pytest.mark.gpu
@every_option
def test_a_training_step_needs_no_sync(options):
    step = Step(build(**options).cuda())
    optimizer = torch.optim.AdamW(step.parameters(), capturable=True)
    mask = MASK.cuda()

    def train(ids, index):
        out = step(ids, mask, index)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return out

    first, second = device_batches(2)
    train(*first)  # kernels are compiled and loaded here
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = train(*second)
        with pytest.raises(RuntimeError, match="synchroniz"):
            out.loss.item()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert out.loss.isfinite()


@pytest.mark.gpu
@every_option
def test_a_training_step_in_one_graph(options):
    """Masking, forward, backward and AdamW, captured once and replayed on fresh batches."""
    batches = list(device_batches(8))
    mask = MASK.cuda()

    def start(device="cuda", dtype=torch.float32):
        torch.manual_seed(0)
        step = Step(build(**options)).to(device, dtype)
        return step, torch.optim.AdamW(step.parameters(), 1e-3, capturable=device == "cuda")

    def train(step, optimizer, ids, mask, index):
        optimizer.zero_grad(set_to_none=True)
        out = step(ids, mask, index)
        out.loss.backward()
        optimizer.step()
        return out

    def curve(*where):
        """The losses, and what the discriminator saw, of eager steps."""
        step, optimizer = start(*where)
        outs = [
            train(step, optimizer, *(tensor.to(where[0]) for tensor in (ids, mask, index)))
            for ids, index in batches
        ]
        return torch.stack([out.loss.detach().cpu() for out in outs]), outs

    gold, _ = curve("cpu", torch.float64)
    eager, expected = curve("cuda", torch.float32)
    bases = [eager, curve("cpu", torch.float32)[0]]

    step, optimizer = start()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        replayed = [
            train(step, optimizer, ids, mask, index).loss.detach().cpu()
            for ids, index in batches[:3]
        ]
    torch.cuda.current_stream().wait_stream(side)
    ids, index = (tensor.clone() for tensor in batches[3])
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        out = train(step, optimizer, ids, mask, index)
    for batch, eager_out in list(zip(batches, expected, strict=True))[3:]:
        ids.copy_(batch[0])
        index.copy_(batch[1])
        graph.replay()
        replayed.append(out.loss.detach().cpu())
        if out.replaced_ids is not None:
            assert torch.equal(out.replaced_ids, eager_out.replaced_ids)
    check_error("loss", torch.stack(replayed), gold, bases, FORWARD_FACTOR)
    assert len(set(torch.stack(replayed).tolist())) == len(batches)


# --- configuration and checkpoints ----------------------------------------------------------------


def tied(model):
    """Which parameters of the model are one, by name."""
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return sorted(group for group in names.values() if len(group) > 1)


def test_shared_parameters():
    def shared(**options):
        model = build(**options)
        ours, theirs = model.generator.electra, model.discriminator.electra
        assert model.generator.generator_lm_head.weight is ours.embeddings.word_embeddings.weight
        other = dict(theirs.named_parameters())
        return {n for n, p in ours.named_parameters() if p is other[n]}, set(other)

    nothing, _ = shared(embedding_sharing="none")
    embeddings, _ = shared()
    everything, names = shared(embedding_sharing="all")
    assert nothing == set()
    assert embeddings == {
        f"embeddings.{table}_embeddings.weight" for table in ("word", "position", "token_type")
    }
    assert everything == names


@every_option
def test_checkpoints_keep_the_options(tmp_path, options):
    ids, labels = batch()
    model = build(**options, temperature=0.5, sampling_seed=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    run(model, ids, labels).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    back, report = ElectraForJointPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    names = ("embedding_sharing", "objective", "generator_type", "stage", "discriminator_weight")
    assert [getattr(back.config, n) for n in names] == [getattr(model.config, n) for n in names]
    assert tied(back) == tied(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, back.state_dict()[name]), name
    outs = [run(m.eval(), ids, labels) for m in (model, in_own_memory(back))]
    for name, value in losses(outs[0]).items():
        assert torch.equal(value, outs[1][name]), name


@every_option
def test_the_discriminator_loads_in_transformers(hold, tmp_path, options):
    ids, _ = batch()
    model = build(**options).eval()
    model.save_discriminator(tmp_path)
    kind = transformers.ElectraForPreTraining
    if "mlm" in options.get("objective", ""):
        kind = transformers.ElectraForMaskedLM
    loaded, report = kind.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    assert loaded.config.architectures == [kind.__name__]
    hold(
        model.discriminator,
        loaded,
        lambda m: {"logits": m(ids, attention_mask=MASK).logits[MASK.bool()].detach()},
    )


@pytest.mark.parametrize(
    "options",
    [OPTIONS[n] for n in ("default", "all shared", "all-tokens MLM", "unigram", "second stage")],
    ids=str,
)
def test_trainer_resumes(tmp_path, options):
    ids, labels = batch()
    samples = [
        {"input_ids": i, "labels": label, "attention_mask": m, "sample_index": n}
        for i, label, m, n in zip(ids, labels, MASK, INDEX, strict=True)
    ]

    def collate(rows):
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def train(folder, **resume):
        torch.manual_seed(0)
        arguments = TrainingArguments(
            output_dir=str(tmp_path / folder),
            per_device_train_batch_size=2,
            max_steps=4,
            save_steps=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            lr_scheduler_type="constant",
        )
        trainer = Trainer(
            model=build(**options),
            args=arguments,
            train_dataset=samples,
            data_collator=collate,
        )
        assert trainer.model_accepts_loss_kwargs
        trainer.train(**resume)
        return trainer.model

    whole = train("run")
    resumed = train("run", resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert tied(resumed) == tied(whole)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_the_frozen_generator_saves_no_tensors_for_backward():
    for stage in (1, 2):
        model = build(stage=stage, embedding_sharing="none")
        kept = []
        model.generator.electra.register_forward_hook(
            lambda _, arguments, out, kept=kept: kept.append(out.last_hidden_state.requires_grad)
        )
        run(model, *batch())
        assert kept == [stage == 1]


def test_the_second_stage_begins_with_the_generators_weights(tmp_path):
    ids, labels = batch()
    model = build(stage=1, embedding_sharing="none")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            run(model, ids, labels).loss.backward()
            optimizer.step()

    head = copy.deepcopy(model.discriminator.discriminator_predictions)
    train(2)
    generator = copy.deepcopy(model.generator.state_dict())
    assert not torch.equal(
        model.discriminator.electra.embeddings.word_embeddings.weight,
        generator["electra.embeddings.word_embeddings.weight"],
    )
    run(model, ids, labels).loss.backward()
    model.start_second_stage()
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, value in model.discriminator.electra.state_dict().items():
        assert torch.equal(value, generator[f"electra.{name}"]), name
    for name, value in head.state_dict().items():
        assert torch.equal(value, model.discriminator.discriminator_predictions.state_dict()[name])
    train(2)
    assert model.generator.state_dict().keys() == generator.keys()
    for name, value in model.generator.state_dict().items():
        assert torch.equal(value, generator[name]), name
    changed = model.discriminator.electra.embeddings.word_embeddings.weight
    assert not torch.equal(changed, generator["electra.embeddings.word_embeddings.weight"])
    model.save_pretrained(tmp_path)
    assert ElectraForJointPreTraining.from_pretrained(tmp_path).config.stage == 2
    with pytest.raises(ArgumentValueError, match="stage"):
        model.start_second_stage()


@pytest.mark.parametrize(("objective", "weight"), [("rtd_masked", 50.0), ("replace_mlm", 1.0)])
def test_the_weight_of_the_discriminator(objective, weight):
    assert joint_config(objective=objective).discriminator_weight == weight
    assert joint_config(objective=objective, discriminator_weight=7.0).discriminator_weight == 7.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"objective": "mlm"}, "objective.*all_tokens_mlm"),
        ({"embedding_sharing": "token"}, "embedding_sharing.*embeddings"),
        ({"generator_type": "bigram"}, "generator_type.*unigram"),
        ({"stage": 3, "embedding_sharing": "none"}, "stage"),
        ({"stage": 1}, "embedding_sharing.*none"),
        ({"stage": 1, "generator_type": "unigram"}, "stage.*unigram"),
        ({"temperature": 0.0}, "temperature"),
    ],
)
def test_bad_options_raise_typed_errors(options, words):
    with pytest.raises(ArgumentValueError, match=words):
        joint_config(**options)
    changed = joint_config()
    for name, value in options.items():
        setattr(changed, name, value)
    with pytest.raises(ArgumentValueError, match=words):
        ElectraForJointPreTraining(changed)


@pytest.mark.parametrize(
    "options", [{"embedding_sharing": "all"}, {"stage": 1, "embedding_sharing": "none"}], ids=str
)
def test_different_sizes_raise_typed_errors(options):
    encoder = joint_config().discriminator
    with pytest.raises(ArgumentValueError, match=r"generator\.hidden_size.*generator_size=1"):
        ElectraJointConfig.from_discriminator(encoder, generator_size=0.5, **options)


def test_counts_that_do_not_fit_raise_typed_errors():
    model = build(generator_type="unigram")
    with pytest.raises(ArgumentTypeError, match="counts"):
        model.set_token_counts(torch.ones(VOCAB))
    with pytest.raises(ArgumentValueError, match="counts"):
        model.set_token_counts(torch.ones(VOCAB + 1, dtype=torch.int64))
    with pytest.raises(ArgumentValueError, match="counts"):
        model.set_token_counts(torch.zeros(VOCAB, dtype=torch.int64))
    with pytest.raises(ArgumentValueError, match="generator_type"):
        build().set_token_counts(COUNTS)
    with pytest.raises(ArgumentValueError, match="generator"):
        model.save_generator("nowhere")
    uncounted = ElectraForJointPreTraining(joint_config(generator_type="unigram"))
    with pytest.raises(ArgumentValueError, match="set_token_counts"):
        run(uncounted, *batch())


def test_slots_that_do_not_fit_raise_typed_errors():
    ids, labels = batch()
    model = build()
    with pytest.raises(ArgumentValueError, match="labels"):
        run(model, ids, labels.flatten()[:3], masked_positions=torch.arange(4))
    with pytest.raises(ArgumentValueError, match="labels"):
        run(model, ids, labels.flatten())


@pytest.mark.parametrize(
    "part, options",
    [
        ("generator", {}),
        *(("discriminator", OPTIONS[n]) for n in ("replace MLM", "all-tokens MLM")),
    ],
    ids=str,
)
def test_a_projection_to_the_vocabulary_with_a_hook_is_refused(part, options):
    """Only its weight is used: adapters and hooks would be ignored."""
    model, (ids, labels) = build(**options), batch()
    decoder = getattr(model, part).generator_lm_head
    hook = decoder.register_forward_hook(lambda _, __, out: 2 * out)
    with pytest.raises(UnsupportedError, match="generator_lm_head.*merge the adapter"):
        model(ids, MASK, labels=labels)
    hook.remove()
    model(ids, MASK, labels=labels)
