"""fastplm.models.bert against the classes of the same names in Transformers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.testing
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, Trainer, TrainingArguments

from fastplm._backends import record_decisions
from fastplm._checks import ArgumentTypeError, ArgumentValueError
from fastplm.models import BertForMaskedLM, BertForPreTraining, BertModel
from fastplm.nn.mlm_head import mlm_loss
from fastplm.testing import check_in_fp64, peak_bytes

VOCAB, ROWS, LENGTH = 37, 4, 9
CONFIG = BertConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=48,
    max_position_embeddings=20,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    initializer_range=0.3,
)
MASKS = {
    "none": None,
    "full": torch.ones(ROWS, LENGTH, dtype=torch.int64),
    "right": torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [1] * 8 + [0], [1] * 2 + [0] * 7]),
    "left": torch.tensor([[1] * 9, [0] * 4 + [1] * 5, [0] + [1] * 8, [0] * 7 + [1] * 2]),
}
MASKS["boolean"] = MASKS["right"].bool()


def config():
    return copy.deepcopy(CONFIG)


def batch(mask=None):
    """Ids, and labels at a third of the tokens; the first label is token id 0."""
    ids = torch.randint(1, VOCAB, (ROWS, LENGTH))
    chosen = torch.rand(ROWS, LENGTH) < 0.3
    chosen[0, 0] = True
    if mask is not None:
        chosen &= mask.bool()
    labels = ids.masked_fill(~chosen, -100)
    labels[0, 0] = 0
    return ids.masked_fill(chosen, 1), labels


def padded_positions(labels, spare=5):
    positions = (labels.flatten() != -100).nonzero().flatten()
    return torch.cat((positions, positions.new_full((spare,), -1)))


def kept(tensor, mask):
    return tensor if mask is None else tensor[mask.bool()]


@pytest.mark.parametrize("positions", ["found", "given"])
@pytest.mark.parametrize("padding", MASKS)
def test_masked_lm_equals_its_parent(hold, padding, positions):
    mask = MASKS[padding]
    ids, labels = batch(mask)
    given = {"masked_positions": padded_positions(labels)} if positions == "given" else {}

    def run(model, **extra):
        out = model(ids, attention_mask=mask, labels=labels, output_hidden_states=True, **extra)
        hidden = {f"hidden {i}": kept(h, mask) for i, h in enumerate(out.hidden_states)}
        return {"loss": out.loss, "logits": kept(out.logits, mask), **hidden}

    ours = BertForMaskedLM(config())
    parent = transformers.BertForMaskedLM._from_config(config(), attn_implementation="eager")
    with record_decisions() as decisions:
        hold(ours, parent, lambda m: run(m, output_logits=True, **given), run)
    used = [decision.op for decision in decisions]
    assert used.count("attention") == 2 and used.count("linear_cross_entropy") == 1


@pytest.mark.parametrize("padding", MASKS)
def test_the_model_without_head_equals_its_parent(hold, padding):
    mask = MASKS[padding]
    ids, _ = batch(mask)

    def run(model):
        out = model(ids, attention_mask=mask, token_type_ids=ids % 2)
        hidden = kept(out.last_hidden_state, mask)
        return {"hidden": hidden, "pooled": out.pooler_output, "loss": hidden.square().sum()}

    parent = transformers.BertModel._from_config(config(), attn_implementation="eager")
    hold(BertModel(config()), parent, run)


def test_a_fully_padded_row_changes_nothing_for_the_others(hold):
    ids, labels = batch(MASKS["right"])
    mask = MASKS["right"].clone()
    mask[3], labels[3] = 0, -100

    def run(model, rows=ROWS):
        return {"loss": model(ids[:rows], attention_mask=mask[:rows], labels=labels[:rows]).loss}

    parent = transformers.BertForMaskedLM._from_config(config(), attn_implementation="eager")
    hold(BertForMaskedLM(config()), parent, run, lambda model: run(model, 3))


def test_gradient_checkpointing_changes_no_bit():
    ids, labels = batch()
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = BertForMaskedLM(config()).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids, labels=labels).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_label_0_is_a_label():
    ids, labels = batch()
    assert (labels == 0).any()
    model = BertForMaskedLM(config())
    without = labels.masked_fill(labels == 0, -100)
    assert model(ids, labels=labels).loss != model(ids, labels=without).loss


@pytest.mark.parametrize("positions", [None, torch.full((3,), -1)])
def test_nothing_labelled_is_loss_0_with_gradients_0(positions):
    ids, labels = batch()
    model = BertForMaskedLM(config())
    ignored = torch.full_like(labels, -100)
    for items in (None, 0, torch.tensor(7)):
        model.zero_grad()
        loss = model(ids, labels=ignored, masked_positions=positions, num_items_in_batch=items).loss
        loss.backward()
        assert loss.item() == 0.0
        assert not any(p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("count", [None, 0])
def test_no_pair_labelled_is_loss_0(count):
    ids, labels = batch()
    nothing = {
        "labels": torch.full_like(labels, -100),
        "next_sentence_label": torch.full((ROWS,), -100),
    }
    loss = BertForPreTraining(config())(ids, **nothing, num_sequences_in_batch=count).loss
    assert loss.item() == 0.0


def test_logits_are_made_when_asked_for_alone():
    ids, labels = batch()
    model = BertForMaskedLM(config())
    assert model(ids, labels=labels).logits is None
    assert model(ids).logits.shape == (ROWS, LENGTH, VOCAB)
    asked = model(ids, labels=labels, output_logits=True)
    assert torch.equal(asked.logits, model(ids).logits)
    assert [t.shape for t in model(ids, labels=labels, return_dict=False)] == [()]
    as_tuple = model(ids, labels=labels, output_logits=True, return_dict=False)
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[0], asked.loss)


@pytest.mark.parametrize("kind", [int, torch.tensor])
@pytest.mark.parametrize("cls", [BertForMaskedLM, BertForPreTraining])
def test_accumulated_half_batches_are_one_batch(hold, cls, kind):
    ids, labels = batch()
    labels[2:, 1:4] = 5
    halves = [int((labels[i : i + 2] != -100).sum()) for i in (0, 2)]
    assert halves[0] != halves[1], "a mean of means would be wrong"
    counts = {"num_items_in_batch": kind(sum(halves))}
    pairs = None
    if cls is BertForPreTraining:
        pairs = torch.tensor([0, 1, 1, 0])
        counts["num_sequences_in_batch"] = kind(ROWS)

    def run(model, rows=2, **counts):
        loss = 0.0
        for i in range(0, ROWS, rows):
            piece = {"input_ids": ids[i : i + rows], "labels": labels[i : i + rows], **counts}
            if pairs is not None:
                piece["next_sentence_label"] = pairs[i : i + rows]
            loss = loss + model(**piece).loss
        return {"loss": loss}

    model = cls(config())
    hold(model, model, lambda model: run(model, 2, **counts), lambda model: run(model, ROWS))


def test_next_sentence_shares_sum_to_1_without_a_count_of_sequences(hold):
    ids, labels = batch()
    labels[:] = -100
    labels[:, 2:4] = 7
    pairs = torch.tensor([0, 1, 1, 0])

    def halves(model):
        pieces = (slice(0, 2), slice(2, 4))
        return {
            "loss": sum(
                model(
                    ids[piece],
                    labels=labels[piece],
                    next_sentence_label=pairs[piece],
                    num_items_in_batch=8,
                ).loss
                for piece in pieces
            )
        }

    def whole(model):
        return {"loss": model(ids, labels=labels, next_sentence_label=pairs).loss}

    model = BertForPreTraining(config())
    hold(model, model, halves, whole)


@pytest.mark.parametrize("given", ["both", "labels", "next_sentence_label"])
def test_pretraining_equals_its_parent(hold, given):
    mask = MASKS["right"]
    ids, labels = batch(mask)
    pairs = torch.tensor([0, 1, 1, 0])

    def run(model):
        out = model(
            ids,
            attention_mask=mask,
            labels=None if given == "next_sentence_label" else labels,
            next_sentence_label=None if given == "labels" else pairs,
            output_logits=True,
        )
        return {
            "loss": out.loss,
            "prediction_logits": kept(out.prediction_logits, mask),
            "seq_relationship_logits": out.seq_relationship_logits,
        }

    def parent_run(model):
        """The parent has a loss only for both."""
        out = model(ids, attention_mask=mask, labels=labels, next_sentence_label=pairs)
        cross_entropy = nn.functional.cross_entropy
        loss = {
            "both": lambda: out.loss,
            "labels": lambda: cross_entropy(out.prediction_logits.flatten(0, 1), labels.flatten()),
            "next_sentence_label": lambda: cross_entropy(out.seq_relationship_logits, pairs),
        }
        return {
            "loss": loss[given](),
            "prediction_logits": kept(out.prediction_logits, mask),
            "seq_relationship_logits": out.seq_relationship_logits,
        }

    parent = transformers.BertForPreTraining._from_config(config(), attn_implementation="eager")
    ours = BertForPreTraining(config())
    hold(ours, parent, run, parent_run)
    out = ours(ids, labels=labels)
    assert out.prediction_logits is None and out.seq_relationship_logits is not None
    assert ours(ids).prediction_logits is not None and ours(ids).loss is None


# --- the tied table -------------------------------------------------------------------------------

HEADS = [BertForMaskedLM, BertForPreTraining]
WORDS = "bert.embeddings.word_embeddings.weight"
DECODER = "cls.predictions.decoder.weight"


def loss_of(model, ids, labels):
    pairs = {}
    if hasattr(model.cls, "seq_relationship"):
        pairs["next_sentence_label"] = torch.arange(ROWS) % 2
    return {"loss": model(ids, labels=labels, **pairs).loss}


def assert_tied(model, vocab=VOCAB):
    predictions = model.cls.predictions
    assert predictions.decoder.weight is model.get_input_embeddings().weight
    assert predictions.decoder.bias is predictions.bias
    assert predictions.decoder.weight.shape == (vocab, CONFIG.hidden_size)
    assert predictions.bias.shape == (vocab,)
    assert predictions.decoder.out_features == vocab == model.config.vocab_size


@pytest.mark.parametrize("cls", HEADS)
def test_tying_survives_saving_and_loading(cls, tmp_path):
    parent_cls = getattr(transformers, cls.__name__)
    model = cls(config())
    nn.init.normal_(model.cls.predictions.bias)
    assert_tied(model)
    for step, target in enumerate((cls, parent_cls, cls)):
        model.save_pretrained(tmp_path / str(step))
        loaded = target.from_pretrained(tmp_path / str(step))
        assert_tied(loaded)
        for name, value in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value), name
        model = loaded


@pytest.mark.parametrize("vocab", [VOCAB - 5, VOCAB + 8])
@pytest.mark.parametrize("cls", HEADS)
def test_tying_survives_a_resize(hold, cls, vocab, tmp_path):
    model = cls(config())
    model.resize_token_embeddings(vocab, mean_resizing=False)
    assert_tied(model, vocab)
    model.save_pretrained(tmp_path)
    loaded = cls.from_pretrained(tmp_path)
    assert_tied(loaded, vocab)
    ids, labels = batch()
    ids, labels = ids.clamp(max=vocab - 1), labels.clamp(max=vocab - 1)
    ids[-1, -1] = vocab - 1

    parent_cls = getattr(transformers, cls.__name__)
    resized = copy.deepcopy(model.config)
    resized._attn_implementation = "eager"
    hold(loaded, parent_cls(resized), lambda model: loss_of(model, ids, labels))


def words_gradient(model, ids, labels, tied=True):
    """Of the table; of two tables, of which each has one use, the sum."""
    model.zero_grad()
    model(ids, labels=labels).loss.backward()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    uses = [parameters[name].grad for name in ((WORDS,) if tied else (WORDS, DECODER))]
    assert all(use.any() for use in uses)
    return sum(uses)


def test_the_tables_gradient_is_the_sum_of_both_uses():
    ids, labels = batch()
    ours = BertForMaskedLM(config())
    apart = config()
    apart.tie_word_embeddings = False
    parent = transformers.BertForMaskedLM._from_config(apart, attn_implementation="eager")
    parent.load_state_dict(ours.state_dict())
    predictions = parent.cls.predictions
    assert predictions.decoder.weight is not parent.get_input_embeddings().weight
    single = words_gradient(parent, ids, labels, tied=False)
    gold = words_gradient(parent.double(), ids, labels, tied=False)
    out = words_gradient(ours.double(), ids, labels)
    check_in_fp64({WORDS: out}, {WORDS: gold}, {WORDS: single})


class Tables(TorchDispatchMode):
    """The pieces of memory of the table's shape that operators inside write."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.shape == (VOCAB, CONFIG.hidden_size):
                storage = tensor.untyped_storage()
                self.storages[storage.data_ptr()] = storage
        return out


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("cls", HEADS)
def test_the_tables_gradient_is_one_tensor(cls, checkpointing):
    ids, labels = batch()
    model = cls(config()).train()
    if checkpointing:
        model.gradient_checkpointing_enable()

    def backward():
        model.zero_grad()
        loss = model(ids, labels=labels).loss
        with Tables() as tables:
            loss.backward()
        return len(tables.storages), [p.grad for p in model.parameters() if p.grad is not None]

    tables, gradients = backward()
    assert tables == 1
    # A call of the embedding itself, and the bits stay.
    model.get_input_embeddings().register_forward_pre_hook(lambda *_: None)
    tables, expected = backward()
    assert tables > 1
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("cls", HEADS)
def test_an_untied_head_keeps_its_own_table(hold, cls):
    apart = config()
    apart.tie_word_embeddings = False
    ids, labels = batch()
    ours = cls(apart)
    nn.init.normal_(ours.cls.predictions.decoder.weight)
    parent_cls = getattr(transformers, cls.__name__)
    parent = parent_cls._from_config(copy.deepcopy(apart), attn_implementation="eager")

    hold(ours, parent, lambda model: loss_of(model, ids, labels))
    parameters = dict(ours.named_parameters())
    assert not torch.equal(parameters[WORDS].grad, parameters[DECODER].grad)


