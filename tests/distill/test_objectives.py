"""The recipes against formulas of Transformers' outputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import BertConfig, ElectraConfig

import fastplm.models
from fastplm.distill import losses
from fastplm.distill.objectives import KINDS
from fastplm.distill.settings import DistillArguments
from fastplm.testing import check_in_fp64

from .conftest import DOUBLE, HEADS, MASK, SIZES, WORDS, B, T, mask_of


def bert(kind: str, layers: int, width: int, seed: int, config=BertConfig, **options):
    """(fastplm's model, Transformers' model) with the same weights, in fp64."""
    torch.manual_seed(seed)
    sizes = config(**SIZES, hidden_size=width, num_hidden_layers=layers)
    plain = getattr(transformers, kind)._from_config(sizes, attn_implementation="eager", **options)
    ours = getattr(fastplm.models, kind)(config(**sizes.to_diff_dict()), **options)
    ours.load_state_dict(plain.state_dict())
    return ours.double(), plain.double()


def settings(recipe: str, **options) -> DistillArguments:
    needed = {"translation": ["x"]} if recipe == "multilingual" else {}
    needed |= {"teacher": "t", "corpus": ["c"], "steps": 2, "out": "o"}
    return DistillArguments(recipe=recipe, **{**needed, **options}).plan()


def batch_of(mask: torch.Tensor, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, WORDS, mask.shape, generator=generator)
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def compare(model, plain_student, formula, batch, **counts) -> None:
    """Compares a recipe's loss and gradients with a formula of the plain student's outputs."""

    def run(loss, parameters):
        loss.backward()
        grads = {name: p.grad.clone() for name, p in parameters if p.grad is not None}
        for _, parameter in parameters:
            parameter.grad = None
        return {"loss": loss.detach(), **grads}

    ours = run(model(**batch, **counts)["loss"], list(model.student.named_parameters()))
    gold = run(formula(DOUBLE), list(plain_student.named_parameters()))
    plain_student.float()
    single = run(formula(torch.float32), list(plain_student.named_parameters()))
    check_in_fp64(ours, gold, {name: single[name] for name in gold})


@pytest.mark.parametrize(
    ("divergence", "soft_weight"), [("forward_kl", 5.0), ("reverse_kl", 5.0), ("forward_kl", 0.0)]
)
def test_distilbert(divergence, soft_weight):
    student, plain_student = bert("BertForMaskedLM", 1, 8, 1)
    teacher, plain_teacher = bert("BertForMaskedLM", 2, 12, 2)
    weights = {"soft_weight": soft_weight, "hidden_weight": 0.7}
    args = settings("distilbert", temperature=3.0, divergence=divergence, **weights)
    if soft_weight == 0:
        teacher.cls.predictions.decoder = None  # nothing calls it
    model = KINDS["distilbert"](student, teacher, args)
    model.double()
    labels = torch.full((B, T), -100)
    labels[0, [1, 3]], labels[1, 2], labels[2, 0] = torch.tensor([5, 7]), 9, 11
    batch = {**batch_of(MASK), "labels": labels}

    def formula(dtype):
        plain_teacher.to(dtype)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        ours = plain_student(**inputs, output_hidden_states=True)
        with torch.no_grad():
            theirs = plain_teacher(**inputs, output_hidden_states=True)
        chosen = labels != -100
        q, p = ((x.logits[chosen] / 3).log_softmax(-1) for x in (ours, theirs))
        if divergence == "reverse_kl":
            soft = (q.exp() * (q - p)).sum()
        else:
            soft = (p.exp() * (p - q)).sum()
        hard = F.cross_entropy(ours.logits[chosen], labels[chosen], reduction="sum")
        map_ = model.projection.weight.detach().to(dtype)
        cosines = F.cosine_similarity(
            ours.hidden_states[-1] @ map_.T, theirs.hidden_states[-1], dim=-1
        )
        apart = (1 - cosines)[MASK].sum()
        return (2 * hard + soft_weight * 9 * soft) / 10 + 0.7 * apart / 30

    counts = {"num_items_in_batch": 10, "num_tokens_in_batch": 30, "num_sequences_in_batch": B}
    compare(model, plain_student, formula, batch, **counts)
    assert all(weight.grad is None for weight in teacher.parameters())


def attentions(plain, batch):
    """(Transformers' outputs with attention probabilities, the outputs of the projections)."""
    found: list[torch.Tensor] = []
    hooks = [
        getattr(layer.attention.self, name).register_forward_hook(
            lambda module, args, output: found.append(output)
        )
        for layer in plain.encoder.layer
        for name in ("query", "key", "value")
    ]
    outputs = plain(**batch, output_attentions=True, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    return outputs, [found[index : index + 3] for index in range(0, len(found), 3)]


def relation(a, b, index, heads=HEADS):
    """Log-probabilities [H, T, T] of the tokens of a sequence."""
    length = int(MASK[index].sum())
    a, b = (x[index, :length].unflatten(-1, (heads, -1)).transpose(0, 1) for x in (a, b))
    return (a @ b.mT / a.shape[-1] ** 0.5).log_softmax(-1)


def divergence(ours, theirs, heads=HEADS):
    return (
        sum(
            F.kl_div(
                relation(*ours, i, heads),
                relation(*theirs, i, heads),
                reduction="sum",
                log_target=True,
            )
            for i in range(B)
        )
        / heads
    )


COUNTS = {"num_tokens_in_batch": 24, "num_sequences_in_batch": 4}


@pytest.mark.parametrize("recipe", ["minilm", "minilm-v2"])
def test_minilm(recipe):
    student, plain_student = bert("BertModel", 2, 8, 1, add_pooling_layer=False)
    teacher, plain_teacher = bert("BertModel", 3, 16, 2, add_pooling_layer=False)
    second = {"teacher_layer": 2, "relation_heads": 4} if recipe == "minilm-v2" else {}
    model = KINDS[recipe](student, teacher, settings(recipe, attention_weight=0.5, **second))
    batch = batch_of(MASK)

    def formula(dtype):
        plain_teacher.to(dtype)
        ours, ours_projected = attentions(plain_student, batch)
        with torch.no_grad():
            theirs, their_projected = attentions(plain_teacher, batch)
        if recipe == "minilm-v2":
            pairs = zip(ours_projected[-1], their_projected[1], strict=True)
            return 0.5 / 3 / 24 * sum(divergence((a, a), (b, b), 4) for a, b in pairs)
        # These are Transformers' own probabilities; keys that are padding have probability 0.
        p, q = theirs.attentions[-1], ours.attentions[-1]
        p, q = (x.masked_fill(~MASK[:, None, None], 1) for x in (p, q))
        terms = p * (p.log() - q.log())
        attention = terms.sum(-1).transpose(1, 2)[MASK].sum() / HEADS
        a, b = ours_projected[-1][2], their_projected[-1][2]
        return 0.5 / 24 * (attention + divergence((a, a), (b, b)))

    compare(model, plain_student, formula, batch, **COUNTS)


def test_tinybert():
    student, plain_student = bert("BertModel", 2, 8, 1, add_pooling_layer=False)
    teacher, plain_teacher = bert("BertModel", 4, 16, 2, add_pooling_layer=False)
    args = settings("tinybert", attention_weight=0.5, hidden_weight=2.0)
    model = KINDS["tinybert"](student, teacher, args).double()
    batch = batch_of(MASK)

    def formula(dtype):
        plain_teacher.to(dtype)
        ours, ours_projected = attentions(plain_student, batch)
        with torch.no_grad():
            theirs, their_projected = attentions(plain_teacher, batch)
        total = 0
        for m, teacher_layer in ((1, 2), (2, 4)):
            for i in range(B):
                length = int(MASK[i].sum())
                scores = []
                for query, key, _ in (ours_projected[m - 1], their_projected[teacher_layer - 1]):
                    a, b = (x[i, :length].unflatten(-1, (HEADS, -1)) for x in (query, key))
                    scores.append(torch.einsum("qhd,khd->hqk", a, b) / a.shape[-1] ** 0.5)
                total = total + 0.5 * (scores[0] - scores[1]).square().mean((0, 2)).sum()
        maps = [model.embedding_projection, model.projection, model.projection]
        for map_, m, g in zip(maps, (0, 1, 2), (0, 2, 4), strict=True):
            mapped = ours.hidden_states[m] @ map_.weight.detach().to(dtype).T
            apart = (mapped - theirs.hidden_states[g]).square().mean(-1)
            total = total + 2 * apart[MASK].sum()
        return total / 24

    compare(model, plain_student, formula, batch, **COUNTS)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_multilingual(pooling):
    student, plain_student = bert("BertModel", 1, 8, 1, add_pooling_layer=False)
    teacher, plain_teacher = bert("BertModel", 2, 8, 2, add_pooling_layer=False)
    model = KINDS["multilingual"](student, teacher, settings("multilingual", pooling=pooling))
    ours, theirs = batch_of(mask_of(T, 4, 2, 5)), batch_of(mask_of(3, 6), seed=1)

    def vectors(plain, batch):
        hidden = plain(**batch).last_hidden_state
        if pooling == "cls":
            return hidden[:, 0]
        mask = batch["attention_mask"]
        return torch.stack(
            [row[keep.bool()].mean(0) for row, keep in zip(hidden, mask, strict=True)]
        )

    def formula(dtype):
        plain_teacher.to(dtype)
        with torch.no_grad():
            expected = vectors(plain_teacher, theirs)
        found = vectors(plain_student, ours)
        return sum((found[i] - expected[i % 2]).square().mean() for i in range(4)) / 4

    batch = {**ours, **{f"teacher_{name}": value for name, value in theirs.items()}}
    compare(model, plain_student, formula, batch, **COUNTS)


def test_electra():
    student, plain_student = bert("ElectraForPreTraining", 1, 8, 1, ElectraConfig)
    teacher, plain_teacher = bert("ElectraForPreTraining", 2, 12, 2, ElectraConfig)
    generator, _ = bert("ElectraForMaskedLM", 1, 4, 3, ElectraConfig)
    model = KINDS["electra"](student, teacher, settings("electra", generator="g"), generator)
    model.double()
    ids = batch_of(mask_of(T, T, T))["input_ids"]
    labels = torch.full_like(ids, -100)
    labels[:, [1, 4]] = ids[:, [1, 4]]
    batch = {"input_ids": ids.masked_fill(labels != -100, 3), "labels": labels}
    batch |= {"attention_mask": torch.ones_like(ids), "sample_index": torch.arange(B)}
    found: list[torch.Tensor] = []
    with model.teacher.electra.embeddings.register_forward_hook(
        lambda module, args, kwargs, out: found.append(kwargs["input_ids"]), with_kwargs=True
    ):
        model(**batch, num_items_in_batch=6, num_tokens_in_batch=24)
    replaced = found[0].view_as(ids)
    assert (replaced != ids)[labels != -100].any() and torch.equal(
        replaced[labels == -100], ids[labels == -100]
    )

    def formula(dtype):
        plain_teacher.to(dtype)
        ours = plain_student(replaced, output_hidden_states=True)
        with torch.no_grad():
            theirs = plain_teacher(replaced, output_hidden_states=True)
        hard = F.binary_cross_entropy_with_logits(
            ours.logits, (replaced != ids).to(dtype), reduction="sum"
        )
        soft = losses.detection_divergence(ours.logits, theirs.logits, 2.0)
        mapped = ours.hidden_states[-1] @ model.projection.weight.detach().to(dtype).T
        cosines = F.cosine_similarity(mapped, theirs.hidden_states[-1], dim=-1)
        return (hard + soft + (1 - cosines).sum()) / 24

    compare(model, plain_student, formula, batch, num_items_in_batch=6, num_tokens_in_batch=24)
