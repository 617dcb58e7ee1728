from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from transformers import AlbertConfig, BertConfig, ElectraConfig, GPT2Config

import fastplm.models
from fastplm import _extension
from fastplm.cli import _parser, main
from fastplm.data import load_tokenizer
from fastplm.distill import losses
from fastplm.distill.objectives import (
    KINDS,
    layers_of,
    sentence_vectors,
    uniform_layers,
)
from fastplm.distill.run import (
    change_vocabulary,
    copy_weights,
    distill,
    hash_of_model,
    spread_layers,
)
from fastplm.distill.settings import METHODS, DistillArguments
from fastplm.errors import ArgumentValueError
from fastplm.run.flops import training_flops
from fastplm.testing import check_in_fp64

B, T, HEADS = 3, 7, 2
WORDS = 40
DOUBLE = torch.float64


def mask_of(*lengths: int) -> torch.Tensor:
    return torch.arange(T) < torch.tensor(lengths)[:, None]


MASK = mask_of(T, 4, 1)


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def agrees(ours, plain, *inputs: torch.Tensor, teacher: int = 1) -> None:
    """Compares loss and gradients with a formula; the last inputs, the teacher's, get none."""

    def run(function, dtype):
        given = [value.to(dtype, copy=True).requires_grad_() for value in inputs]
        for value in given[len(given) - teacher :]:
            value.requires_grad_(False)
        loss = function(*given)
        loss.backward()
        grads = {f"grad {i}": value.grad for i, value in enumerate(given) if value.requires_grad}
        return {"loss": loss.detach(), **grads}

    check_in_fp64(run(ours, DOUBLE), run(plain, DOUBLE), run(plain, torch.float32))


# --- the losses against plain formulas ------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "padded"])
@pytest.mark.parametrize("at_once", [1, 1 << 22])
@pytest.mark.parametrize("kind", ["relation", "score"])
def test_relations_and_scores(kind, at_once, mask, monkeypatch):
    monkeypatch.setattr(losses, "_SCORES_AT_ONCE", at_once)

    def scores(a, b, b_index, length):
        a, b = a[b_index, :length], b[b_index, :length]
        width = a.shape[-1] // HEADS
        parts = (slice(h * width, (h + 1) * width) for h in range(HEADS))
        return torch.stack([a[:, part] @ b[:, part].T / width**0.5 for part in parts])

    def plain(a, b, c, d):
        total = 0
        for index in range(B):
            length = T if mask is None else int(mask[index].sum())
            ours, theirs = scores(a, b, index, length), scores(c, d, index, length)
            if kind == "score":
                total = total + (ours - theirs).square().mean((0, 2)).sum()
            else:
                expected, log = theirs.softmax(-1), ours.log_softmax(-1)
                total = total + (expected * (theirs.log_softmax(-1) - log)).sum() / HEADS
        return total

    function = losses.relation_divergence if kind == "relation" else losses.score_distance

    def ours(a, b, c, d):
        return function((a, b), (c, d), HEADS, mask)

    inputs = [drawn(B, T, width, seed=seed) for seed, width in enumerate((6, 6, 10, 10))]
    for value in inputs if mask is not None else ():
        value[~mask] = 3e4  # values of padding are not read
    agrees(ours, plain, *inputs, teacher=2)


def test_relations_of_values_have_both_gradients():
    value, theirs = drawn(B, T, 6, seed=1), drawn(B, T, 6, seed=2)

    def plain(value, theirs):
        def log(x):
            heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            return (heads @ heads.mT / 3**0.5).log_softmax(-1)

        return F.kl_div(log(value), log(theirs), reduction="sum", log_target=True) / HEADS

    def ours(value, theirs):
        return losses.relation_divergence((value, value), (theirs, theirs), HEADS)

    agrees(ours, plain, value, theirs)


@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "padded"])
def test_distances_of_hidden_states(mask):
    student, teacher = drawn(B, T, 5, seed=1), drawn(B, T, 5, seed=2)
    kept = torch.ones(B, T, dtype=torch.bool) if mask is None else mask

    def cosine(student, teacher):
        a, b = student[kept], teacher[kept]
        return (1 - (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))).sum()

    def squares(student, teacher):
        return (student[kept] - teacher[kept]).square().sum() / 5

    agrees(lambda s, t: losses.cosine_distance(s, t, mask), cosine, student, teacher)
    agrees(lambda s, t: losses.squared_distance(s, t, mask), squares, student, teacher)


