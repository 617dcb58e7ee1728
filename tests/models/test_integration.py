"""Models of all families, used with the features of Transformers and PyTorch."""

from __future__ import annotations

import inspect
import logging
import math
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainingArguments, pipeline
from transformers.modeling_layers import GradientCheckpointingLayer

import fastplm
from fastplm import _extension, models
from fastplm._backends import record_decisions
from fastplm._budget import RMS_FACTOR
from fastplm._registry import OPS
from fastplm.testing import (
    FORWARD_FACTOR,
    GRADIENT_FACTOR,
    check_error,
    check_in_fp64,
    rerounded,
)

from .conftest import (
    FAMILIES,
    LANGUAGE_MODELS,
    LENGTH,
    PADDINGS,
    ROWS,
    config_of,
    eager_parent,
    every_class,
    every_family,
    gradients,
    inputs_of,
    loss_of,
    pair,
    same,
    small_config,
)

MASK = PADDINGS["right"]


def ours_of(family, seed=1, **changed):
    torch.manual_seed(seed)
    return getattr(models, LANGUAGE_MODELS[family])(small_config(family, **changed))


def parent_of(family, implementation="eager", **changed):
    parent = getattr(transformers, LANGUAGE_MODELS[family])
    return parent._from_config(small_config(family, **changed), attn_implementation=implementation)


def batch(mask=MASK, seed=0):
    """Ids and mask, and labels at some of the tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 37, (ROWS, LENGTH), generator=generator).masked_fill(mask == 0, 1)
    chosen = (torch.rand(ROWS, LENGTH, generator=generator) < 0.4) & mask.bool()
    chosen[0, :3] = True
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(~chosen, -100),
    }


needs_products = pytest.mark.skipif(
    _extension.lacks("linear", "CPU") is not None, reason="csrc/ is not built"
)


#: Operators that multiply in csrc/, of linear layers and of the functions of a layer.
_PRODUCTS = ("fastplm_C::linear", "fastplm_C::product", "fastplm::linear_fwd")


class _Operators(TorchDispatchMode):
    """Collects the names of operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(operator.name())
        return operator(*args, **kwargs or {})


@needs_products
@every_family
def test_linear_layers_in_csrc_equal_the_parents(hold, family):
    """Every linear layer multiplies in csrc/gemm/linear.h, as on a CPU where that is faster."""
    inputs = batch()

    def run(model, **extra):
        with fastplm.use_backend("cpp", "linear"):
            return {"loss": model(**inputs, **extra).loss}

    ours = ours_of(family)
    with _Operators() as operators, fastplm.use_backend("cpp", "linear"):
        ours(**inputs)
    products = [name for name in operators.names if name.startswith(_PRODUCTS)]
    assert len(products) >= 4 * ours.config.num_hidden_layers
    hold(ours, parent_of(family), run)


@needs_products
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", ["bart", "gpt2", "t5"])
def test_generation_by_few_rows_gives_the_parents_tokens(family, beams, monkeypatch, measured):
    """Every layer makes one pass over its weight, as on a CPU where that is faster."""
    measured.ours = lambda op, form, dtype, sizes: op == "linear"
    ours, parent = pair(LANGUAGE_MODELS[family])
    options = dict(max_new_tokens=5, min_new_tokens=5, num_beams=beams, do_sample=False)
    ids, taken = torch.randint(4, 37, (3, 6)), []
    linear = OPS["linear"]
    fast = linear.fast

    def recorded(*given):
        out = fast(*given)
        taken.append(out is not None)
        return out

    monkeypatch.setattr(linear, "fast", recorded)
    tokens = ours.generate(ids, attention_mask=torch.ones_like(ids), **options)
    # T5's encoder, and GPT-2 without a cache, multiply in functions, which ask by themselves.
    steps = {"bart": 4, "gpt2": 0, "t5": 3}[family]
    assert all(taken) and len(taken) >= max(1, 4 * steps * ours.config.num_hidden_layers)
    assert torch.equal(tokens, parent.generate(ids, attention_mask=torch.ones_like(ids), **options))


# --- outputs that a caller may ask for ------------------------------------------------------------