@pytest.mark.parametrize("cls", HEADS)
def test_embeddings_in_place_of_ids_with_labels(cls):
    ids, labels = batch()
    model = cls(config())
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(
        model(inputs_embeds=embeds, labels=labels).loss, model(ids, labels=labels).loss
    )
    with pytest.raises(ValueError, match="exactly one"):
        model(ids, inputs_embeds=embeds, labels=labels)


def test_the_attention_is_fastplms_unless_the_user_says_otherwise():
    own = config()
    model = BertForMaskedLM(own)
    assert model.config._attn_implementation == "fastplm"
    assert model.bert.config is model.config
    assert own._attn_implementation is None, "the caller's configuration is not changed"
    chosen = BertForMaskedLM._from_config(config(), attn_implementation="sdpa")
    assert chosen.config._attn_implementation == "sdpa"
    own._attn_implementation = "eager"
    assert BertForMaskedLM(own).config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "sdpa"


def test_trainer_passes_the_number_of_labels(tmp_path):
    """Trainer decides by the signature of forward, or by this attribute (transformers#47688)."""
    ids, labels = batch()
    samples = [{"input_ids": i, "labels": label} for i, label in zip(ids, labels, strict=True)]
    seen = []

    class Spy(BertForMaskedLM):
        def forward(self, input_ids, labels, num_items_in_batch, **kwargs):
            seen.append(int(num_items_in_batch))
            return super().forward(
                input_ids, labels=labels, num_items_in_batch=num_items_in_batch, **kwargs
            )

    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model=Spy(config()), args=arguments, train_dataset=samples)
    assert trainer.model_accepts_loss_kwargs
    trainer.train()
    assert seen == [int((labels != -100).sum())] * 2


