"""ElectraForJointPreTraining: each option against its definition with Transformers' models."""

from __future__ import annotations

import copy
import json

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
from transformers import ElectraConfig, Trainer, TrainingArguments

import fastplm
from fastplm._backends import record_decisions, use_backend
from fastplm.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from fastplm.models import ElectraForJointPreTraining, ElectraJointConfig
from fastplm.models.electra_joint import _Slots
from fastplm.nn import TokenMasker
from fastplm.reference.linear_cross_entropy import sample_ref
from fastplm.reference.philox import Stream, draw
from fastplm.testing import FORWARD_FACTOR, check_error

from .conftest import LENGTH, PADDINGS, ROWS, in_own_memory, rows_of, same, small_config

VOCAB, MASK_ID = 37, 1
MASK = PADDINGS["right"]
INDEX = torch.tensor([3, 2**40, 0, 17])
COUNTS = torch.arange(VOCAB) % 5  # some tokens never occur

#: Every option occurs once; options that a case does not name have the default.
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
    "adversarial": {"adversarial": True},
    "adversarial 15%": {"adversarial": True, "objective": "rtd_masked"},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
ENCODER = small_config("electra", embedding_size=16, hidden_size=32, intermediate_size=48)


def joint_config(**options):
    equal = options.get("embedding_sharing") == "all" or options.get("stage")
    equal = equal and options.get("second_stage_from") != "scratch"
    return ElectraJointConfig.from_discriminator(
        copy.deepcopy(ENCODER), generator_size=1 if equal else 0.5, **options
    )


def build(**options):
    model = ElectraForJointPreTraining(joint_config(**options))
    if model.generator is None:
        model.set_token_counts(COUNTS)
    return model


def batch(mask=MASK):
    ids = torch.randint(2, VOCAB, (ROWS, LENGTH))
    chosen = torch.rand(ROWS, LENGTH) < 0.4
    chosen[:, 0] = True  # every row has labels, in different numbers
    chosen &= torch.ones_like(chosen) if mask is None else mask.bool()
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
        if config.adversarial:
            self.baseline_head = nn.Linear(config.generator.hidden_size, 1, bias=False)
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
        if config.adversarial:
            reinforce = self.reinforce(ids, mask, chosen, logits, originals, replaced_ids)
            parts |= dict(zip(("generator_loss", "baseline_loss"), reinforce, strict=True))
            loss = sum(reinforce) + config.discriminator_weight * loss
        elif mlm is not None and config.stage is None:
            loss = mlm + config.discriminator_weight * loss
        return {"loss": loss, **parts}, replaced_ids

    def reinforce(self, ids, mask, chosen, logits, originals, replaced_ids):
        """Appendix F: ``E[(R - b) grad log p]``, and the cross-entropy of the baseline."""
        judged = self.discriminator(replaced_ids, attention_mask=mask).logits.detach()[chosen]
        right = torch.where((replaced_ids == originals)[chosen], -judged, judged).sigmoid()
        rewards = -right.log()
        hidden = self.generator.electra(ids, attention_mask=mask).last_hidden_state.detach()
        expected = self.baseline_head(hidden).squeeze(-1).sigmoid()[chosen]
        baseline = -expected.log().detach()
        log_p = (logits / self.config.temperature).log_softmax(-1)
        log_p = log_p.gather(-1, replaced_ids[..., None]).squeeze(-1)[chosen]
        matched = -(right * expected.log() + (1 - right) * (1 - expected).log())
        return -((rewards - baseline) * log_p).mean(), matched.mean()

    def discriminator_loss(self, ids, mask, chosen, originals, replaced_ids):
        objective = self.config.objective
        seen = torch.ones_like(chosen) if mask is None else mask.bool()
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


