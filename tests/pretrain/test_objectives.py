"""Every objective through the command, and the messages about those an architecture lacks."""

from __future__ import annotations

import copy
import itertools
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._pytree import tree_map_only
from transformers.initialization import no_init_weights

import fastplm.models
from fastplm.data import load_tokenizer, tokenize
from fastplm.errors import ArgumentValueError, TooLittleTextError
from fastplm.finetune.data import prepare_task
from fastplm.finetune.features import FeaturesForSequenceClassification
from fastplm.finetune.models import build_model
from fastplm.finetune.settings import FinetuneArguments
from fastplm.graphs import GraphedStep
from fastplm.inference._checkpoint import load_encoder
from fastplm.models._ragged import RaggedBatch
from fastplm.pretrain import data as pretrain_data
from fastplm.pretrain import report, stream
from fastplm.pretrain import run as module
from fastplm.pretrain.evaluate import evaluate
from fastplm.pretrain.model import model_config
from fastplm.pretrain.objectives import (
    MASKING,
    NAMES,
    NOISES,
    OBJECTIVES,
    MaskedTokens,
    Objective,
    learned_as,
    objective_of,
)
from fastplm.pretrain.presets import FAMILIES, PRESETS, learned_by
from fastplm.pretrain.settings import PretrainArguments
from fastplm.pretrain.trainer import PretrainingTrainer
from fastplm.run.flops import flops_a_token
from fastplm.run.losses import PAIR_LABELS
from fastplm.testing import FORWARD_FACTOR, GRADIENT_FACTOR, check_error, check_in_fp64, rerounded

from ..recorder import record_graphs
from .conftest import with_ends

# --- which architecture learns what ---------------------------------------------------------------


@pytest.mark.parametrize(
    "arch, objective, unit",
    [
        ("bert-tiny", "mlm+nsp", "token"),
        ("roberta-tiny", "mlm", "token"),
        ("albert-tiny", "mlm+sop", "ngram"),
        ("electra-tiny", "rtd", "token"),
        ("gpt-tiny", "clm", None),
        ("gpt2-tiny", "clm", None),
        ("t5-tiny", "spans", None),
        ("bart-tiny", "denoise", None),
    ],
)
def test_defaults(arch, objective, unit):
    args = module.PretrainArguments(arch, ["-"], 9, "out").plan()
    assert (args.objective, args.unit) == (objective, unit)


def test_every_preset_and_objective_is_reached():
    assert {preset.family for preset in PRESETS.values()} == set(FAMILIES)
    learned = {name for family in FAMILIES for name in learned_by(family)}
    assert learned == set(NAMES) == {kind.name for kind in OBJECTIVES}
    assert {kind.name for kind in OBJECTIVES if issubclass(kind, MaskedTokens)} == set(MASKING)


# --- runs -----------------------------------------------------------------------------------------

RUNS = [
    ("roberta-tiny", {"unit": "word"}, "RobertaForMaskedLM"),
    ("albert-tiny", {"optimizer": "lamb", "lr": 0.01}, "AlbertForPreTraining"),
    ("albert-tiny", {"objective": "mlm", "unit": "word"}, "AlbertForMaskedLM"),
    (
        "albert-tiny",
        {
            "objective": "mlm+nsp",
            "parameter_sharing": "attention",
            "embedding_size": 48,
            "layers": 3,
            "hidden": 96,
            "heads": 4,
        },
        "AlbertForPreTraining",
    ),
    ("bert-tiny", {"objective": "mlm+sop"}, "BertForPreTraining"),
    ("electra-tiny", {"objective": "mlm", "static_masks": 2}, "ElectraForMaskedLM"),
    ("gpt-tiny", {"layers": 1}, "OpenAIGPTLMHeadModel"),
    ("gpt2-tiny", {}, "GPT2LMHeadModel"),
    ("t5-tiny", {}, "T5ForConditionalGeneration"),
    ("bart-tiny", {}, "BartForConditionalGeneration"),
    ("bart-tiny", {"noise": "token_deletion"}, "BartForConditionalGeneration"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "options", "kind"), RUNS, ids=str)