@every_family
def test_output_attentions_equal_the_parents_and_warn(hold, family, caplog):
    inputs = {**batch(), "use_cache": False}
    if family in ("albert", "deberta_v2", "electra", "bert", "roberta"):
        inputs.pop("use_cache")
    name = "encoder_attentions" if family in ("bart", "t5") else "attentions"

    def run(model):
        out = model(**inputs, output_attentions=True)
        weights = {
            f"{i}": w[MASK.bool()[:, None].expand(-1, 2, -1)] for i, w in enumerate(out[name])
        }
        # ``hold`` also runs "sdpa", which may return no attentions.
        assert len(weights) == 2 or model.config._attn_implementation == "sdpa"
        return {"loss": out.loss, **weights}

    logging.Logger.warning_once.cache_clear()
    ours = ours_of(family)
    run(ours)
    run(ours)
    said = [r.message for r in caplog.records if "output_attentions" in r.message]
    assert len(said) == len(set(said)) == (family != "mpnet") or len(set(said)) > 1, "one warning"
    hold(ours, parent_of(family), run)


@every_family
def test_a_4d_mask_is_used_unchanged(hold, family):
    """The first three tokens see each other only; so do the others."""
    if family in ("deberta_v2", "openai", "esm"):
        pytest.skip("its parent takes only 2-D masks")
    inputs = batch(torch.ones_like(MASK))
    group = torch.arange(LENGTH) < 3
    seen = (group[:, None] == group[None]).expand(ROWS, 1, LENGTH, LENGTH)
    if family == "gpt2":
        seen = seen & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()

    def run(model):
        dtype = next(model.parameters()).dtype
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
        if model.config.is_encoder_decoder:
            # Cross-attention takes the mask, too; another test gives it a mask of two dimensions.
            encoder = model.get_encoder()(inputs["input_ids"], attention_mask=mask)
            return {"loss": model(encoder_outputs=encoder, labels=inputs["labels"]).loss}
        return {"loss": model(**{**inputs, "attention_mask": mask}).loss}

    ours = ours_of(family)
    hold(ours, parent_of(family), run)
    if not ours.config.is_encoder_decoder:
        assert run(ours)["loss"] != ours(**inputs).loss, "the mask was looked at"


# --- tables, checkpoints, devices, dtypes ---------------------------------------------------------


@every_family
def test_a_resized_and_saved_model_is_tied_and_equals_its_parent(hold, family, tmp_path):
    if family == "esm":
        pytest.skip("its parent does not resize the bias")
    model = ours_of(family)
    model.resize_token_embeddings(45, mean_resizing=False)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    head, table = loaded.get_output_embeddings().weight, loaded.get_input_embeddings().weight
    assert head is table and head.shape[0] == 45
    inputs = batch()
    inputs["input_ids"][0, 1] = inputs["labels"][0, 1] = 44
    hold(loaded, parent_of(family, vocab_size=45), loss_of(**inputs))


@every_class
def test_a_resized_model_takes_the_new_ids(name):
    """Parts with their own configuration, such as T5's encoder and decoder, take them, too."""
    model, _ = pair(name)
    inputs = inputs_of(name, model.config, None)
    ids = [each for each in ("input_ids", "decoder_input_ids") if each in inputs]
    if name in ("EncoderDecoderModel", "EsmForMaskedLM") or not ids:
        pytest.skip("its parts are resized one by one")
    model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)
    for each in ids:
        inputs[each][..., -2] = model.config.vocab_size - 1
    model(**inputs)


@pytest.mark.slow
@every_family
def test_a_model_on_the_meta_device(family):
    model = ours_of(family).to("meta")
    inputs = {name: value.to("meta") for name, value in batch().items()}
    assert model(**inputs).loss.shape == ()
    logits = model(**inputs, output_logits=True).logits
    assert logits.shape == (ROWS, LENGTH, 37) and logits.device.type == "meta"


@every_family
def test_half_precision_is_as_accurate_as_the_parent(family):
    """fp16 is for predictions; the contract tests bf16 and gradients."""
    inputs = batch()
    labels = inputs.pop("labels")
    if family in ("bart", "t5"):
        inputs["decoder_input_ids"] = labels.masked_fill(labels < 0, 5)

    @torch.no_grad()
    def run(model):
        logits = model(**inputs).logits
        # Transformers' ModernBERT gives NaN where a window holds padding alone.
        theirs = family == "modernbert" and not type(model).__module__.startswith("fastplm.")
        assert theirs or logits.isfinite().all(), "of padding too"
        return logits[MASK.bool()]

    ours, parent = ours_of(family).half(), parent_of(family).half()
    parent.load_state_dict(ours.state_dict())
    bases = [run(parent), *map(run, rerounded(parent))]
    check_error("logits", run(ours), run(parent.double()), bases, FORWARD_FACTOR)