def test_divergence_of_detections():
    student, teacher = drawn(B, T, seed=1), drawn(B, T, seed=2)

    def plain(student, teacher):
        total = 0
        for sign in (1, -1):  # the logits of "replaced" and of "original"
            log_p, log_q = (F.logsigmoid(sign * x[MASK] / 3) for x in (teacher, student))
            total = total + (log_p.exp() * (log_p - log_q)).sum()
        return 9 * total

    def ours(student, teacher):
        return losses.detection_divergence(student, teacher, 3.0, MASK)

    agrees(ours, plain, student, teacher)


# --- the recipes against Transformers -------------------------------------------------------------

SIZES = {
    "vocab_size": WORDS,
    "num_attention_heads": HEADS,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.5,
}


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


# --- students -------------------------------------------------------------------------------------


def test_layers_at_equal_distances():
    assert spread_layers(6, 12) == [0, 2, 4, 7, 9, 11]  # DistilBERT's
    assert spread_layers(1, 5) == [0] and spread_layers(3, 3) == [0, 1, 2]
    assert spread_layers(2, 6) == [0, 5]
    assert uniform_layers(4, 12) == [2, 5, 8, 11]  # TinyBERT's
    assert uniform_layers(1, 5) == [4]


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("BertForMaskedLM", BertConfig(**SIZES, hidden_size=8, num_hidden_layers=4)),
        (
            "AlbertForMaskedLM",
            AlbertConfig(
                **{**SIZES, "vocab_size": 31},
                hidden_size=8,
                num_hidden_layers=4,
                num_hidden_groups=4,
            ),
        ),
        ("GPT2LMHeadModel", GPT2Config(vocab_size=31, n_embd=8, n_head=2, n_layer=4)),
    ],
    ids=["bert", "albert", "gpt2"],
)
def test_a_student_begins_with_layers_of_the_teacher(kind, config):
    teacher = getattr(fastplm.models, kind)(config)
    smaller = type(config)(
        **{
            **config.to_dict(),
            config.attribute_map.get("num_hidden_layers", "num_hidden_layers"): 2,
        }
    )
    if kind.startswith("Albert"):
        smaller.num_hidden_groups = 2
    student = getattr(fastplm.models, kind)(smaller)
    copy_weights(student, teacher, [1, 3])

    def layers(model):
        return model.base_model.h if kind.startswith("GPT2") else layers_of(model)

    for ours, theirs in zip(layers(student), (layers(teacher)[1], layers(teacher)[3]), strict=True):
        for name, value in ours.state_dict().items():
            assert torch.equal(value, theirs.state_dict()[name])
    ids = torch.arange(6)[None]
    embedded = [model.get_input_embeddings()(ids) for model in (student, teacher)]
    assert torch.equal(*embedded)
    assert torch.equal(*(model.get_output_embeddings().weight for model in (student, teacher)))


def test_tokens_of_both_vocabularies_keep_their_embedding(word_tokenizer):
    old = word_tokenizer(["[PAD]", "a", "b", "c"], pad_token="[PAD]")
    new = word_tokenizer(["c", "[PAD]", "d", "a", "e"], pad_token="[PAD]")
    config = BertConfig(**{**SIZES, "vocab_size": 4}, hidden_size=8, num_hidden_layers=1)
    student = fastplm.models.BertModel(config)
    before = student.get_input_embeddings().weight.detach().clone()
    change_vocabulary(student, new, old, copied=True)
    after = student.get_input_embeddings().weight
    assert after.shape == (5, 8) and student.config.vocab_size == 5
    assert torch.equal(after[[0, 1, 3]], before[[3, 0, 1]])
    assert bool((after[[2, 4]] != 0).all())
    assert student.config.pad_token_id == 1


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def distilled(corpus, tmp_path_factory):
    """The command line of a distillation that takes seconds, with options added or replaced."""
    cache = tmp_path_factory.mktemp("cache")

    def build(out: Path, teacher: Path, recipe: str = "distilbert", **options: object) -> list[str]:
        given = {"recipe": recipe, "teacher": teacher, "corpus": corpus, "out": out, "cache": cache}
        given |= {"student-layers": 1, "steps": 4, "save-every": 2, "log-every": 1, "lr": 1e-3}
        given |= {"block-size": 32, "batch-size": 4, "precision": "fp32"}
        given |= {name.replace("_", "-"): value for name, value in options.items()}
        words = ["distill"]
        for name, value in given.items():
            if value is not None:
                words += [f"--{name}"] + ([] if value is True else [str(value)])
        return words

    return build