@pytest.mark.parametrize("cls", [BertForMaskedLM, BertForPreTraining])
def test_compiled_once_for_all_batches_of_a_shape(hold, cls):
    torch._dynamo.reset()
    model = cls(config())
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    mask = MASKS["right"]
    for step in range(2):
        ids, labels = batch(mask)
        positions = padded_positions(labels, spare=ROWS * LENGTH)[: ROWS * LENGTH]
        arguments = {
            "attention_mask": mask.roll(step, 0),
            "labels": labels,
            "masked_positions": positions,
            "num_items_in_batch": torch.tensor(5 + step),
        }

        def run(model, ids=ids, arguments=arguments, **more):
            return {"loss": model(ids, **arguments, **more).loss}

        hold(model, model, lambda _, run=run: run(compiled), lambda m, run=run: run(m, unpad=False))
    assert counter.frame_count == 1


def test_compiled_without_positions_drops_no_label(hold):
    torch._dynamo.reset()
    model = BertForMaskedLM(config())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for count in (0, 1, ROWS * LENGTH):
        ids = torch.randint(1, VOCAB, (ROWS, LENGTH))
        labels = torch.full((ROWS * LENGTH,), -100)
        labels[torch.randperm(ROWS * LENGTH)[:count]] = 0
        labels = labels.view(ROWS, LENGTH)
        hold(
            model,
            model,
            lambda _, ids=ids, labels=labels: {"loss": compiled(ids, labels=labels).loss},
            lambda model, ids=ids, labels=labels: {"loss": model(ids, labels=labels).loss},
        )


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"labels": torch.zeros(ROWS, 3, dtype=torch.int64)}, ArgumentValueError, "labels"),
        ({"labels": torch.zeros(ROWS, LENGTH)}, ArgumentTypeError, "labels"),
        ({"labels": torch.full((ROWS, LENGTH), VOCAB)}, ArgumentValueError, "target"),
        ({"input_ids": torch.full((ROWS, LENGTH), VOCAB)}, ArgumentValueError, "vocabulary"),
        ({"input_ids": torch.full((ROWS, LENGTH), -1)}, ArgumentValueError, "vocabulary"),
        ({"input_ids": torch.zeros(ROWS, LENGTH)}, ArgumentTypeError, "input_ids"),
        ({"masked_positions": torch.zeros(3)}, ArgumentTypeError, "masked_positions"),
        ({"masked_positions": torch.zeros(1, 3).long()}, ArgumentValueError, "masked_positions"),
        ({"masked_positions": torch.tensor([ROWS * LENGTH])}, ArgumentValueError, "positions"),
    ],
)
def test_bad_input_raises_a_typed_error(change, error, words):
    ids, labels = batch()
    for cls in (BertForMaskedLM, BertForPreTraining):
        with pytest.raises(error, match=words):
            cls(config())(**{"input_ids": ids, "labels": labels, **change})