def test_run(short_run, tmp_path, arch, options, kind):
    out = tmp_path / "out"
    metrics = short_run(out, arch, **options)
    history = metrics["history"]
    assert [entry["step"] for entry in history] == [1, 2, 3, 4, 5, 6]
    assert history[-1]["loss"] < history[0]["loss"]
    assert all(entry["tokens_per_second"] > 0 for entry in history)
    recorded = json.loads((out / "run.json").read_text())
    assert recorded["objective"] == metrics["arguments"]["objective"]
    objective = learned_as(recorded["objective"], PRESETS[arch].family)
    held_out = metrics["held_out"]
    check_held_out_loss(metrics, objective.token_loss, kind)
    pair = {"mlm+sop": "sentence_order", "mlm+nsp": "next_sentence"}.get(recorded["objective"])
    if pair is not None:
        assert 0 <= held_out[f"{pair}_accuracy"] <= 1
        for entry in history:
            parts = torch.tensor([entry["mlm_loss"], entry[f"{pair}_loss"]]).sum()
            gold = torch.tensor(entry["loss"], dtype=torch.float64)
            check_error("loss", parts, gold, [gold.float()], FORWARD_FACTOR)  # equal up to rounding
    config = json.loads((out / "model" / "config.json").read_text())
    assert config["architectures"] == [kind]
    for name, value in options.items():
        assert recorded[name] == ([value] if name == "noise" else value)
    if "layers" in options:
        names = {"layers": "num_hidden_layers", "hidden": "hidden_size"}
        names |= {"heads": "num_attention_heads"}
        loaded = transformers.AutoConfig.from_pretrained(out / "model")
        for name in (*names, "embedding_size", "parameter_sharing"):
            assert name not in options or getattr(loaded, names.get(name, name)) == options[name]


def check_held_out_loss(metrics, token_loss, kind):
    """Checks that the loss is that of Transformers' class on all held-out samples, and fell."""
    args = module.PretrainArguments(**metrics["arguments"]).plan()
    path = metrics["models"]["model"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    store = tokenize(pretrain_data.open_corpus(args.corpus), tokenizer, args.cache)
    objective = objective_of(args, tokenizer)
    _, dataset, _ = pretrain_data.hold_out(objective, store)
    collator = objective.eval_collator()
    batch = collator([dataset[i] for i in range(len(dataset))])
    batch = {k: v for k, v in batch.items() if k not in ("sample_index", "masked_positions")}
    plain = getattr(transformers, kind)
    model = plain.from_pretrained(path).eval()
    # Transformers' class knows the label of its own family, for the same head.
    own = "next_sentence_label" if kind.startswith("Bert") else "sentence_order_label"
    batch = {own if name in PAIR_LABELS else name: value for name, value in batch.items()}
    with torch.no_grad():
        bases = [each(**batch).loss for each in (model, *rerounded(model, 8))]
        gold = model.double()(**batch).loss
    held_out = metrics["held_out"]
    assert held_out["samples"] == len(dataset)
    loss = held_out[token_loss]
    loss += sum(held_out.get(f"{pair}_loss", 0.0) for pair in PAIR_LABELS.values())
    check_error("held-out loss", torch.tensor(loss), gold, bases, FORWARD_FACTOR)
    transformers.set_seed(args.seed)
    untrained = evaluate(module.make_model(args, tokenizer), dataset, collator, 64, token_loss)
    assert held_out[token_loss] < untrained[token_loss]


def test_held_out_loss_by_the_definition(short_run, tmp_path):
    """The loss of a GPT-2 follows from the saved model's log-probabilities of all tokens but the
    first."""
    metrics = short_run(tmp_path / "out", "gpt2-tiny", steps=2)
    settings = dict(metrics["arguments"])
    args = module.PretrainArguments(**settings).plan()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    store = tokenize(pretrain_data.open_corpus(args.corpus), tokenizer, args.cache)
    blocks = torch.tensor(with_ends(store.split(0.05)[1], tokenizer.eos_token_id))
    blocks = blocks[: len(blocks) // 32 * 32].view(-1, 32)
    assert (blocks == tokenizer.eos_token_id).sum() > 3
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(blocks).logits[:, :-1]
        expected = -exact.log_softmax(-1).gather(2, blocks[:, 1:, None]).mean()
        bases = [each(blocks, labels=blocks).loss for each in (model, *rerounded(model, 8))]
    loss = torch.tensor(metrics["held_out"]["clm_loss"])
    assert metrics["held_out"]["samples"] == len(blocks)
    check_error("clm_loss", loss, expected, bases, FORWARD_FACTOR)


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family in FAMILIES for name in learned_by(family)]
)
def test_enough_text_is_what_gives_a_sample(family, name, word_tokenizer, tmp_path):
    special = {f"{role}_token": f"<{role}>" for role in ("pad", "mask", "cls", "sep", "bos", "eos")}
    tokenizer = word_tokenizer(["<unk>", *special.values(), "<extra_id_0>", "a"], **special)
    arch = next(arch for arch in PRESETS if PRESETS[arch].family == family)
    args = module.PretrainArguments(arch, ["-"], 9, tmp_path, block_size=9, objective=name).plan()
    objective, answers = objective_of(args, tokenizer), set()
    # The documents have so many tokens each.
    for sizes in ([1], [5], [6], [7], [8], [9], [10], [30], [1] * 30, [2] + [1] * 20, [3] * 9):
        store = tokenize(["a " * size for size in sizes], tokenizer, tmp_path)
        try:
            gives_one = len(objective.dataset(store)) > 0
        except TooLittleTextError:
            gives_one = False
        assert (objective.lacks(store) == "") == gives_one, sizes
        answers.add(gives_one)
    assert answers == {True, False}