def loads_as(kind: str, path: Path, **options) -> None:
    """Transformers' class reads each weight of a folder, and gives the results of fastplm's."""
    plain, loading = getattr(transformers, kind).from_pretrained(
        path, output_loading_info=True, dtype=DOUBLE, **options
    )
    assert not any(loading.values()), loading
    assert json.loads((path / "config.json").read_text())["architectures"] == [kind]
    ours = getattr(fastplm.models, kind).from_pretrained(path, dtype=DOUBLE, **options)
    single = getattr(transformers, kind).from_pretrained(path, dtype=torch.float32, **options)
    batch = transformers.AutoTokenizer.from_pretrained(path)(
        "The river follows.", return_tensors="pt"
    )
    shown = []
    for model in (ours, plain, single):
        with torch.no_grad():
            shown.append({"out": model.eval()(**batch)[0]})
    check_in_fp64(*shown)


@pytest.mark.parametrize(
    ("recipe", "kind", "parts"),
    [
        ("distilbert", "BertForMaskedLM", {"mlm", "soft", "hidden"}),
        ("tinybert", "BertModel", {"attention", "hidden", "embedding"}),
        ("minilm", "BertModel", {"attention", "value_relation"}),
        ("minilm-v2", "BertModel", {"query_relation", "key_relation", "value_relation"}),
    ],
)
def test_a_run(recipe, kind, parts, distilled, bert, tmp_path):
    out, before = tmp_path / "out", hash_of_model(bert / "model")
    width = {"student_hidden": 64} if recipe in ("tinybert", "minilm-v2") else {}
    assert main(distilled(out, bert / "model", recipe, **width)) == 0
    assert hash_of_model(bert / "model") == before
    metrics = json.loads((out / "metrics.json").read_text())
    for entry in (*metrics["history"], metrics["held_out"]):
        found = {name.removesuffix("_loss") for name in entry if name.endswith("_loss")}
        assert found == parts
    assert metrics["history"][-1]["loss"] < metrics["history"][0]["loss"]
    headless = {} if kind == "BertForMaskedLM" else {"add_pooling_layer": False}
    loads_as(kind, out / "model", **headless)
    config = json.loads((out / "model" / "config.json").read_text())
    assert config["num_hidden_layers"] == 1 and config["hidden_size"] == width.get(
        "student_hidden", 128
    )
    # The checkpoint holds the trained parameters, without the teacher.
    saved = safetensors.torch.load_file(out / "checkpoint-4" / "model.safetensors")
    assert {name.split(".")[0] for name in saved} <= {
        "student",
        "projection",
        "embedding_projection",
    }
    assert ("projection.weight" in saved) == (recipe == "tinybert")
    student = safetensors.torch.load_file(out / "model" / "model.safetensors")
    for name, value in student.items():
        assert torch.equal(value, saved[f"student.{name}"])