@pytest.mark.slow
@every_family
def test_autocast_is_as_accurate_as_the_parent(family):
    """The mean error of several models counts, as that of one small model varies in 16 bits."""
    ratios = []
    for seed in range(6):
        inputs, model, parent = batch(seed=seed), ours_of(family, seed), parent_of(family)
        parent.load_state_dict(model.state_dict())

        def gradient(model, enabled=True, inputs=inputs):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss = model(**inputs).loss
            loss.backward()
            found = [p.grad for p in model.parameters() if p.grad is not None]
            return torch.cat([grad.double().flatten() for grad in found])

        measured = [gradient(parent)]
        if getattr(parent, "_supports_sdpa", False):
            parent.set_attn_implementation("sdpa")
            measured.append(gradient(parent))
        gold = gradient(parent.double(), enabled=False)
        error = float((gradient(model) - gold).norm())
        assert error > 0, "autocast rounds"
        ratios.append(error / max(float((other - gold).norm()) for other in measured))
    assert math.prod(ratios) ** (1 / len(ratios)) <= RMS_FACTOR, ratios


# --- training -------------------------------------------------------------------------------------


@every_family
def test_gradient_checkpointing_changes_no_bit_with_dropout(family):
    if not getattr(models, LANGUAGE_MODELS[family]).supports_gradient_checkpointing:
        pytest.skip("its parent supports none")
    given = FAMILIES[family][1].items()
    dropout = {name: 0.1 for name, one in given if "drop" in name and isinstance(one, float)}
    model = ours_of(family, **dropout).train()

    def run(seed):
        torch.manual_seed(seed)
        return gradients(model, model(**batch()).loss)

    plain = run(3)
    assert not same(plain, run(4)), "another seed draws something else"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable()
    again = run(3)
    if family == "t5":  # whose modules run then: the same dropout, another rounding
        torch.testing.assert_close(again, plain)
    else:
        assert same(plain, again)