@pytest.mark.parametrize(("sentinels", "block_size"), [(20, 512), (200, 2048)])
@pytest.mark.filterwarnings("ignore:.*sentinels")  # there are more than twenty spans
def test_blocks_of_spans_fill_the_encoder_whatever_the_sentinels(
    words, corpus, tmp_path, sentinels, block_size
):
    args = module.PretrainArguments("t5-tiny", [corpus], 1, tmp_path, block_size=block_size).plan()
    tokenizer = words(sentinels)
    store = tokenize(pretrain_data.open_corpus(args.corpus), tokenizer, tmp_path)
    objective = objective_of(args, tokenizer)
    dataset = objective.dataset(store)
    batch = objective.collator()([dataset[0], dataset[1]])
    assert batch["input_ids"].shape == (2, block_size) and batch["attention_mask"].all()


@pytest.mark.parametrize("noise", NOISES)
def test_each_noise_alone(all_tokens, tmp_path, noise):
    """What each does to a text is tested with the collator."""
    args = module.PretrainArguments("bart-tiny", ["-"], 9, tmp_path, noise=[noise]).plan()
    collator = objective_of(args, all_tokens).collator()
    shares = {name: getattr(collator, setting) for name, (setting, _) in NOISES.items()}
    assert shares == dict.fromkeys(NOISES, 0.0) | {noise: NOISES[noise][1]}


@pytest.mark.parametrize("copies", [1, 3])
def test_static_masks_come_again(corpus, tmp_path, word_tokenizer, copies):
    words = sorted(set(corpus.read_text().replace(".", " . ").split()))
    special = {f"{role}_token": f"<{role}>" for role in ("pad", "mask", "cls", "sep")}
    tokenizer = word_tokenizer(["<unk>", *special.values(), *words], **special)
    settings = dict(block_size=64, cache=tmp_path, objective="mlm")

    def masks(epochs, **options):
        """The corrupted text of each block in each epoch, by the original text."""
        args = module.PretrainArguments(
            "bert-tiny", [corpus], 9, tmp_path, **settings, **options
        ).plan()
        store = tokenize(pretrain_data.open_corpus(args.corpus), tokenizer, tmp_path)
        objective = objective_of(args, tokenizer)
        size = len(objective.dataset(store))
        dataset, collator = objective.dataset(store, epochs * size), objective.collator()
        found = {}
        for epoch in range(epochs):
            samples = [dataset[epoch * size + i] for i in range(size)]
            batch = collator(samples)
            for sample, ids in zip(samples, batch["input_ids"], strict=True):
                found.setdefault(tuple(sample["input_ids"].tolist()), []).append(ids.tolist())
        return found

    static = masks(2 * copies, static_masks=copies)
    for each in static.values():
        assert each[:copies] == each[copies:]
        assert len({tuple(ids) for ids in each}) == copies
    dynamic = masks(2 * copies)
    assert dynamic.keys() == static.keys()
    assert all(len({tuple(ids) for ids in each}) == 2 * copies for each in dynamic.values())