def test_tinybert_learns_from_a_teacher_that_was_fine_tuned(distilled, bert, tmp_path):
    """The second step of TinyBERT, of hidden states and attention, as docs/finetuning.md has it."""
    kind = transformers.BertForSequenceClassification
    teacher = kind.from_pretrained(bert / "model", num_labels=3)
    with torch.no_grad():  # as if it was trained
        for weight in teacher.bert.encoder.parameters():
            weight.mul_(1.5)
    teacher.save_pretrained(tmp_path / "teacher")
    load_tokenizer(bert / "model").save_pretrained(tmp_path / "teacher")
    general = tmp_path / "general"
    assert main(distilled(general, bert / "model", "tinybert", student_hidden=64)) == 0
    options = {"student": general / "model", "student_layers": None}
    losses = {}
    for name, path in (("task", tmp_path / "teacher"), ("other", bert / "model")):
        assert main(distilled(tmp_path / name, path, "tinybert", **options)) == 0
        metrics = json.loads((tmp_path / name / "metrics.json").read_text())
        losses[name] = [entry["loss"] for entry in metrics["history"]]
    assert losses["task"][-1] < losses["task"][0] and losses["task"] != losses["other"]
    loads_as("BertModel", tmp_path / "task" / "model", add_pooling_layer=False)


def test_a_budget_of_flops(distilled, bert, tmp_path, capsys):
    """The student's training and the teacher's forward are paid for, whole steps alone."""
    counted = {}
    for name, layers in (("student", 1), ("teacher", None)):
        config = transformers.AutoConfig.from_pretrained(bert / "model")
        config.num_hidden_layers = layers or config.num_hidden_layers
        counted[name] = training_flops(config, (32,), masked=0.0)
    a_step = 4 * (counted["student"] + counted["teacher"] / 3)
    options = {"recipe": "tinybert", "steps": None}
    words = distilled(tmp_path / "out", bert / "model", **options, flops=3.99 * a_step)
    assert main(words) == 0
    assert "FLOPs pay for 3 steps of" in capsys.readouterr().err
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["arguments"]["steps"] == 3
    assert metrics["flops"] == pytest.approx(3 * a_step, rel=1e-3)
    assert main([*words, "--resume"]) == 0, "a finished run stays as it is"
    for more, said in (
        ({**options, "flops": 0.9 * a_step}, "the FLOPs of 1 of its steps"),
        ({"flops": 1e9}, "not allowed with argument --steps"),
        ({"steps": None}, "--steps"),
        ({"steps": None, "flops": 1e9, "recipe": "multilingual"}, "whose FLOPs are not counted"),
    ):
        given = distilled(tmp_path / "no", bert / "model", **more)
        if more.get("recipe") == "multilingual":
            given += ["--translation", "-"]
        try:
            assert main(given) == 2
        except SystemExit as error:
            assert error.code == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_electra_and_gpt2_runs(distilled, electra, run, tmp_path):
    out = tmp_path / "electra"
    files = {"recipe": "electra", "generator": electra / "generator"}
    assert main(distilled(out, electra / "discriminator", **files)) == 0
    loads_as("ElectraForPreTraining", out / "model")
    held_out = json.loads((out / "metrics.json").read_text())["held_out"]
    assert {"rtd_loss", "soft_loss", "hidden_loss", "replaced_recall"} <= held_out.keys()

    run(tmp_path / "gpt", arch="gpt2-tiny", vocab_size=300, steps=2)
    assert main(distilled(tmp_path / "distilgpt", tmp_path / "gpt" / "model")) == 0
    loads_as("GPT2LMHeadModel", tmp_path / "distilgpt" / "model")


@pytest.fixture(scope="session")
def parallel(tmp_path_factory):
    """Two files whose lines belong together; two pairs have a blank side."""
    folder = tmp_path_factory.mktemp("parallel")
    nouns = {"river": "Fluss", "house": "Haus", "train": "Zug", "garden": "Garten"}
    lines = [
        (f"The {a} sees the {b}.", f"Der {x} sieht den {y}.")
        for a, x in nouns.items()
        for b, y in nouns.items()
    ] * 4
    lines[3], lines[5] = ("", lines[3][1]), (lines[5][0], " ")
    for name, side in zip(("en", "de"), zip(*lines, strict=True), strict=True):
        (folder / f"{name}.txt").write_text("\n".join(side) + "\n")
    return {"corpus": folder / "en.txt", "translation": folder / "de.txt"}