def test_bad_next_sentence_labels_raise_a_typed_error():
    ids, _ = batch()
    model = BertForPreTraining(config())
    with pytest.raises(ArgumentValueError, match="next_sentence_label"):
        model(ids, next_sentence_label=torch.zeros(ROWS + 1, dtype=torch.int64))
    with pytest.raises(ArgumentTypeError, match="next_sentence_label"):
        model(ids, next_sentence_label=torch.zeros(ROWS))


def test_the_loss_takes_a_quarter_of_the_parents_memory():
    """At its peak, forward and backward, the gradient of the vocabulary's weight included."""
    sizes = config()
    sizes.vocab_size, batch_size, length = 3000, 8, 64
    parent = transformers.BertForMaskedLM._from_config(sizes)
    head = parent.cls.predictions
    hidden = torch.randn(batch_size, length, sizes.hidden_size, requires_grad=True)
    ids = torch.randint(0, sizes.vocab_size, (batch_size, length))
    labels = ids.masked_fill(torch.rand(ids.shape) > 0.15, -100)

    def theirs():
        logits = parent.cls(hidden)
        nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()

    def ours():
        mlm_loss(hidden, labels, head.transform, head.decoder).backward()

    peaks = []
    for run in (theirs, ours):
        for _ in range(2):  # the first call allocates what stays
            parent.zero_grad()
            hidden.grad = None
            peak = peak_bytes(run, torch.device("cpu"))
        peaks.append(peak)
    assert peaks[1] <= peaks[0] / 4, peaks