class Samples(torch.utils.data.Dataset):
    """Single sequences without padding, which the collator adds."""

    def __init__(self, inputs):
        self.rows = [
            {name: values[row][mask.bool()].tolist() for name, values in inputs.items()}
            for row, mask in enumerate(inputs["attention_mask"])
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def collate(rows):
    fill = {"input_ids": 1, "attention_mask": 0, "labels": -100}
    length = max(len(row["input_ids"]) for row in rows)
    return {
        name: torch.tensor([row[name] + [value] * (length - len(row[name])) for row in rows])
        for name, value in fill.items()
    }


def trainer_of(model, folder, optimizers=(None, None), **arguments):
    """A Trainer for the batch, on the CPU, without output."""
    quiet = dict(report_to=[], use_cpu=True, disable_tqdm=True)
    arguments = TrainingArguments(output_dir=str(folder), **quiet, **arguments)
    samples = Samples(batch())
    return Trainer(model, arguments, collate, samples, samples, optimizers=optimizers)


def trained(model, folder, rows, accumulation):
    """The model after a step of Trainer, and the step's gradients."""
    seen = {}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_pre_hook(
        lambda *_: seen.update({k: v.clone() for k, v in gradients(model).items()})
    )
    trainer = trainer_of(
        model,
        folder,
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        max_steps=1,
        max_grad_norm=0.0,
        save_strategy="no",
        seed=1,
    )
    trainer.train()
    return trainer, seen


@pytest.mark.slow
def test_trainer_accumulates_to_the_gradients_of_one_batch(tmp_path):
    start = ours_of("bert").state_dict()
    counts = (batch()["labels"] != -100).sum(1)
    assert len(set(counts.tolist())) > 1, "a mean of means would be wrong"

    measured = []
    for dtype in (torch.float64, torch.float32):
        parent = parent_of("bert").to(dtype)
        parent.load_state_dict(start)
        parent(**batch()).loss.backward()
        measured.append(gradients(parent))
    for how, rows in (("whole", ROWS), ("halves", ROWS // 2)):
        trainer, seen = trained(ours_of("bert").double(), tmp_path / how, rows, ROWS // rows)
        assert trainer.model_accepts_loss_kwargs
        check_in_fp64(seen, *measured)
        assert not same(trainer.model.state_dict(), start)


@pytest.mark.slow
def test_a_run_of_trainer_from_start_to_end(tmp_path):
    """An accelerated model with mixed precision, padding, evaluation and a checkpoint."""
    model = fastplm.accelerate(parent_of("bert", "sdpa"))
    torch.manual_seed(0)
    trainer = trainer_of(
        model,
        tmp_path,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        max_steps=30,
        bf16=True,
        save_steps=30,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert math.isfinite(before) and after < before / 2
    saved = transformers.BertForMaskedLM.from_pretrained(tmp_path / "checkpoint-30")
    assert same(saved.state_dict(), model.state_dict())
    predictions = trainer.predict(Samples(batch()))
    assert predictions.metrics["test_loss"] == pytest.approx(after)


@pytest.mark.slow
def test_two_processes_make_the_gradients_of_one(tmp_path):
    """DDP and FSDP2 run in one pair of processes."""
    model = ours_of("bert")
    given = {
        "config": FAMILIES["bert"][1],
        "state": model.state_dict(),
        "batch": batch(),
    }
    torch.save(given, tmp_path / "given.pt")
    script = Path(__file__).with_name("two_processes.py")
    root = str(Path(__file__).parents[2])
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((root, os.environ.get("PYTHONPATH", ""))),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    both = torch.load(tmp_path / "gradients.pt")

    def of(model):
        model.load_state_dict(given["state"])
        model(**batch()).loss.backward()
        return gradients(model)

    measured = of(parent_of("bert").double()), of(parent_of("bert"))
    for way in ("data_parallel", "sharded"):
        check_in_fp64(both[way], *measured)


# --- tracing --------------------------------------------------------------------------------------


COMPILED = (*LANGUAGE_MODELS.values(), "AlbertForPreTraining", "BertForPreTraining")
COMPILED += ("ElectraForPreTraining", "AlbertForSequenceClassification", "GPT2DoubleHeadsModel")


@pytest.mark.slow
@pytest.mark.parametrize("unpad", [None, 30])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_once_for_all_batches_of_a_shape(hold, name, unpad):
    torch._dynamo.reset()
    config = config_of(name)
    if "SequenceClassification" in name:
        config.problem_type = "single_label_classification"  # else forward changes it
    model = getattr(models, name)(config)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    rows = 90 if name.endswith("DoubleHeadsModel") else unpad  # 90 for three choices
    options = {} if unpad is None else {"unpad": rows}
    for mask in (MASK, torch.ones_like(MASK).tril()):
        inputs = inputs_of(name, config, mask)
        if name.startswith("Deberta"):  # which refuses others where nobody can count them
            inputs["labels"] = inputs["labels"].masked_fill(mask == 0, -100)
        if "masked_positions" in inspect.signature(model.forward).parameters:
            positions = (inputs["labels"].flatten() != -100).nonzero().flatten()
            spare = (0, mask.numel() - len(positions))
            inputs["masked_positions"] = torch.nn.functional.pad(positions, spare, value=-1)
            inputs["num_items_in_batch"] = torch.tensor(len(positions) + 1)

        def run(model, inputs=inputs, **extra):
            return {"loss": model(**inputs, **extra).loss}

        hold(model, model, lambda _, run=run: run(compiled, **options), run)
    assert counter.frame_count == 1


@pytest.mark.parametrize("family", ["bert", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_an_exported_program_gives_the_same(family):
    model = ours_of(family).eval()
    options = {"use_cache": False} if family == "gpt2" else {}
    first, second = (batch(MASK.roll(seed, 0), seed) | options for seed in range(2))
    del first["labels"], second["labels"]
    with torch.no_grad():
        program = torch.export.export(model, (), first).module()
        for inputs in (first, second):
            # Its layers are modules, which round otherwise than the functions of a layer.
            out, expected = program(**inputs).logits, model(**inputs, unpad=False).logits
            torch.testing.assert_close(out, expected)


# --- pipelines ------------------------------------------------------------------------------------

WORDS = "the cat sat on a mat dog ran to house and saw red bird in tree".split()
TEXTS = ["the cat sat on a mat", "a dog ran", "the red bird and the dog saw a cat in the house"]


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, pre_tokenizers, processors
    from tokenizers.models import WordLevel

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def numbers(answer):
    """All floats in what a pipeline returns, in their order."""
    if isinstance(answer, float):
        return [answer]
    if isinstance(answer, torch.Tensor):
        return answer.double().flatten().tolist()
    if isinstance(answer, dict):
        answer = answer.values()
    elif not isinstance(answer, list | tuple):
        return [float(answer)] if hasattr(answer, "dtype") else []
    return [number for part in answer for number in numbers(part)]


def words(answer):
    """Everything but the floats in what a pipeline returns."""
    if isinstance(answer, dict):
        return {key: words(value) for key, value in answer.items() if key != "score"}
    return [words(part) for part in answer] if isinstance(answer, list) else answer


@pytest.mark.parametrize(
    ("task", "name", "options"),
    [
        ("fill-mask", "BertForMaskedLM", {"top_k": 21}),
        ("text-classification", "BertForSequenceClassification", {"top_k": None}),
        ("token-classification", "BertForTokenClassification", {}),
        ("feature-extraction", "BertModel", {}),
        ("text-generation", "GPT2LMHeadModel", {"max_new_tokens": 4, "do_sample": False}),
    ],
)
def test_pipelines_answer_as_they_do_with_the_parent(tokenizer, task, name, options):
    family = "gpt2" if name.startswith("GPT2") else "bert"
    torch.manual_seed(2)
    config = small_config(family, vocab_size=len(tokenizer))
    if family == "gpt2":
        config.eos_token_id = config.bos_token_id = None
    model = getattr(models, name)(config).eval()
    texts = TEXTS
    if task == "fill-mask":
        texts = [text.replace(" a ", " [MASK] ") for text in TEXTS]
        texts = [text if "[MASK]" in text else text + " [MASK]" for text in texts]

    def answers(model):
        pipe = pipeline(task, model=model, tokenizer=tokenizer, device="cpu")
        return pipe(texts, **({} if task == "feature-extraction" else {"batch_size": 3}), **options)

    def parent(dtype):
        other = eager_parent(type(model), config, dtype=dtype)
        other.load_state_dict(model.state_dict())
        return other.eval()

    with record_decisions() as decisions:
        given = answers(model)
    assert {decision.op for decision in decisions} & {"attention", "attention_varlen"}
    gold = answers(parent(torch.float64))
    if task != "feature-extraction":
        assert words(given) == words(gold)
    assert numbers(gold) or task == "text-generation"
    # The pipelines themselves round their results to fp32.
    truth = torch.tensor(numbers(gold), dtype=torch.float64)
    bases = [torch.tensor(numbers(answers(each))) for each in rerounded(parent(torch.float32))]
    check_error(task, torch.tensor(numbers(given)), truth, bases, GRADIENT_FACTOR)


def test_objects_that_have_a_model(tokenizer):
    """A pipeline has it in ``model``; setfit's has it in ``model_body``."""
    config = small_config("bert", vocab_size=len(tokenizer))
    stock = transformers.BertForSequenceClassification(config).eval()
    pipe = pipeline("text-classification", model=stock, tokenizer=tokenizer, device="cpu")
    before = pipe(TEXTS)
    for given in (pipe, types.SimpleNamespace(model_body=stock)):
        assert fastplm.accelerate(given) is given
        assert type(stock) is models.BertForSequenceClassification
        assert fastplm.quantize(given, keep_weights=True) is given
        assert any(isinstance(module, fastplm.nn.LinearInt8) for module in stock.modules())
        assert pipe(TEXTS) != before
        assert fastplm.restore(fastplm.dequantize(given)) is given
        assert pipe(TEXTS) == before
    for function in (fastplm.accelerate, fastplm.restore, fastplm.quantize, fastplm.dequantize):
        with pytest.raises(ValueError, match="one in `model` or `model_body`"):
            function(types.SimpleNamespace(model="bert"))


@pytest.mark.parametrize("family", LANGUAGE_MODELS)
def test_checkpointing_runs_every_layer_twice(family):
    """A forward that hides the parent's wrapper would silently keep all activations."""
    model = ours_of(family).train()
    if not model.supports_gradient_checkpointing:
        pytest.skip("Transformers has no checkpoints in this family")
    layer = next(part for part in model.modules() if isinstance(part, GradientCheckpointingLayer))
    *_, inner = (part for part in layer.modules() if part is not layer and hasattr(part, "weight"))
    calls = []
    inner.register_forward_pre_hook(lambda *_: calls.append(1))
    counts = []
    for _ in range(2):
        calls.clear()
        model(input_ids=torch.randint(3, 9, (2, 5)), labels=torch.ones(2, 5).long()).loss.backward()
        counts.append(len(calls))
        model.gradient_checkpointing_enable()
    assert counts[1] == 2 * counts[0] > 0