@pytest.mark.parametrize(
    ("options", "padding"),
    [
        *((options, "right") for options in OPTIONS.values()),
        *(({}, padding) for padding in ("none", "left", "dead row", "boolean")),
        ({"temperature": 0.7, "sampling_seed": 5}, "right"),
        ({"temperature": 0.7, "adversarial": True}, "left"),
    ],
    ids=str,
)
def test_losses_gradients_and_samples_equal_the_definition(hold, options, padding):
    mask = PADDINGS[padding]
    ids, labels = batch(mask)
    model, reference = build(**options), Reference(joint_config(**options))
    reference.load_state_dict(model.state_dict())
    drawn = reference(ids, mask, labels, INDEX)[1]

    def ours(model):
        out = run(model, ids, labels, mask, output_replaced_ids=True)
        if out.replaced_ids is not None:
            assert torch.equal(out.replaced_ids, drawn)
        return losses(out)

    def theirs(reference):
        outputs, replaced_ids = reference(ids, mask, labels, INDEX)
        assert torch.equal(replaced_ids, drawn)
        return outputs

    hold(model, reference, ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_every_backend_gives_the_joint_loss(hold, backend):
    ids, labels = batch()

    def run_on_backend(model):
        with use_backend(backend), record_decisions() as decisions:
            outputs = losses(run(model, ids, labels))
        assert {decision.backend for decision in decisions} == {backend}
        return outputs

    def plain(model):
        return losses(run(model, ids, labels))

    hold(build(), build(), run_on_backend, plain, in_fp64=backend == "eager")


def test_the_counts_are_those_of_the_logits():
    ids, labels = batch()
    model, real = build(), MASK.bool()
    judge = model.discriminator
    with torch.no_grad():
        seen = run(model, ids, labels, output_replaced_ids=True).replaced_ids
        # The detector should call half of the tokens replaced, and none should be a close case.
        logits = judge(seen, attention_mask=MASK).logits[real]
        judge.discriminator_predictions.dense_prediction.bias -= logits.quantile(0.5)
        logits = judge(seen, attention_mask=MASK).logits[real]
    out = run(model, ids, labels)
    flagged, replaced = logits > 0, (seen != torch.where(labels == -100, ids, labels))[real]
    assert out.true_positives == (flagged & replaced).sum()
    assert out.predicted_positives == flagged.sum()
    assert out.positives == replaced.sum()
    assert out.correct == (flagged == replaced).sum()
    assert out.total == flagged.numel()
    assert 0 < out.true_positives < out.predicted_positives < out.total


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


@every_option
def test_only_needed_rows_are_computed(options):
    """No layer computes padding, and the last layer computes only rows that a loss reads."""
    ids, labels = batch()
    model, seen = build(**options), []
    for part in (model.generator, model.discriminator):
        if part is not None:
            layers = part.electra.encoder.layer
            seen.append(rows_of(*(layer.intermediate.dense for layer in layers)))
    with record_decisions() as decisions:
        run(model, ids, labels)
    tokens, chosen = (1, int(MASK.sum())), (1, int((labels != -100).sum()))
    by_label = options.get("objective") in ("rtd_masked", "replace_mlm")
    expected = [] if model.generator is None else [[tokens, chosen]]
    expected += [[tokens, chosen if by_label else tokens]]
    if options.get("stage") == 1:
        expected[1] = []
    assert seen == expected
    ops = [decision.op for decision in decisions]
    assert ops.count("attention") == sum(map(len, expected))
    assert ops.count("replaced_token_loss") <= 1


@pytest.mark.parametrize("how", ["padded", "capacity", "slots of labels", "slots of values"])
@every_option
def test_other_forms_of_a_batch_give_the_same_losses(hold, options, how):
    ids, labels = batch()
    found = (labels.flatten() != -100).nonzero().flatten()
    # Some slots are unused, and some have tokens without a label, in padding and elsewhere.
    others = torch.tensor([-1, LENGTH + 7, int((labels[0] == -100).nonzero()[0]), -1])
    slots = {"masked_positions": torch.cat((others[:2], found, others[2:]))}
    changes = {
        "padded": {"unpad": False},
        "capacity": {"unpad": 30},
        "slots of labels": slots,
        # The labels are those of ops.mask_tokens.
        "slots of values": slots | {"labels": F.pad(labels.flatten()[found], (2, 2), value=-100)},
    }
    model, given = build(**options), {"labels": labels} | changes[how]
    drawn = run(model, ids, labels, output_replaced_ids=True).replaced_ids

    def otherwise(model):
        out = run(model, ids, **given, output_replaced_ids=True)
        assert drawn is None or torch.equal(out.replaced_ids, drawn)
        return losses(out)

    hold(model, model, otherwise, lambda model: losses(run(model, ids, labels)))


@pytest.mark.parametrize("counted", ["labels and tokens", "labels"])
@every_option
def test_accumulated_half_batches_are_one_batch(hold, options, counted):
    """If the number of tokens is unknown, a loss over tokens is weighted by its share of labels."""
    ids, labels = batch()
    mask, parts = MASK, (slice(0, 3), slice(3, 4))
    labels[2] = -100  # unequal numbers of labels, and halves of unequal length
    ids[2] = 5
    counts = {"num_items_in_batch": (labels != -100).sum(), "num_tokens_in_batch": mask.sum()}
    if counted == "labels":  # equal numbers make the shares those of the tokens
        mask, parts = torch.ones_like(MASK), (slice(0, 2), slice(2, 4))
        labels = torch.where(torch.arange(LENGTH) < 2, 8, -100).repeat(ROWS, 1)
        counts = {"num_items_in_batch": 8}
    model = build(**options)

    def halves(model):
        outs = [
            losses(run(model, ids[rows], labels[rows], mask[rows], INDEX[rows], **counts))
            for rows in parts
        ]
        return {name: sum(out[name] for out in outs) for name in outs[0]}

    hold(model, model, halves, lambda m: losses(run(m, ids, labels, mask)))


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


# --- samples --------------------------------------------------------------------------------------


def test_samples_depend_only_on_sample_index_and_position():
    ids, labels = batch()
    model = build().eval()

    def replaced(rows, index=INDEX, spare=0):
        padded = [
            F.pad(each[rows], (0, spare), value=fill)
            for each, fill in ((ids, 0), (labels, -100), (MASK, 0))
        ]
        with torch.no_grad():
            out = run(
                model, *padded, None if index is None else index[rows], output_replaced_ids=True
            )
        return out.replaced_ids[:, :LENGTH]

    every, order, real = torch.arange(ROWS), torch.tensor([2, 0, 3, 1]), MASK.bool()
    whole = replaced(every)
    assert torch.equal(replaced(order), whole[order])
    assert torch.equal(replaced(every[1:2]), whole[1:2])
    assert torch.equal(replaced(every, spare=3)[real], whole[real])
    assert not torch.equal(replaced(every, INDEX + 1), whole)
    # Without a sample index, each call draws other tokens.
    assert not torch.equal(replaced(every, None), replaced(every, None))


def test_unigram_counts_of_any_corpus():
    model = build(generator_type="unigram")
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    counts[[4, 9]] = torch.tensor([2**43, 2**43])  # counts of more than 32 bits
    model.set_token_counts(counts)
    places, zeros = torch.arange(200), torch.zeros(200, dtype=torch.int64)
    samples = model._draw_by_frequency(_Slots(places, zeros, places, zeros, None))
    assert set(samples.tolist()) == {4, 9}
    model.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
    assert model.token_counts.tolist() == [*counts.tolist(), 0, 0, 0]


# --- no wait for the device -----------------------------------------------------------------------


class Step(nn.Module):
    """A module of masking and model, from original ids to the loss."""

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


def trace(options, device, unpad=None, planted=None):
    """A step of masking, forward, backward and optimizer runs on fake tensors, without values."""
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


# On the meta device all ops run their references, and no code takes a short cut for CPU tensors. On
# the CPU the fake implementations of the fused operators run.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "device", "unpad"),
    [
        *((name, device, None) for name in OPTIONS for device in ("meta", "cpu")),
        *((name, "meta", 30) for name in ("default", "ELECTRA 15%", "all-tokens MLM")),
    ],
)
def test_a_training_step_reads_no_tensor_value(name, device, unpad):
    out = trace(OPTIONS[name], device, unpad)
    assert out.loss.shape == () and out.loss.device.type == device