# --- batches that say which rows are tokens -------------------------------------------------------

#: What a run can learn: one architecture for each family, and each of its objectives.
LEARNED = [
    (next(name for name in PRESETS if name.startswith(f"{family}-") and "tiny" in name), objective)
    for family in FAMILIES
    for objective in learned_by(family)
]
#: One for each collator, each mixin of a head, and DeBERTa, which counts rows in another way; the
#: others are slow.
ONE_EACH = {("bert-tiny", "mlm+nsp"), ("electra-tiny", "rtd"), ("gpt2-tiny", "clm")}
ONE_EACH |= {("t5-tiny", "spans"), ("bart-tiny", "denoise"), ("roberta-tiny", "mlm")}
ONE_EACH |= {("deberta-v3-tiny", "mlm")}


@pytest.fixture(scope="module")
def all_tokens(corpus, word_tokenizer):
    """A tokenizer of the corpus' words with the special tokens of all families."""
    words = sorted(set(corpus.read_text().replace(".", " . ").split()))
    special = {f"{role}_token": f"<{role}>" for role in ("pad", "mask", "cls", "sep", "bos", "eos")}
    sentinels = [f"<extra_id_{i}>" for i in range(20)]
    return word_tokenizer(["<unk>", *special.values(), *sentinels, *words], **special)


@pytest.fixture(
    params=[
        pytest.param(each, id="-".join(each), marks=() if each in ONE_EACH else pytest.mark.slow)
        for each in LEARNED
    ]
)
def learned(request, corpus, tmp_path_factory, all_tokens):
    """(the settings of a run, samples of unequal lengths, the same in full) of each objective."""
    arch, objective = request.param
    out = tmp_path_factory.mktemp("learned")
    settings = {"block_size": 64, "objective": objective, "cache": out}
    if objective in MASKING:
        settings["unit"] = "token"
    args = module.PretrainArguments(arch, [corpus], 9, out, **settings).plan()
    store = tokenize(pretrain_data.open_corpus(args.corpus), all_tokens, out)
    dataset = objective_of(args, all_tokens).dataset(store)
    full = [dataset[i] for i in range(6)]
    cut = [
        {
            name: value[: len(sample["input_ids"]) - 7 * i]
            if isinstance(value, torch.Tensor) and value.dim() == 1
            else value
            for name, value in sample.items()
        }
        for i, sample in enumerate(full)
    ]
    return args, cut, full


def losses_and_gradients(model, batch):
    torch.manual_seed(3)  # of the seeds of dropout
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    found = {name: weight.grad for name, weight in model.named_parameters()}
    return {"loss": loss.detach()} | {n: g.clone() for n, g in found.items() if g is not None}


def test_batches_with_their_rows_teach_the_same(learned, all_tokens):
    """Loss and gradients, dropout included, are those of the batch that the model counts itself."""
    args, *both = learned
    torch.manual_seed(0)
    model = module.make_model(args, all_tokens).train()
    for samples in both:
        plain, told = (
            objective_of(args, all_tokens).collator(unpad=unpad)(samples) for unpad in (False, True)
        )
        padded = bool((plain["attention_mask"] == 0).any())
        assert ("attention_mask" in told) == padded == (told["unpad"] is not False)
        found, gold = (losses_and_gradients(model, batch) for batch in (told, plain))
        bases = [losses_and_gradients(other, plain) for other in rerounded(model)]
        assert found.keys() == gold.keys()
        exact = [value.double() for name, value in gold.items() if name != "loss"]
        for name, value in found.items():
            factor, among = (FORWARD_FACTOR, ()) if name == "loss" else (GRADIENT_FACTOR, exact)
            others = [base[name] for base in bases]
            check_error(name, value, gold[name].double(), others, factor, among)
        with torch.no_grad():  # with logits, in eval mode, as Transformers' evaluate
            scores = [model.eval()(**batch).loss for batch in (told, plain)]
            others = [other.eval()(**plain).loss for other in rerounded(model)]
        check_error("loss", scores[0], scores[1].double(), others, FORWARD_FACTOR)
        model.train()


