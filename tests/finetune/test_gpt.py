"""Fine-tuning of GPT and GPT-2: start, delimiter and extract tokens, both orders, the LM loss."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import pre_tokenizers

from fastplm import _extension, cli
from fastplm.errors import ArgumentValueError, DataError
from fastplm.finetune.models import DELIMITER, EXTRACT, START
from fastplm.finetune.run import FeatureDataset, build_model, finetune, make_trainer, prepare_task
from fastplm.finetune.settings import LIBRARIES, FinetuneArguments
from fastplm.finetune.tasks import predict
from fastplm.testing import FORWARD_FACTOR, check_error

SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
COUNT = 24


def gpt2() -> tuple:
    names = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {name: index for index, name in enumerate(names)}
    config = transformers.GPT2Config(vocab_size=len(names), bos_token_id=0, eos_token_id=0, **SIZES)
    return transformers.GPT2Tokenizer(vocab=vocabulary, merges=[]), transformers.GPT2Model(config)


def gpt() -> tuple:
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = ["<unk>", *letters, *(f"{letter}</w>" for letter in letters)]
    vocabulary = {name: index for index, name in enumerate(names)}
    config = transformers.OpenAIGPTConfig(vocab_size=len(names), **SIZES)
    tokenizer = transformers.OpenAIGPTTokenizer(vocab=vocabulary, merges=[])
    return tokenizer, transformers.OpenAIGPTModel(config)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """A tiny GPT-2 and a tiny GPT, whose tokenizers have no token for the ends of a text."""
    paths = {}
    for build in (gpt2, gpt):
        torch.manual_seed(0)
        tokenizer, model = build()
        path = paths[build.__name__] = tmp_path_factory.mktemp(build.__name__)
        tokenizer.save_pretrained(path)
        model.save_pretrained(path)
    return paths


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    rows = [f"{'ab' * (i % 3 + 1)}\tcd{'e' * (i % 4)}\t{i % 2}" for i in range(COUNT)]
    scored = [f"{row}.5" for row in rows]
    texts = [f"{'abc' * (i % 3 + 1)}\t{i % 2}" for i in range(COUNT)]
    choices = [
        f'{{"question": "ab", "choices": ["c", "de", "{"f" * (i % 5 + 1)}"], "answer": {i % 3}}}'
        for i in range(COUNT)
    ]
    contents = {
        "pair": ["text1\ttext2\tlabel", *rows],
        "regression": ["text1\ttext2\tscore", *scored],
        "classification": ["text\tlabel", *texts],
        "choice": choices,
    }
    for task, lines in contents.items():
        (folder / task).write_text("\n".join(lines))
    return {task: folder / task for task in contents}


def copied(path: Path) -> Path:
    return Path(shutil.copy(path, path.with_name(f"copied-{path.name}")))


@pytest.fixture
def arguments(checkpoints, files, tmp_path):
    def build(family: str, task: str, **options: object) -> FinetuneArguments:
        settings = {
            "model": checkpoints[family],
            "data": files[task],
            "eval_data": shutil.copy(files[task], tmp_path / f"eval-{task}"),
            "out": tmp_path / "out",
            "batch_size": 4,
            "steps": 3,
            "log_every": 1,
            "learning_rate": 1e-3,
            **options,
        }
        return FinetuneArguments(task=task, **settings).plan()

    return build


def trained(args: FinetuneArguments, out: Path) -> tuple:
    """The losses of a run in fp64, and its trainer."""
    task = prepare_task(args)
    features = FeatureDataset(task.features(task.train)[0])
    model = build_model(args, task, 3).double()
    trainer = make_trainer(args, task, model, features, 3, out)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return torch.tensor(losses, dtype=torch.float64), trainer


@pytest.mark.skipif(_extension.lacks("dropout_rows", "CPU") is not None, reason="no csrc/")
@pytest.mark.parametrize("options", [{}, {"lm_weight": 0.5}], ids=str)
@pytest.mark.parametrize("task", ["pair", "regression", "classification", "choice"])
@pytest.mark.parametrize("family", ["gpt", "gpt2"])
def test_dropout_does_not_depend_on_the_batch(family, task, options, arguments, one_step_of):
    whole, *split = one_step_of(arguments(family, task, dropout=0.1))
    assert split == pytest.approx([whole] * len(split), rel=1e-5)


# --- what is read, token by token -----------------------------------------------------------------


def test_two_texts_are_kept_apart(arguments):
    """Both texts are as in figure 1 of the paper, also with the saved tokenizer."""
    ends = {"gpt2": "", "gpt": "</w>"}
    for family, end in ends.items():
        task = prepare_task(arguments(family, "pair"))
        (first, *_), _ = task.features(task.train)
        tokens = task.tokenizer.convert_ids_to_tokens(first["input_ids"])
        assert tokens == [START, "a", f"b{end}", DELIMITER, "c", f"d{end}", EXTRACT]
        assert "token_type_ids" not in first or set(first["token_type_ids"]) == {0}
        task = prepare_task(arguments(family, "classification"))
        (first, *_), _ = task.features(task.train)
        tokens = task.tokenizer.convert_ids_to_tokens(first["input_ids"])
        assert tokens == [START, "a", "b", f"c{end}", EXTRACT]


def test_long_texts_are_cut_before_the_extract_token(arguments, tmp_path):
    path = tmp_path / "long"
    path.write_text(f"text1\ttext2\tlabel\n{'a' * 40}\t{'b' * 40}\t0\na\tb\t1\n")
    task = prepare_task(arguments("gpt2", "pair", data=path, max_length=16, eval_data=copied(path)))
    (first, _), _ = task.features(task.train)
    tokens = task.tokenizer.convert_ids_to_tokens(first["input_ids"])
    assert len(tokens) == 16 and tokens[0] == START and tokens[-1] == EXTRACT
    assert tokens[1:-1].count("a") >= 6 and tokens[1:-1].count("b") >= 6 and DELIMITER in tokens


def test_choices_share_the_question(arguments):
    task = prepare_task(arguments("gpt2", "choice"))
    features, _ = task.features(task.train)
    batch = task.collator()([dict(features[1]), dict(features[2])])
    shown = [
        [task.tokenizer.decode(row[: last + 1]) for row, last in zip(rows, lasts, strict=True)]
        for rows, lasts in zip(batch["input_ids"], batch["mc_token_ids"], strict=True)
    ]
    begin = f"{START}ab{DELIMITER}"
    assert shown == [
        [f"{begin}{choice}{EXTRACT}" for choice in ("c", "de", "ff")],
        [f"{begin}{choice}{EXTRACT}" for choice in ("c", "de", "fff")],
    ]
    assert batch["mc_labels"].tolist() == [1, 2]


def test_the_extract_token_is_classified(arguments):
    """The head gets no other state, also in padded batches."""
    for family in ("gpt2", "gpt"):
        args = arguments(family, "pair", dropout=0.0)
        task = prepare_task(args)
        model = build_model(args, task, 0).eval()
        features, _ = task.features(task.train)
        batch = task.collator()([dict(feature) for feature in features[:6]])
        assert len(set(batch["attention_mask"].sum(-1).tolist())) > 1
        batch.pop("labels")
        extract = task.tokenizer.convert_tokens_to_ids(EXTRACT)
        hidden = model.base_model(**batch).last_hidden_state
        state = hidden[batch["input_ids"] == extract]
        assert state.shape[0] == 6
        torch.testing.assert_close(model(**batch).logits, model.score(state))


# --- runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "gpt"])
@pytest.mark.parametrize("task", ["pair", "choice", "regression"])
def test_from_file_to_a_model_that_transformers_loads(family, task, checkpoints, files, tmp_path):
    out = tmp_path / "out"
    words = f"finetune --task {task} --model {checkpoints[family]} --data {files[task]} --out {out}"
    words += " --steps 2 --batch-size 4 --lm-weight 0.5" + " --both-orders" * (task == "regression")
    assert cli.main(words.split()) == 0
    path = out / "seed-0" / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    config = transformers.AutoConfig.from_pretrained(path)
    kind = getattr(transformers, config.architectures[0])
    model, loading = kind.from_pretrained(path, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    before = transformers.AutoModel.from_pretrained(checkpoints[family])
    rows = model.get_input_embeddings().weight
    added = rows[before.get_input_embeddings().num_embeddings :]
    assert added.shape[0] == len(tokenizer) - len(before.get_input_embeddings().weight)
    assert added.shape[0] == (3 if family == "gpt2" else 4)
    # The new embeddings differ, and have the standard deviation of the others.
    assert 0.5 < added.std() / rows.std() < 2 and torch.cdist(added, added).topk(2).values.min() > 0
    shown = tokenizer.convert_ids_to_tokens(tokenizer("ab", "cd")["input_ids"])
    assert (shown[0], shown[3], shown[-1]) == (START, DELIMITER, EXTRACT)
    if task == "pair":
        transformers.pipeline("text-classification", model=str(path))("ab")


@pytest.mark.parametrize(
    "family, task, options",
    [
        ("gpt2", "pair", {"both_orders": True, "lm_weight": 0.5}),
        ("gpt", "choice", {"lm_weight": 0.5}),
        pytest.param("gpt2", "choice", {}, marks=pytest.mark.slow),
        pytest.param("gpt", "regression", {"both_orders": True}, marks=pytest.mark.slow),
        pytest.param("gpt", "classification", {"lm_weight": 2.0}, marks=pytest.mark.slow),
    ],
)
def test_both_libraries_have_the_same_losses(family, task, options, arguments, tmp_path):
    ours, gold = (
        trained(arguments(family, task, library=library, dropout=0.0, **options), tmp_path)[0]
        for library in LIBRARIES
    )
    check_error("losses", ours.float(), gold, [gold.float()], FORWARD_FACTOR)


def test_both_orders_are_added_before_the_head(arguments, tmp_path):
    args = arguments("gpt2", "pair", both_orders=True, dropout=0.0)
    task = prepare_task(args)
    features, _ = task.features(task.train)
    tokens = [task.tokenizer.decode(ids) for ids in features[0]["input_ids"]]
    assert tokens == [f"{START}ab{DELIMITER}cd{EXTRACT}", f"{START}cd{DELIMITER}ab{EXTRACT}"]
    model = build_model(args, task, 0).double().eval()
    batch = task.collator()([dict(feature) for feature in features[:5]])
    outputs = task.outputs(model, **batch)
    states = []
    for order in range(2):
        ids, mask = batch["input_ids"][:, order], batch["attention_mask"][:, order]
        hidden = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
        states.append(hidden[torch.arange(5), mask.sum(-1) - 1])
    logits = model.score(states[0] + states[1])
    torch.testing.assert_close(outputs["logits"], logits)
    loss = torch.nn.functional.cross_entropy(logits, batch["labels"])
    torch.testing.assert_close(outputs["loss"], loss)
    # The order of the texts has no effect.
    swapped = {name: value.flip(1) for name, value in batch.items() if name != "labels"}
    torch.testing.assert_close(task.outputs(model, **swapped)["logits"], logits)


@pytest.mark.parametrize("name", ["pair", "choice"])
def test_the_loss_of_the_language_model_is_added(name, arguments):
    args = arguments("gpt2", name, dropout=0.0, lm_weight=0.25)
    task = prepare_task(args)
    features, _ = task.features(task.train)
    batch = task.collator()([dict(feature) for feature in features[:5]])
    model = build_model(args, task, 0).double().eval()
    both = task.outputs(model, **batch)["loss"]
    task.args = args.changed(lm_weight=0.0)
    alone = task.outputs(model, **batch)["loss"]
    language = transformers.GPT2LMHeadModel(model.config).double().eval()
    language.transformer.load_state_dict(model.base_model.state_dict())
    language.tie_weights()
    ids, mask = (
        batch[key].reshape(-1, batch[key].shape[-1]) for key in ("input_ids", "attention_mask")
    )
    gold = language(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    # Transformers' loss is in fp32.
    torch.testing.assert_close(
        both - alone, 0.25 * gold.loss, atol=1e-5, rtol=1e-5, check_dtype=False
    )


@pytest.mark.slow
def test_predictions_do_not_depend_on_the_batch(arguments, tmp_path):
    for name in ("choice", "regression"):
        _, trainer = trained(arguments("gpt", name), tmp_path / name)
        features, _ = trainer.task.features(trainer.task.test)
        found = predict(trainer, trainer.task, features[:6])
        alone = [predict(trainer, trainer.task, [feature])[0] for feature in features[:6]]
        for (a,), (b,) in zip(found, alone, strict=True):
            torch.testing.assert_close(a, b)
        assert found[0][0].shape == ((3,) if name == "choice" else (1,))


def test_from_scratch(arguments, checkpoints):
    """The model has the sizes of the checkpoint but none of its weights; each seed draws others."""
    metrics = finetune(arguments("gpt2", "choice", from_scratch=True, steps=1))
    assert metrics["arguments"]["from_scratch"] is True
    before = transformers.AutoModel.from_pretrained(checkpoints["gpt2"]).state_dict()
    for task in ("choice", "pair"):
        for library in LIBRARIES:
            args = arguments("gpt2", task, from_scratch=True, library=library)
            prepared = prepare_task(args)
            first, again, other = (build_model(args, prepared, seed) for seed in (5, 5, 6))
            name = "h.0.mlp.c_fc.weight"
            weights = [model.base_model.state_dict()[name] for model in (first, again, other)]
            assert torch.equal(weights[0], weights[1]) and weights[0].shape == before[name].shape
            assert not torch.equal(weights[0], weights[2])
            assert not torch.equal(weights[0], before[name])


# --- what is refused ------------------------------------------------------------------------------


def test_wrong_settings(arguments, files, tmp_path):
    with pytest.raises(ArgumentValueError, match="`both_orders` got True with --task choice"):
        arguments("gpt2", "choice", both_orders=True)
    path = files["classification"]
    args = arguments("gpt2", "regression", data=path, eval_data=copied(path), both_orders=True)
    with pytest.raises(ArgumentValueError, match="`both_orders` got True with one text"):
        prepare_task(args)
    bert = tmp_path / "bert"
    tokenizer, _ = gpt2()
    tokenizer.save_pretrained(bert)
    transformers.BertConfig(vocab_size=300, num_hidden_layers=1).save_pretrained(bert)
    for options in ({"both_orders": True}, {"lm_weight": 0.5}):
        (name,) = options
        args = arguments("gpt2", "pair", model=bert, **options)
        with pytest.raises(ArgumentValueError, match=f"`{name}` got .*bert; expected a GPT"):
            prepare_task(args)


def test_a_tokenizer_that_glues_two_texts_is_refused(arguments, tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer, model = gpt2()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A",
        pair="<|endoftext|> $A $B",
        special_tokens=[("<|endoftext|>", 0)],
    )
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    with pytest.raises(DataError, match="puts nothing between them"):
        prepare_task(arguments("gpt2", "pair", model=tmp_path))
    prepare_task(arguments("gpt2", "classification", model=tmp_path))