@pytest.mark.slow
@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(
    "read",
    [
        lambda out: out.loss.item(),
        lambda out: out.replaced_ids.nonzero(),
        lambda out: out.replaced_ids[out.replaced_ids > 3],
        lambda out: bool(out.total > 0),
    ],
    ids=["item", "nonzero", "boolean index", "if"],
)
def test_reading_a_value_fails_under_fake_tensors(read, device):
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        trace({}, device, planted=read)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend", "unpad"),
    [
        *((name, "aot_eager", None) for name in ("replace MLM", "unigram", "second stage")),
        *((name, "aot_eager", None) for name in ("ELECTRA 15%", "all-tokens MLM", "first stage")),
        *((name, "aot_eager", 30) for name in ("default", "all-tokens MLM")),
        *((name, "inductor", None) for name in ("default", "adversarial 15%")),
    ],
)
def test_a_step_compiled_once_equals_eager(hold, name, backend, unpad):
    torch._dynamo.reset()
    step = Step(build(**OPTIONS[name]), unpad)
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for shift in range(2):
        given = torch.randint(2, VOCAB, (ROWS, LENGTH)), MASK.roll(shift, 0), INDEX + shift
        drawn = step(*given).replaced_ids

        def check(out, drawn=drawn):
            assert drawn is None or torch.equal(out.replaced_ids, drawn)
            return losses(out)

        hold(
            step,
            step,
            lambda _, given=given, check=check: check(compiled(*given)),
            lambda m, given=given: losses(m(*given)),
        )
    assert counter.frame_count == 1


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
    train(*first)  # compiles and loads the kernels
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
    """A step (masking, forward, backward, AdamW) is captured once, and replayed on new batches."""
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
        """The losses and the discriminator's inputs of eager steps."""
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
    """The names of tied parameters, in groups."""
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return sorted(group for group in names.values() if len(group) > 1)