def test_a_step_on_such_a_batch_reads_no_value(learned, all_tokens, monkeypatch):
    """Values of fake tensors cannot be read. On a GPU they can, and that waits for it: so the same
    step on a batch that the model must count fails here."""
    args, *both = learned
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, no_init_weights():  # some draw until a value fits
        model = module.make_model(args, all_tokens).train()
    for name, used in list(sys.modules.items()):
        if name.startswith(("fastplm.models", "fastplm.nn")) and hasattr(
            used, "values_can_be_read"
        ):
            monkeypatch.setattr(used, "values_can_be_read", lambda tensor: True)

    def faked(value):
        if isinstance(value, RaggedBatch):
            return replace(value, **tree_map_only(torch.Tensor, mode.from_tensor, vars(value)))
        return mode.from_tensor(value)

    def step(batch):
        batch = {
            name: faked(value) if value is not False else value for name, value in batch.items()
        }
        with mode:
            model(**batch).loss.backward()

    make = objective_of(args, all_tokens).collator
    for samples in both:
        step(make(unpad=True)(samples))
    with pytest.raises(DataDependentOutputException):
        step(make(unpad=False)(both[0]))


def telling(monkeypatch):
    """Has the batches of a training tell their rows, as on a GPU; gives what it was told to do."""
    collator, told = Objective.collator, []

    def tells(self, **settings):
        if "unpad" in settings:  # of the training
            told.append(settings["unpad"])
            settings["unpad"] = True
        return collator(self, **settings)

    monkeypatch.setattr(Objective, "collator", tells)
    return told


def test_a_run_that_tells_the_rows_is_the_same(short_run, tmp_path, monkeypatch, curve):
    """As on a GPU: the noise of BART is then made on the CPU, where the lengths are read."""
    options = {"steps": 2, "gradient_accumulation": 2}
    counted = short_run(tmp_path / "counted", "bart-tiny", **options)
    told = telling(monkeypatch)
    monkeypatch.setattr(stream, "corrupts_on_device", lambda collator: not collator.needs_cpu)
    metrics = short_run(tmp_path / "told", "bart-tiny", **options)
    assert told == [False]
    for ours, theirs in zip(curve(metrics), curve(counted), strict=True):
        gold = torch.tensor(theirs["loss"]).double()
        check_error("loss", torch.tensor(ours["loss"]), gold, [gold.float()], FORWARD_FACTOR)


@pytest.mark.parametrize("no_graphs", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpu_gets_batches_with_rows_and_graphs(monkeypatch, tmp_path, device, no_graphs):
    args = module.PretrainArguments("bert-tiny", ["a.txt"], 9, tmp_path, no_graphs=no_graphs).plan()
    asked, data = [], SimpleNamespace(tokenizer=None, samples=None)
    monkeypatch.setattr(module, "make_model", lambda *args: SimpleNamespace(config=None))
    monkeypatch.setattr(Objective, "collator", lambda self, **given: asked.append(given))
    monkeypatch.setattr(Objective, "flops_a_token", lambda self, config: 0.0)
    monkeypatch.setattr(module, "trainer_of", lambda *args, **given: SimpleNamespace())
    monkeypatch.setattr(report, "rows_of_model", lambda *args: {})
    settings = SimpleNamespace(device=torch.device(device))
    trainer = module.build(args, settings, data).trainer
    assert asked == [{"unpad": device == "cuda"}]
    assert trainer.graphs == (device == "cuda" and not no_graphs)


def test_captured_steps_of_each_objective(learned, all_tokens, monkeypatch):
    """Gradients of replays, dropout and replaced tokens included, are those of plain steps."""
    args, *both = learned
    log, lines = record_graphs(monkeypatch), []
    torch.manual_seed(0)
    model = module.make_model(args, all_tokens).train()
    step = GraphedStep(model, say=lines.append)
    collator = objective_of(args, all_tokens).collator(unpad=True)
    if args.objective == "denoise":
        collator = replace(collator, infill_probability=0.0)  # which changes the shapes
    for number, chosen in itertools.product(range(3), both):
        samples = [sample | {"sample_index": 6 * number + i} for i, sample in enumerate(chosen)]
        samples = samples[number:] + samples[:number]
        given = collator(samples)
        expected = losses_and_gradients(model, given)
        model.zero_grad()
        torch.manual_seed(3)
        assert torch.equal(step.backward(**given), expected.pop("loss"))
        for name, weight in model.named_parameters():
            assert (weight.grad is None) == (name not in expected)
            assert weight.grad is None or torch.equal(weight.grad, expected[name]), name
    assert log == [*["capture", "replay"] * 2, "replay", "replay"] and not lines


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("bert-tiny", {"gradient_accumulation": 2}),
        ("electra-tiny", {}),
        pytest.param("electra-tiny", {"two_stage": True}, marks=pytest.mark.slow),
        pytest.param("albert-tiny", {"optimizer": "lamb"}, marks=pytest.mark.slow),
        pytest.param("t5-tiny", {"optimizer": "adafactor"}, marks=pytest.mark.slow),
        pytest.param("gpt2-tiny", {"gradient_accumulation": 2}, marks=pytest.mark.slow),
        pytest.param("bart-tiny", {}, marks=pytest.mark.slow),
    ],
)
def test_a_run_of_graphs_is_the_same(short_run, tmp_path, monkeypatch, curve, arch, options):
    """Transformers' loop around captured steps, with its log, schedule, checkpoints and resume."""
    options = {"steps": 8, "batch_size": 2, "save_every": 5, **options}
    log = record_graphs(monkeypatch)
    telling(monkeypatch)
    plain = short_run(tmp_path / "plain", arch, **options)
    assert not log
    monkeypatch.setattr(PretrainingTrainer, "graphs", property(lambda self: True, lambda *_: None))
    replayed = short_run(tmp_path / "replayed", arch, **options)
    assert "replay" in log
    for ours, theirs in zip(curve(replayed), curve(plain), strict=True):
        assert ours.keys() == theirs.keys()
        # The gradient is clipped in the optimizer's kernel: its rounding comes back in later steps.
        close = {name: pytest.approx(value, rel=1e-5) for name, value in theirs.items()}
        assert ours == close