@pytest.mark.slow
def test_a_multilingual_run(distilled, parallel, bert, tmp_path, capsys):
    out = tmp_path / "out"
    more = {**parallel, "recipe": "multilingual", "vocab_size": 100, "steps": 8}
    assert main(distilled(out, bert / "model", **more)) == 0
    assert "2 pairs of lines are left out" in capsys.readouterr().err
    metrics = json.loads((out / "metrics.json").read_text())
    for name in ("source_loss", "translation_loss"):
        assert metrics["history"][-1][name] < metrics["history"][0][name]
        assert 0 < metrics["held_out"][name]
    loads_as("BertModel", out / "model", add_pooling_layer=False)
    tokenizer = load_tokenizer(out / "model")
    assert len(tokenizer) == metrics["vocab_size"] <= 100
    assert tokenizer.tokenize("der zug") == ["der", "zug"]
    with torch.no_grad():
        model = fastplm.models.BertModel.from_pretrained(out / "model", add_pooling_layer=False)
        batch = tokenizer(["The river.", "Der Fluss."], padding=True, return_tensors="pt")
        vectors = sentence_vectors(model.eval(), batch["input_ids"], batch["attention_mask"])
    assert vectors.shape == (2, 128)


@pytest.mark.slow
def test_resumed_as_if_never_killed(distilled, bert, killed, curve, tmp_path):
    undisturbed, out = tmp_path / "one", tmp_path / "two"
    options = {"recipe": "tinybert", "student_hidden": 64, "steps": 5}
    assert main(distilled(undisturbed, bert / "model", **options)) == 0
    killed(distilled(out, bert / "model", **options), steps=3)
    assert not (out / "model").exists() and (out / "checkpoint-2").is_dir()
    assert main(distilled(out, bert / "model", **options, resume=True)) == 0
    assert curve(out) == curve(undisturbed)
    files = [folder / "model" / "model.safetensors" for folder in (undisturbed, out)]
    assert files[0].read_bytes() == files[1].read_bytes()
    # A finished run is not continued with another teacher, either.
    other = shutil.copytree(bert / "model", tmp_path / "teacher")
    weights = safetensors.torch.load_file(other / "model.safetensors")
    next(iter(weights.values())).add_(1)
    safetensors.torch.save_file(weights, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ArgumentValueError, match="`teacher` got files"):
        distill(DistillArguments(**vars_of(distilled(out, other, **options, resume=True))))


def vars_of(words: list[str]) -> dict:
    given = vars(_parser().parse_args(words))
    given.pop("command")
    return given


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    ["distilbert", "multilingual"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in METHODS],
)
def test_accumulated_batches_are_one_large_batch(
    recipe, distilled, bert, electra, parallel, in_two_processes, tmp_path, request
):
    teacher, own = bert / "model", {}
    if recipe == "electra":
        teacher, own = electra / "discriminator", {"generator": electra / "generator"}
    elif recipe == "multilingual":
        own = {**parallel, "vocab_size": 100}
    elif recipe in ("tinybert", "minilm-v2"):
        own = {"student_hidden": 64}
    knows_samples = _extension.lacks("dropout_rows", "CPU") is None

    def losses(name: str, **options: object) -> list[float]:
        options = {"recipe": recipe, "steps": 2, **own, **options}
        assert main(distilled(tmp_path / name, teacher, **options)) == 0
        history = json.loads((tmp_path / name / "metrics.json").read_text())["history"]
        return [entry["loss"] for entry in history]

    rate = 0.1 if knows_samples else 0
    one = losses("one", batch_size=4, dropout=rate)
    two = losses("two", batch_size=2, gradient_accumulation=2, dropout=rate)
    assert two == pytest.approx(one, rel=1e-5)
    if request.node.get_closest_marker("slow"):
        options = {"recipe": recipe, "steps": 2, **own, "batch_size": 2, "dropout": rate}
        in_two_processes(distilled(tmp_path / "processes", teacher, **options))
        history = json.loads((tmp_path / "processes" / "metrics.json").read_text())["history"]
        assert [entry["loss"] for entry in history] == pytest.approx(one, rel=1e-5)
    if knows_samples:
        assert losses("other", batch_size=4, dropout=0.11)[0] != pytest.approx(one[0], rel=1e-5)