TABLES = {f"embeddings.{table}_embeddings.weight" for table in ("word", "position", "token_type")}


@pytest.mark.parametrize("sharing", ["none", "embeddings", "all"])
def test_shared_parameters(sharing):
    model = build(embedding_sharing=sharing)
    ours, theirs = model.generator.electra, dict(model.discriminator.electra.named_parameters())
    assert model.generator.generator_lm_head.weight is ours.embeddings.word_embeddings.weight
    shared = {name for name, weight in ours.named_parameters() if weight is theirs[name]}
    assert shared == {"none": set(), "embeddings": TABLES, "all": set(theirs)}[sharing]


@every_option
def test_checkpoints_keep_the_options(tmp_path, options):
    ids, labels = batch()
    model = build(**options, temperature=0.5, sampling_seed=3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    run(model, ids, labels).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "fastplm-electra-joint"
    assert "_attn_implementation" not in json.dumps(saved)
    back, report = ElectraForJointPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    names = ("embedding_sharing", "objective", "generator_type", "stage", "discriminator_weight")
    names += ("temperature", "sampling_seed")
    assert [getattr(back.config, n) for n in names] == [getattr(model.config, n) for n in names]
    assert back.discriminator.config._attn_implementation == "fastplm"
    assert tied(back) == tied(model)
    assert same(model.state_dict(), back.state_dict())
    outs = [losses(run(m.eval(), ids, labels)) for m in (model, in_own_memory(back))]
    assert same(*outs)


@pytest.mark.parametrize("part", ["generator", "discriminator"])
@every_option
def test_each_part_loads_in_transformers(hold, tmp_path, options, part):
    model, (ids, _) = build(**options).eval(), batch()
    ours = getattr(model, part)
    if ours is None:
        with pytest.raises(ArgumentValueError, match="generator"):
            model.save_generator(tmp_path)
        return
    getattr(model, f"save_{part}")(tmp_path)
    kind = transformers.ElectraForMaskedLM
    if part == "discriminator" and "mlm" not in options.get("objective", ""):
        kind = transformers.ElectraForPreTraining
    loaded, report = kind.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    assert loaded.config.architectures == [kind.__name__]
    assert same(ours.state_dict(), loaded.state_dict())
    seen = MASK.bool()
    hold(ours, loaded, lambda m: {"logits": m(ids, attention_mask=MASK).logits[seen].detach()})


def test_a_resize_keeps_the_sharing(tmp_path):
    model, (ids, labels) = build(), batch()
    model.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
    labels[0, 0] = ids[0, 1] = VOCAB + 2
    assert run(model, ids, labels).loss.isfinite()
    model.save_discriminator(tmp_path)
    loaded = transformers.ElectraForPreTraining.from_pretrained(tmp_path)
    assert loaded.get_input_embeddings().num_embeddings == VOCAB + 3
    assert model.generator.generator_lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.slow
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
        trainer = Trainer(build(**options), arguments, collate, samples)
        assert trainer.model_accepts_loss_kwargs
        trainer.train(**resume)
        return trainer.model

    whole = train("run")
    resumed = train("run", resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert tied(resumed) == tied(whole)
    assert same(whole.state_dict(), resumed.state_dict())


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
    head = copy.deepcopy(model.discriminator.discriminator_predictions.state_dict())

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            run(model, ids, labels).loss.backward()
            optimizer.step()

    def encoders():
        parts = (model.generator, model.discriminator)
        return [copy.deepcopy(part.electra.state_dict()) for part in parts]

    train(2)
    generator, discriminator = encoders()
    assert not same(generator, discriminator)
    run(model, ids, labels).loss.backward()
    model.start_second_stage()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert same(model.discriminator.electra.state_dict(), generator)
    assert same(model.discriminator.discriminator_predictions.state_dict(), head)
    train(2)
    after, discriminator = encoders()
    assert same(after, generator) and not same(discriminator, generator)
    model.save_pretrained(tmp_path)
    assert ElectraForJointPreTraining.from_pretrained(tmp_path).config.stage == 2
    with pytest.raises(ArgumentValueError, match="stage"):
        model.start_second_stage()


def test_a_second_stage_from_scratch():
    """The discriminator keeps its own weights, and the generator may be narrower."""
    options = {"stage": 1, "embedding_sharing": "none", "second_stage_from": "scratch"}
    model = build(**options)
    assert model.generator.config.hidden_size < model.discriminator.config.hidden_size
    before = copy.deepcopy(model.discriminator.state_dict())
    model.start_second_stage()
    assert same(model.discriminator.state_dict(), before) and model.config.stage == 2


def test_the_adversarial_generator_learns_what_is_hard():
    """The generator's probabilities move to the tokens that the discriminator gets wrong."""
    ids, labels = batch()
    model = build(adversarial=True, embedding_sharing="none").eval()
    out = run(model, ids, labels, output_replaced_ids=True)
    generator = [p for name, p in model.named_parameters() if name.startswith("generator.")]
    chosen = labels != -100

    def log_p():
        logits = model.generator(ids, attention_mask=MASK).logits
        picked = logits.log_softmax(-1).gather(-1, out.replaced_ids[..., None])
        return picked.squeeze(-1)[chosen]

    with torch.no_grad():
        judged = model.discriminator(out.replaced_ids, attention_mask=MASK).logits[chosen]
        kept = (out.replaced_ids == labels)[chosen]
        rewards = F.softplus(torch.where(kept, judged, -judged))
        before = log_p()
    model.zero_grad()
    out.loss.backward()
    with torch.no_grad():
        baseline = F.softplus(
            -model.baseline_head(
                model.generator.electra(ids, attention_mask=MASK).last_hidden_state
            ).squeeze(-1)[chosen]
        )
        for parameter in generator:
            parameter -= 1e-4 * parameter.grad
        gained = log_p() - before
    # Gradient ascent of the expected reward: probabilities rise where the reward is above the
    # baseline.
    assert ((rewards - baseline) * gained).sum() > 0


@pytest.mark.parametrize(
    ("hidden", "heads", "size", "generator"),
    [
        (256, 4, 1 / 4, (64, 1, 256)),
        (768, 12, 1 / 3, (256, 4, 1024)),
        (1024, 16, 1 / 4, (256, 4, 1024)),
    ],
)
def test_the_generators_have_the_sizes_of_the_paper(hidden, heads, size, generator):
    discriminator = ElectraConfig(
        hidden_size=hidden, num_attention_heads=heads, intermediate_size=4 * hidden
    )
    derived = ElectraJointConfig.from_discriminator(discriminator, generator_size=size).generator
    sizes = derived.hidden_size, derived.num_attention_heads, derived.intermediate_size
    assert sizes == generator
    assert derived.num_hidden_layers == discriminator.num_hidden_layers
    assert derived.embedding_size == discriminator.embedding_size


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
        ({"second_stage_from": "nothing"}, "second_stage_from.*scratch"),
        ({"adversarial": True, "generator_type": "unigram"}, "generator_type.*adversarial"),
        ({"adversarial": True, "objective": "replace_mlm"}, "objective.*adversarial.*rtd_masked"),
        ({"adversarial": True, "stage": 1, "embedding_sharing": "none"}, "stage.*adversarial"),
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
def test_sizes_that_do_not_fit_raise_typed_errors(options):
    with pytest.raises(ArgumentValueError, match=r"generator\.hidden_size.*generator_size=1"):
        ElectraJointConfig.from_discriminator(ENCODER, generator_size=0.5, **options)
    with pytest.raises(ArgumentValueError, match="generator_size"):
        ElectraJointConfig.from_discriminator(ENCODER, generator_size=1.5)
    mismatched = joint_config()
    mismatched.generator.embedding_size = 8
    with pytest.raises(ArgumentValueError, match="embedding_size"):
        ElectraForJointPreTraining(mismatched)


def test_counts_that_do_not_fit_raise_typed_errors():
    model = build(generator_type="unigram")
    with pytest.raises(ArgumentTypeError, match="counts"):
        model.set_token_counts(torch.ones(VOCAB))
    for total in (VOCAB + 1, VOCAB):  # too many counts, and counts that are all 0
        with pytest.raises(ArgumentValueError, match="counts"):
            model.set_token_counts(torch.full((total,), total - VOCAB))
    with pytest.raises(ArgumentValueError, match="generator_type"):
        build().set_token_counts(COUNTS)
    uncounted = ElectraForJointPreTraining(joint_config(generator_type="unigram"))
    with pytest.raises(ArgumentValueError, match="set_token_counts"):
        run(uncounted, *batch())


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"labels": None}, ArgumentTypeError, "labels"),
        ({"labels": torch.zeros(ROWS, 3, dtype=torch.int64)}, ArgumentValueError, "labels"),
        ({"labels": torch.zeros(ROWS * LENGTH).long()}, ArgumentValueError, "labels"),
        (
            {"labels": torch.zeros(3).long(), "masked_positions": torch.arange(4)},
            ArgumentValueError,
            "labels",
        ),
        ({"input_ids": torch.full((ROWS, LENGTH), VOCAB)}, ArgumentValueError, "vocabulary"),
        ({"masked_positions": torch.zeros(3)}, ArgumentTypeError, "masked_positions"),
        ({"sample_index": torch.zeros(ROWS)}, ArgumentTypeError, "sample_index"),
        ({"sample_index": torch.zeros(3).long()}, ArgumentValueError, "sample_index"),
    ],
)
def test_bad_input_raises_a_typed_error(change, error, words):
    ids, labels = batch()
    with pytest.raises(error, match=words):
        build()(**{"input_ids": ids, "labels": labels, **change})


@pytest.mark.parametrize(
    "part, options",
    [
        ("generator", {}),
        *(("discriminator", OPTIONS[n]) for n in ("replace MLM", "all-tokens MLM")),
    ],
    ids=str,
)
def test_a_projection_to_the_vocabulary_with_a_hook_is_refused(part, options):
    """The loss reads only the projection's weight, so it would ignore adapters and hooks."""
    model, (ids, labels) = build(**options), batch()
    decoder = getattr(model, part).generator_lm_head
    hook = decoder.register_forward_hook(lambda _, __, out: 2 * out)
    with pytest.raises(UnsupportedError, match="generator_lm_head.*merge the adapter"):
        model(ids, MASK, labels=labels)
    hook.remove()
    model(ids, MASK, labels=labels)


@every_option
def test_a_part_that_is_restored_alone_is_refused(options):
    model = build(**options)
    for part in (model.generator, model.discriminator):
        if part is None:
            continue
        for inner in (part.electra, part):
            fastplm.restore(inner)
            ids, labels = batch()
            with pytest.raises(ArgumentValueError, match="a part that is a Electra.*restore"):
                model(ids, MASK, labels=labels)
            fastplm.accelerate(inner)