# --- reproducibility ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({}, (0.15, 0.8, 0.1)),
        ({"mask_replace_prob": 1.0}, (0.15, 1.0, 0.0)),
        ({"mlm_probability": 0.4, "random_replace_prob": 0.2}, (0.4, 0.8, 0.2)),
        ({"arch": "electra-large"}, (0.25, 1.0, 0.0)),
        ({"arch": "electra-large", "mask_replace_prob": 0.85}, (0.25, 0.85, 0.0)),
        ({"arch": "electra-large", "objective": "mlm"}, (0.15, 0.8, 0.1)),
    ],
    ids=str,
)
def test_shares_of_masks(bert, options, shares):
    args = PretrainArguments(
        **{"arch": "bert-tiny", "corpus": ["-"], "steps": 9, "out": "-"} | options
    ).plan()
    assert args.mask_shares == shares
    tokenizer = load_tokenizer(bert / "tokenizer")
    objective = MaskedTokens(tokenizer, args.block_size, 0, objective_of(args, tokenizer).noise)
    collator = objective.collator()
    names = ("mlm_probability", "mask_replace_prob", "random_replace_prob")
    assert tuple(getattr(collator, name) for name in names) == shares
    ids = torch.randint(5, len(tokenizer), (64, 100), generator=torch.Generator().manual_seed(0))
    batch = collator([{"input_ids": row, "sample_index": i} for i, row in enumerate(ids)])
    chosen = batch["labels"] != -100
    assert chosen.sum() == round(100 * shares[0]) * 64
    masked = (batch["input_ids"][chosen] == tokenizer.mask_token_id).double().mean()
    assert abs(masked - shares[1]) < 0.03
    config = transformers.BertConfig()
    assert objective.flops_a_token(config) == flops_a_token(config, 128, masked=shares[0])
    # Whatever it learns from, held-out text is masked alike.
    assert tuple(getattr(objective.eval_collator(), name) for name in names) == (
        0.15,
        1,
        0,
    )


def test_what_electra_learns_is_in_its_configuration(bert, tmp_path):
    tokenizer = load_tokenizer(bert / "tokenizer")
    chosen = {"temperature": 30.0, "electra_sharing": "none", "generator_size": 0.5}
    chosen |= {"electra_objective": "rtd_masked", "adversarial": True, "rtd_weight": 7.0, "seed": 3}
    plan = module.PretrainArguments("electra-tiny", ["-"], 9, tmp_path, **chosen).plan()
    config = model_config(plan, tokenizer)
    assert (config.temperature, config.sampling_seed) == (30.0, 3)
    assert (config.objective, config.embedding_sharing) == ("rtd_masked", "none")
    assert (config.adversarial, config.discriminator_weight) == (True, 7.0)
    assert config.generator.hidden_size == config.discriminator.hidden_size / 2