def test_without_a_teacher_only_the_labels_count(distilled, bert, tmp_path):
    out = tmp_path / "out"
    weights = {"soft_weight": 0, "hidden_weight": 0, "hard_weight": 1}
    assert main(distilled(out, bert / "model", **weights)) == 0
    for entry in json.loads((out / "metrics.json").read_text())["history"]:
        assert entry["loss"] == pytest.approx(entry["mlm_loss"], rel=1e-6)
        assert "hidden_loss" not in entry


@pytest.fixture(scope="module")
def places(bert, electra, word_tokenizer, tmp_path_factory):
    """Folders of models that fit and that do not."""
    folder = tmp_path_factory.mktemp("models")
    headless, other, causal = (folder / name for name in ("headless", "other", "causal"))
    shutil.copytree(bert / "model", causal)
    config = json.loads((causal / "config.json").read_text()) | {"is_decoder": True}
    (causal / "config.json").write_text(json.dumps(config))
    shutil.copytree(bert / "model", other)
    word_tokenizer(["[PAD]", "a"], pad_token="[PAD]").save_pretrained(other)
    transformers.BertModel.from_pretrained(bert / "model").save_pretrained(headless)
    load_tokenizer(bert / "model").save_pretrained(headless)
    models = {"teacher": bert / "model", "run": bert, "generator": electra / "generator"}
    return {**models, "headless": headless, "other words": other, "causal": causal}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"student_layers": 3}, ["`student_layers` got 3", "1 to 2, the layers of the teacher"]),
        (
            {"student_layers": None, "student": "other words"},
            ["`student` got", "the vocabulary of the teacher"],
        ),
        ({"teacher": "run"}, ["`teacher` got", "config.json"]),
        ({"teacher": "headless"}, ["`teacher` got", "lacks", "cls.predictions", "need no head"]),
        ({"recipe": "electra", "generator": "generator"}, ["`teacher` got", "family bert"]),
        ({"teacher": "causal"}, ["`teacher` got", "which reads from left to right"]),
        ({"recipe": "minilm", "teacher": "causal"}, ["`teacher` got", "from left to right"]),
        ({"recipe": "electra"}, ["`generator` got nothing", "Give --generator"]),
        ({"recipe": "multilingual"}, ["`translation` got nothing", "Give --translation"]),
        (
            {"recipe": "minilm", "student_hidden": 96, "student_heads": 3},
            ["3 attention heads", "minilm-v2"],
        ),
        (
            {"recipe": "minilm-v2", "relation_heads": 3},
            ["`relation_heads` got 3", "a divisor of both"],
        ),
        ({"recipe": "minilm-v2", "teacher_layer": 9}, ["`teacher_layer` got 9", "1 to 2"]),
        ({"block_size": 600}, ["`block_size` got 600", "at most 512"]),
        ({"student_hidden": 63}, ["`student_hidden` got 63", "a multiple of the 2"]),
        ({"attention_weight": 1}, ["`attention_weight` got 1.0 with the recipe distilbert"]),
        ({"hard_weight": 0, "soft_weight": 0, "hidden_weight": 0}, ["`hard_weight` got 0"]),
        ({"vocab_size": 99}, ["`vocab_size` got 99 with the recipe distilbert"]),
        ({"pooling": "cls"}, ["`pooling` got cls with the recipe distilbert"]),
        ({"recipe": "tinybert", "temperature": 3}, ["`temperature` got 3.0 with the recipe"]),
        ({"recipe": "minilm", "divergence": "js"}, ["`divergence` got js with the recipe minilm"]),
    ],
    ids=lambda value: None if isinstance(value, list) else "-".join(map(str, value)),
)
def test_errors_of_one_line(options, said, distilled, places, tmp_path, refused):
    given = {name: places.get(value, value) for name, value in options.items()}
    teacher = given.pop("teacher", places["teacher"])
    refused(distilled(tmp_path / "out", teacher, **given), *said)
    assert not (tmp_path / "out").exists()


def test_parallel_files_belong_together(distilled, parallel, bert, tmp_path, refused):
    short = tmp_path / "short.txt"
    short.write_text("Der Fluss.\n")
    argv = distilled(
        tmp_path / "out", bert / "model", "multilingual", **{**parallel, "translation": short}
    )
    refused(argv, "`translation` got", "1 lines", "expected 64")