ENCODERS = [
    ("bert-tiny", transformers.BertLMHeadModel, 120),
    pytest.param("roberta-tiny", transformers.RobertaForCausalLM, 300, marks=pytest.mark.slow),
    pytest.param("electra-tiny", transformers.ElectraForCausalLM, 120, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("arch", "kind", "size"), ENCODERS)
def test_an_encoder_that_reads_from_left_to_right(run, tmp_path, arch, kind, size):
    out = tmp_path / "out"
    metrics = run(out, arch=arch, objective="clm", vocab_size=size, dropout=0.0)
    first, last = metrics["history"][0], metrics["history"][-1]
    assert last["loss"] < first["loss"] and "clm_loss" in metrics["held_out"]
    config = transformers.AutoConfig.from_pretrained(out / "model")
    assert config.is_decoder and config.architectures == [kind.__name__]
    # Half of the pairs attend, and all tokens but one are predicted.
    layer = 4 * 128**2 + 2 * 128 * 512
    pairs, head = 2 * 2 * 128 * (32 * 33 // 2), 31 * (128**2 + 128 * config.vocab_size)
    assert metrics["flops_per_token"] == 6 * (2 * 32 * layer + pairs + head) / 32
    # Transformers' class gives the same loss, and what comes later changes nothing.
    tokenizer = load_tokenizer(out / "model", needs=())
    batch = tokenizer(["The river follows the old house."], return_tensors="pt")

    def found(cls, dtype):
        model = cls.from_pretrained(out / "model", dtype=dtype).eval()
        with torch.no_grad():
            return model(**batch, labels=batch["input_ids"]).loss, model(**batch).logits

    ours = getattr(fastplm.models, kind.__name__)
    exact = found(kind, torch.float64)[1]
    gold = torch.nn.functional.cross_entropy(exact[0, :-1], batch["input_ids"][0, 1:])
    single = found(kind, torch.float32)
    check_error("loss", found(ours, torch.float32)[0], gold, [single[0]], FORWARD_FACTOR)
    logits = found(ours, torch.float64)[1], exact, single[1]
    check_in_fp64(*({"logits": each} for each in logits))
    backbone, _ = load_encoder("embed", out / "checkpoint-6")
    ids = batch["input_ids"]
    changed = torch.cat([ids[:, :-2], ids[:, -2:].flip(1)], 1)
    with torch.no_grad():
        states = [backbone(one).last_hidden_state for one in (ids, changed)]
    assert torch.equal(states[0][:, :-2], states[1][:, :-2])
    assert not torch.equal(states[0][:, -1], states[1][:, -1])


def test_the_classifier_of_an_encoder_that_reads_from_left_to_right(run, tmp_path):
    """It reads the last token; the first one sees nothing of the text."""
    out = tmp_path / "out"
    run(out, objective="clm", steps=2)
    table = tmp_path / "table.tsv"
    rows = [f"{i % 2}\tThe river follows the {'house garden'.split()[i % 2]}." for i in range(40)]
    table.write_text("\n".join(["label\ttext", *rows]))
    model, given = out / "checkpoint-2", {"data": str(table), "out": tmp_path / "ft"}
    args = FinetuneArguments(task="classification", model=model, **given).plan()
    task = prepare_task(args)
    assert task.args.pooling == "last"
    model = build_model(task, 0).eval()
    assert type(model) is FeaturesForSequenceClassification and model.encoder.config.is_decoder
    batch = task.tokenizer(["The river.", "The old old river."], padding=True, return_tensors="pt")
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        states = model.encoder(**batch).last_hidden_state
        last = states[torch.arange(2), batch["attention_mask"].sum(1) - 1]
        torch.testing.assert_close(model(**batch).logits, model.classifier(last))
    assert not torch.equal(last[0], last[1]) and torch.allclose(states[0, 0], states[1, 0])
    with pytest.raises(ArgumentValueError, match="which reads from left to right; expected an"):
        prepare_task(FinetuneArguments(task="choice", model=out / "checkpoint-2", **given))
